"""Memory of training: forecasts, and token budgets that fit the device.

step_memory    counts the bytes of the tensors in the passes of a training step
device_memory  memory of a device by purpose (weights, optimizer, …), and the memory that is free
budget         memory of training steps, and token budgets that fit the device
plan           `angle-llm plan`
"""
