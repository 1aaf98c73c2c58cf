"""Check that the stored weights of a model are the merge of an adapter, computed in float32 and rounded once.

A comparison of vectors cannot detect a merge in bfloat16 arithmetic: it changes vectors about as much as rounding the
weights to bfloat16, but loses part of the training. A comparison of weights can. The merged weight W', computed in
float32 in any order, is within a known distance of the exact W' (computed here in float64), and rounding preserves order.
So a stored weight is correct if it is between the two ends of this interval, both rounded to the stored dtype. One tensor
is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from angle_llm.model.layers.depth import cut_layers
from angle_llm.model.layers.lora import is_transposed
from angle_llm.model.source.backbone import BackboneLocation
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import locate, split_revision
from angle_llm.model.source.saved_adapter import LoraAdapter, read_adapter
from angle_llm.model.source.weights import BaseWeights, open_base


@dataclass(frozen=True)
class WeightsCount:
    """Number of compared weights of a model (`numbers`), and of weights that differ from a float32 merge (`wrong`).

    The merge is of a LoRA adapter into its base, or of several models.
    """

    numbers: int
    wrong: int
    worst_tensor: str
    """Name of the tensor with the largest fraction of wrong weights; empty if no weight is wrong."""

    def __str__(self) -> str:
        return f"{self.wrong:,} of {self.numbers:,} stored weights differ from a merge in float32"


@dataclass(frozen=True)
class MergedWeights:
    """Weights of a merge of one or several models (see `merge.merge`), computed one tensor at a time."""

    parts: Sequence[tuple[BaseWeights, LoraAdapter | None]]
    """The weights of each model, and its adapter, if any."""
    shares: Sequence[float] = (1.0,)
    """Weight of each model; the sum is 1."""

    def tensor(self, name: str, *, exactly: bool = False) -> tuple[Tensor, Any]:
        """Return the tensor `name` of the merged model, which must not be changed, and a bound of its rounding error.

        Adapters are merged in float32, and the bound is 0. With `exactly`, adapters are merged in float64, and the bound is
        an upper bound on the rounding error of the merge in float32. Models are combined in float64.
        """
        path, _, parameter = name.rpartition(".")
        tensors, bounds = list[Tensor](), list[Any]()
        for base, adapter in self.parts:
            tensor, bound = base.values(name), 0  # type: Tensor, Any
            if adapter is not None and parameter == "weight" and path in adapter.updates:
                update = adapter.updates[path]
                transposed = is_transposed(base.skeleton.get_submodule(path))
                if exactly:
                    tensor, bound = update.exactly(tensor, transposed=transposed)
                else:
                    tensor = update.merged(tensor, transposed=transposed)
            tensors.append(tensor)
            bounds.append(bound)
        if len(tensors) == 1 or not tensors[0].is_floating_point():
            return tensors[0], bounds[0]
        terms = list(zip(self.shares, tensors, bounds, strict=True))
        bound = sum(share * error for share, _, error in terms)
        total: Any = sum(share * tensor.double() for share, tensor, _ in terms)
        return total, bound


def open_adapters_base(source: Path, card: EncoderCard) -> BaseWeights:
    """Open the base weights of a saved adapter, with the values in training (rounded, dequantised).

    `source` is the folder of the adapter, and `card` its encoder card (metadata).

    Raises:
        FileNotFoundError, ArtifactError: if the base is missing, damaged, or has other weights than in training.
    """
    location = replace(locate(card.base or "", card.base_revision), bidirectional=card.attention is not None)
    base = open_base(location, dtype=card.dtype, revision=card.base_revision, bits=card.bits)
    card.check_base(base.fingerprint(), card.dtype, source)
    if card.layers is not None:
        cut_layers(base.skeleton, card.layers)
        shapes = {name: tensor.shape for name, tensor in base.skeleton.state_dict().items()}
        read = base.read
        # A tensor of EmbeddingGemma 2 has rows for all layers.
        base = replace(base, read=lambda name: read(name)[tuple(map(slice, shapes[name]))])
    return base


def count_wrong(adapter: Path, model: str | Path, dtype: str) -> WeightsCount | None:
    """Count the stored weights of a merged model that differ from a float32 merge of an adapter into its base.

    Return None for a model that cannot be compared: a GGUF file, which rounds differently; a folder that only another
    library opens; a model with other tensors.

    Args:
        adapter: folder of the adapter.
        model: folder or name of the merged model.
        dtype: dtype of the stored weights.

    Raises:
        FileNotFoundError, ArtifactError: for a base that cannot be opened, or an adapter that is not supported.
    """
    folder = Path(model).expanduser()
    try:
        name, revision = split_revision(str(model))
        location = BackboneLocation(str(folder)) if folder.is_dir() else locate(name, revision)
        stored = None if location.gguf_file else open_base(location, dtype=dtype, revision=revision)
    except (OSError, ValueError):
        stored = None
    if stored is None:
        return None
    base = open_adapters_base(adapter, EncoderCard.read(adapter))
    shapes = {name: tensor.shape for name, tensor in base.skeleton.state_dict().items()}
    stored_shapes = {name: tensor.shape for name, tensor in stored.skeleton.state_dict().items()}
    extra = stored_shapes.keys() - shapes.keys()  # biases of 0, if Qwen2 is stored as LLaMA
    common = {name: shape for name, shape in stored_shapes.items() if name not in extra}
    if common != shapes or any(stored.read(name).any() for name in extra):
        return None
    return count_differences(stored, shapes, MergedWeights([(base, read_adapter(adapter))]))


def count_differences(stored: BaseWeights, names: Iterable[str], merged: MergedWeights) -> WeightsCount:
    """Count the stored weights in the tensors `names` that differ from a merge, computed in float32 and rounded once."""
    numbers = wrong = 0
    worst_part, worst_tensor = 0.0, ""
    for name in names:
        exact, reach = merged.tensor(name, exactly=True)
        number = stored.read(name)
        low, high = (exact + -reach).to(number.dtype), (exact + reach).to(number.dtype)
        right = (low <= number) & (number <= high) & number.isfinite()
        count = int(right.numel() - right.sum())
        numbers, wrong = numbers + right.numel(), wrong + count
        if count > worst_part * right.numel():
            worst_part, worst_tensor = count / right.numel(), name
    return WeightsCount(numbers, wrong, worst_tensor)
