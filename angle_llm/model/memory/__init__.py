"""Memory of training and encoding.

meta_model     models on the meta device (without weight values), from which memory is forecast
step_memory    counts the bytes of the tensors in a training step of a model on the meta device
token_budget   token limits of a training step, and out-of-memory errors that all ranks handle together

The memory forecast of a run is in `train/forecast`, the choice of token budgets in `train/budget`.
"""
