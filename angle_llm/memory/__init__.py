"""Memory of training: forecasts, and token budgets that fit the device.

step_memory    counts the bytes of the tensors in the passes of a training step
device_memory  memory of a device by purpose (weights, optimizer, …), and the memory that is free
step_forecast  memory of training steps by token budget
budget         token budgets that fit the device
plan           `angle-llm plan`
"""
