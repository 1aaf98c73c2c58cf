"""Check that stored weights are an adapter's merge, computed in float32 and rounded once.

Vectors cannot show it: rounding every weight to bfloat16 moves them about as far as adding the adapter in bfloat16, but
the second loses part of the training. The weights can: W' computed in float32, in any order, is within a known distance
of the exact W' (computed here in float64), and rounding preserves order. So a stored weight is correct if it is between
the two ends of that interval, each rounded to the stored dtype. One tensor is in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from angle_llm.model.artifact import EncoderCard
from angle_llm.model.backbone import BackboneLocation, locate
from angle_llm.model.checks import CARD_NAME, ArtifactError
from angle_llm.model.depth import cut_layers
from angle_llm.model.lora import is_transposed, read_adapter
from angle_llm.model.weights import BaseWeights, open_base


@dataclass(frozen=True)
class WeightsCount:
    """Stored weights of a model that are not those of its adapter's merge."""

    numbers: int
    wrong: int
    worst_tensor: str
    """Tensor with the largest share of wrong numbers; empty if none is wrong."""

    def __str__(self) -> str:
        return f"{self.wrong:,} of {self.numbers:,} stored weights differ from a merge in float32"


def open_adapters_base(source: Path, card: EncoderCard, *, original: bool) -> BaseWeights:
    """Open the base of an adapter with the values it was trained on, or with the stored values (`original`).

    Raises:
        FileNotFoundError, ArtifactError: if the base is missing, damaged, or not the one of training.
    """
    dtype, bits = ("float32", None) if original else (card.dtype, card.bits)
    base = open_base(locate(card.base or ""), dtype=dtype, revision=card.base_revision, bits=bits)
    # Rounding to float16 and then to the fingerprint's bfloat16 differs from rounding to bfloat16 at once.
    comparable = not original or card.dtype != "float16"
    if comparable and card.base_fingerprint not in (None, found := base.fingerprint()):
        raise ArtifactError(
            f"{source} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has {found}. "
            f"Restore the original base, or name the right one in {source / CARD_NAME}."
        )
    if card.layers is not None:
        cut_layers(base.skeleton, card.layers)
    return base


def count_wrong(adapter: Path, model: str | Path, dtype: str, *, original: bool = False) -> WeightsCount | None:
    """Compare the weights of a model, stored in `dtype`, with the merge of a saved adapter.

    None if they cannot be compared: a GGUF file has other rounding, some folders open in another library only, and
    another model has other tensors.

    Raises:
        FileNotFoundError, ArtifactError: for a base that cannot be opened, or an adapter that is not supported.
    """
    folder = Path(model).expanduser()
    try:
        location = BackboneLocation(str(folder)) if folder.is_dir() else locate(str(model))
        stored = None if location.gguf_file else open_base(location, dtype=dtype)
    except (OSError, ValueError):
        stored = None
    if stored is None:
        return None
    updates = read_adapter(adapter).updates
    base = open_adapters_base(adapter, EncoderCard.read(adapter), original=original)
    wanted, found = (
        {name: tensor.shape for name, tensor in one.skeleton.state_dict().items()} for one in (base, stored)
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
