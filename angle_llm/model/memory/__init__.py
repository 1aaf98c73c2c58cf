"""Memory of training and encoding.

meta_model     models on the meta device (without weight values), from which memory is forecast
step_memory    counts the bytes of the tensors in a training step of a model on the meta device
token_budget   token limits of a training step, and out-of-memory errors that all ranks handle together
out_of_memory  detects out-of-memory errors, and encodes with smaller micro-batches after an error
allocator      limits memory that oneDNN keeps on a CPU, and reuses memory of the C library

The memory forecast of a run is in `train/forecast`, the choice of token budgets in `train/budget`.
"""
