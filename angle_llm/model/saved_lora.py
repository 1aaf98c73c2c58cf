"""LoRA settings of a run that continues training from a saved adapter: its rank, alpha, dropout and targets."""

from __future__ import annotations

from typing import Any

from angle_llm.model.source.checks import as_artifact_error, read_json
from angle_llm.model.source.resolve import ModelSource
from angle_llm.model.source.saved_adapter import CONFIG_NAME
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import LoraSettings, ModelSettings


def lora_of_run(source: ModelSource, model: ModelSettings, requested: LoraSettings) -> LoraSettings:
    """Return the LoRA settings for training: the settings of the saved adapter that training continues, else `requested`.

    Raises:
        SettingsError: if a setting in `requested` is neither the default nor the value of the saved adapter. Also if
            `model.bits` differs from the bits in the training of the saved adapter.
        ArtifactError: if the adapter folder is damaged.
    """
    # Settings of the saved adapter.
    if source.adapter is None:
        return requested
    folder = source.adapter
    default = LoraSettings()
    with as_artifact_error(folder):
        config = read_json(folder / CONFIG_NAME)
        targets = config["target_modules"]
        saved = LoraSettings(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            targets=[targets] if isinstance(targets, str) else sorted(targets),
            train_dense=requested.train_dense,
        )
    # Settings that the user chose must agree.
    for name, value in vars(requested).items():
        expected: Any = getattr(saved, name)
        agrees = sorted(value) == expected if name == "targets" else value == expected
        if value != getattr(default, name) and not agrees:
            raise SettingsError(
                f"--lora.{name} is {value}, but training continues the adapter in {model.path}, whose {name} is {expected}. Omit "
                f"--lora.{name}; or merge the adapter (angle-llm merge), and train the merged model."
            )
    if source.card is not None and (bits := source.card.bits) != model.bits:
        raise SettingsError(
            f"--model.bits is {model.bits}, but the adapter in {model.path} was trained with {bits} and fits these weights only. "
            f"Set --model.bits {bits}, or merge the adapter (angle-llm merge)."
        )
    return saved
