"""Replace layers of a backbone by versions that need less memory or time, and count the replaced layers."""

from __future__ import annotations

from collections import Counter

from torch import nn

from angle_llm.device import is_gpu
from angle_llm.model.layers.compiled_rotary import CompiledRotary, use_compiled_rotary
from angle_llm.model.layers.fused_lora import FusedLora, use_fused_lora
from angle_llm.model.layers.low_memory_layers import LowMemoryMlp, LowMemoryNorm, use_low_memory_layers


def replace_layers(adapted: nn.Module) -> None:
    """Replace LoRA layers, frozen norms and MLPs of a backbone with an adapter by versions that need less memory.

    The replacement is in place. Values are equal up to rounding.
    """
    use_fused_lora(adapted)
    use_low_memory_layers(adapted)


def replace_layers_of_encoder(model: nn.Module, *, in_one_sequence: bool) -> None:
    """Replace norms and MLPs of a model on a GPU as in training, and rotary embeddings if texts are in one sequence."""
    if is_gpu(next(model.parameters()).device):
        use_low_memory_layers(model)
        if in_one_sequence:
            use_compiled_rotary(model)


def replaced_layers(backbone: nn.Module) -> str:
    """Return the numbers of replaced layers by class as text, or `none`."""
    classes = (FusedLora, LowMemoryNorm, LowMemoryMlp, CompiledRotary)
    counts = Counter(type(layer).__bases__[0].__name__ for layer in backbone.modules() if isinstance(layer, classes))
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
