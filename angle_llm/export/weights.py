"""Check that the stored weights of a model are the merge of an adapter, computed in float32 and rounded once.

A comparison of vectors cannot detect a merge in bfloat16 arithmetic: it changes vectors about as much as rounding the
weights to bfloat16, but loses part of the training. A comparison of weights can. The merged weight W', computed in
float32 in any order, is within a known distance of the exact W' (computed here in float64), and rounding preserves order.
So a stored weight is correct if it is between the two ends of this interval, both rounded to the stored dtype. One tensor
is in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from angle_llm.model.layers.depth import cut_layers
from angle_llm.model.layers.lora import is_transposed, read_adapter
from angle_llm.model.source.backbone import BackboneLocation
from angle_llm.model.source.checks import CARD_NAME, ArtifactError
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import locate, split_revision
from angle_llm.model.source.weights import BaseWeights, open_base


@dataclass(frozen=True)
class WeightsCount:
    """Number of compared weights of a model (`numbers`), and of weights that differ from a float32 merge (`wrong`).

    The merge is of a LoRA adapter into its base.
    """

    numbers: int
    wrong: int
    worst_tensor: str
    """Name of the tensor with the largest fraction of wrong weights; empty if no weight is wrong."""

    def __str__(self) -> str:
        return f"{self.wrong:,} of {self.numbers:,} stored weights differ from a merge in float32"


def open_adapters_base(source: Path, card: EncoderCard, *, original: bool) -> BaseWeights:
    """Open the base weights of a saved adapter, with the values in training (rounded, dequantised) or as stored.

    `source` is the folder of the adapter, and `card` its encoder card (metadata). `original` opens the weights as
    stored.

    Raises:
        FileNotFoundError, ArtifactError: if the base is missing, damaged, or has other weights than in training.
    """
    dtype, bits = ("float32", None) if original else (card.dtype, card.bits)
    base = open_base(locate(card.base or ""), dtype=dtype, revision=card.base_revision, bits=bits)
    # Rounding to float16 and then to the fingerprint's bfloat16 differs from rounding to bfloat16 at once.
    comparable = not original or card.dtype != "float16"
    if comparable and card.base_fingerprint not in (None, found := base.fingerprint()):
        raise ArtifactError(
            f"{source} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has {found}. "
            f"Restore the original base, or name the right base in {source / CARD_NAME}."
        )
    if card.layers is not None:
        cut_layers(base.skeleton, card.layers)
    return base


def count_wrong(adapter: Path, model: str | Path, dtype: str, *, original: bool = False) -> WeightsCount | None:
    """Count the stored weights of a merged model that differ from a float32 merge of an adapter into its base.

    Return None for a model that cannot be compared: a GGUF file, which rounds differently; a folder that only another
    library opens; a model with other tensors.

    Args:
        adapter: folder of the adapter.
        model: folder or name of the merged model.
        dtype: dtype of the stored weights.
        original: merge into the stored base weights instead of the values in training.

    Raises:
        FileNotFoundError, ArtifactError: for a base that cannot be opened, or an adapter that is not supported.
    """
    folder = Path(model).expanduser()
    try:
        name, revision = split_revision(str(model))
        location = BackboneLocation(str(folder)) if folder.is_dir() else locate(name)
        stored = None if location.gguf_file else open_base(location, dtype=dtype, revision=revision)
    except (OSError, ValueError):
        stored = None
    if stored is None:
        return None
    updates = read_adapter(adapter).updates
    base = open_adapters_base(adapter, EncoderCard.read(adapter), original=original)
    wanted, found = (
        {name: tensor.shape for name, tensor in weights.skeleton.state_dict().items()} for weights in (base, stored)
    )
    extra = found.keys() - wanted.keys()  # biases of 0, if Qwen2 is stored as LLaMA
    if wanted != {name: found[name] for name in found.keys() - extra} or any(stored.read(name).any() for name in extra):
        return None
    numbers = wrong = 0
    worst_part, worst_tensor = 0.0, ""
    for name in wanted:
        path, _, kind = name.rpartition(".")
        values, number = base.values(name), stored.read(name)
        if kind == "weight" and path in updates:
            transposed = is_transposed(base.skeleton.get_submodule(path))
            exact, reach = updates[path].exactly(values, transposed=transposed)
            low, high = (exact - reach).to(number.dtype), (exact + reach).to(number.dtype)
            right = (low <= number) & (number <= high)
        else:
            right = number == values.to(number.dtype)
        count = int(right.numel() - right.sum())
        numbers, wrong = numbers + right.numel(), wrong + count
        if count > worst_part * right.numel():
            worst_part, worst_tensor = count / right.numel(), name
    return WeightsCount(numbers, wrong, worst_tensor)
