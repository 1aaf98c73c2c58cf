"""Memory of training and encoding.

meta_model     models without weights, from which memory is forecast
step_memory    counts the tensors of a training step of a meta model
token_budget   token limits of a training step, and out-of-memory errors that all ranks handle together
out_of_memory  detects out-of-memory errors; encoding with smaller micro-batches after an error
allocator      memory that oneDNN and the C library keep on a CPU

The forecast of a run is in `train/forecast`, the choice of token budgets in `train/budget`.
"""
