"""Memory of training: forecasts, and token budgets that fit the device.

step_memory    counts the bytes of the tensors in a training step of a model on the meta device

step_forecast  memory of training steps by token budget
budget         token budgets that fit the device
plan           `angle-llm plan`, with the forecast of a whole run in `run_forecast`
"""
