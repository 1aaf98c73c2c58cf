"""Training that continues from a saved adapter, with its rank, alpha, dropout and targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from angle_llm.config import LoraSettings, ModelSettings
from angle_llm.model import hub
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import as_artifact_error, read_json
from angle_llm.model.kept_activations import keep_fewer_activations
from angle_llm.model.lora import CONFIG_NAME, without_adapter
from angle_llm.settings_io import SettingsError


def adapter_folder(path: str, revision: str | None = None) -> Path | None:
    """Return the folder of a saved adapter, None for another model. Errors as in `hub.find`."""
    folder = hub.find(path, revision).folder
    return folder if folder is not None and (folder / CONFIG_NAME).is_file() else None


def lora_of_run(model: ModelSettings, given: LoraSettings) -> LoraSettings:
    """Return the adapter settings of a run: those of the saved adapter at `model.path`, or `given` for a new one.

    Raises:
        SettingsError: if a given setting is neither the default nor that of the saved adapter, or the base has other bits
            than in its training.
        ArtifactError: for a damaged folder.
    """
    folder = adapter_folder(model.path, model.revision)
    if folder is None:
        return given
    config, default = read_json(folder / CONFIG_NAME), LoraSettings()
    with as_artifact_error(folder):
        targets = config["target_modules"]
        own = LoraSettings(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            targets=[targets] if isinstance(targets, str) else sorted(targets),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
        )
    for name, value in vars(given).items():
        expected: Any = getattr(own, name)
        same = sorted(value) == expected if name == "targets" else value == expected
        if value != getattr(default, name) and not same:
            raise SettingsError(
                f"--lora.{name} is {value}, but training continues the adapter in {model.path}, whose {name} is {expected}. Omit "
                f"--lora.{name}; or merge the adapter (angle-llm merge), and train the merged model."
            )
    if (bits := EncoderCard.read(folder).bits) != model.bits:
        raise SettingsError(
            f"--model.bits is {model.bits}, but the adapter in {model.path} was trained with {bits}: it fits these weights only. "
            f"Set --model.bits {bits}, or merge the adapter (angle-llm merge)."
        )
    return own


def make_trainable(adapted: nn.Module) -> None:
    """Make a loaded adapter trainable, as `add_lora` makes a new one."""
    config: Any = adapted.peft_config
    for one in config.values():
        one.inference_mode = False
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    without_adapter(adapted).config.use_cache = False  # type: ignore[union-attr]
    keep_fewer_activations(adapted)
