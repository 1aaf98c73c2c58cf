"""LoRA, quantized layers, activation checkpointing, and truncation of a backbone to its first layers.

These modules replace parts of libraries. A replacement computes the values of the original, up to rounding:

fused_lora                LoRA layers of peft, in every adapted model (`add_lora`, `apply_lora`). Fewer passes over memory,
                          also with dropout and on a quantized base. SmolLM2 on a CPU: 229 to 243 tokens/s in float32, 306
                          to 401 in bfloat16. In bfloat16 with dropout 1.18x the speed and 0.53 of the peak memory; on 4
                          bits 1.10x and 0.67, on 8 bits 1.25x and 0.58.
                          Test: `tests/model/test_layers.py`.
low_memory_layers         Frozen RMSNorm and SwiGLU layers of a trained adapter (`add_lora`, `make_trainable`), and of every
                          encoder on a GPU (`from_pretrained`), which save
                          fewer activations. LLaMA-7B, gathered keys: 6.00 to 4.13 MB per token; with dropout 0.1
                          7.12 to 5.24 MB. SmolLM2 on a CPU in bfloat16: 0.70 of the peak memory, equal time. Not
                          measured alone on a GPU, where a norm is one kernel instead of six. Test:
                          `tests/model/test_layers.py`.
compiled_rotary           Rotary position embeddings on a GPU as one kernel, for texts in one sequence, in training of an
                          adapter and in `encode`. LLaMA-7B on an H200, training, packed texts: 502 to 556 pairs/s. Test:
                          `tests/model/test_layers.py`.
quantized_layers          Attributes of bitsandbytes layers (`patch_bitsandbytes`, called for every `SentenceEncoder`).
                          Without it, training after an evaluation gives wrong gradients on some CPUs. Test:
                          `tests/model/test_quantization.py`.
fp8                       Linear layers of a frozen base in FP8 (`--model.bits fp8`), which compute other values. Not
                          measured on a GPU. Test: `tests/model/test_fp8.py`.
activation_checkpointing  The forward pass of all layers but the last, if activation checkpointing is enabled. It runs
                          with the attention of texts in one sequence, and hooks run once. LLaMA test model: less than
                          0.6 of the memory. Tests: `tests/model/test_layers.py`, `tests/memory/test_budget.py`.

Two further replacements are outside this package. `layout/attention` registers attention for texts in one sequence, and
selects attention kernels: up to 2x faster in bfloat16 for short texts on a CPU. `source/backbone.use_equal_states`
selects eager attention for models with capped attention scores, because the default of transformers 5.6 ignores the cap.
"""
