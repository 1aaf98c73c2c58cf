"""Check that stored weights are an adapter's merge, computed in float32 and rounded once.

Vectors cannot show it: rounding every weight to bfloat16 moves them about as far as adding the adapter in bfloat16, but
the second loses training. The weights can: W' computed in float32, in any order, lies within a known distance of the
exact W' (computed here in float64), and rounding preserves order. So a stored weight is correct if it lies between the
two ends of that interval, each rounded to the stored dtype. One tensor is in memory at a time.
"""

from __future__ import annotations

from pathlib import Path

from angle_llm.export.comparison import FormFacts, WeightsCount
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.backbone import BackboneLocation, locate
from angle_llm.model.depth import cut_layers
from angle_llm.model.lora import is_transposed, read_adapter
from angle_llm.model.weights import BaseWeights, open_base


def open_adapters_base(card: EncoderCard, *, original: bool) -> BaseWeights:
    """Open the base of an adapter with the values it was trained on, or with the stored values (`original`)."""
    return open_base(
        locate(card.base or ""),
        dtype="float32" if original else card.dtype,
        revision=card.base_revision,
        bits=None if original else card.bits,
    )


def compare_weights(two: dict[str | Path, FormFacts], *, original: bool) -> WeightsCount | None:
    """Count wrong weights of two forms; None unless one is an adapter and the other a model with unquantised weights.

    Also None for a GGUF file, which has other rounding, and for a folder that only another library can open.
    """
    adapters = [path for path, facts in two.items() if facts.kind == "adapter"]
    models = [path for path, facts in two.items() if facts.kind != "adapter" and "bits" not in facts.dtype]
    if not (adapters and models) or str(models[0]).endswith(".gguf"):
        return None
    name, facts = str(models[0]), two[models[0]]
    model = locate(name) if facts.kind == "backbone" else BackboneLocation(str(Path(name).expanduser()))
    try:
        stored = open_base(model, dtype=facts.dtype)
    except (OSError, ValueError):
        return None
    return count_wrong(Path(adapters[0]).expanduser(), stored, original=original)


def count_wrong(adapter: Path, stored: BaseWeights, *, original: bool = False) -> WeightsCount | None:
    """Compare a model's stored weights with the merge of a saved adapter; None if its tensors are not those of the
    base.

    Raises:
        FileNotFoundError, ArtifactError: for a model or base that cannot be opened, or an adapter that is not
        supported.
    """
    update_of = read_adapter(adapter).updates
    card = EncoderCard.read(adapter)
    base = open_adapters_base(card, original=original)
    if card.layers is not None:
        cut_layers(base.skeleton, card.layers)
    wanted, found = base.skeleton.state_dict(), stored.skeleton.state_dict()
    if {name: tensor.shape for name, tensor in wanted.items()} != {
        name: tensor.shape for name, tensor in found.items()
    }:
        return None
    numbers = wrong = 0
    worst_part, worst_tensor = 0.0, ""
    for name in wanted:
        path, _, kind = name.rpartition(".")
        values, number = base.values(name), stored.read(name)
        if kind == "weight" and path in update_of:
            transposed = is_transposed(base.skeleton.get_submodule(path))
            exact, reach = update_of[path].exactly(values, transposed=transposed)
            low, high = (exact - reach).to(number.dtype), (exact + reach).to(number.dtype)
            right = (low <= number) & (number <= high)
        else:
            right = number == values.to(number.dtype)
        count = int(right.numel() - right.sum())
        numbers, wrong = numbers + right.numel(), wrong + count
        if count > worst_part * right.numel():
            worst_part, worst_tensor = count / right.numel(), name
    return WeightsCount(numbers, wrong, worst_tensor)
