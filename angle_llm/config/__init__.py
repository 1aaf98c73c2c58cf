"""The settings of a run: one object, written by a YAML file, the command line, or Python.

Each field explains itself in the line below it; the same line is its `--help` text. An unknown key is an error that names
the nearest known one. The resolved settings are saved with the run and start the same run again.
"""

from angle_llm.config.checked import Checked, SettingsError
from angle_llm.config.data import DataSettings, DataSource, MixedSet
from angle_llm.config.model import LoraSettings, ModelSettings
from angle_llm.config.objective import NestedSettings, ObjectiveSettings
from angle_llm.config.reading import (
    changed_settings,
    load_settings,
    merged_settings,
    parse_settings,
    save_settings,
    settings_from_dict,
    settings_to_dict,
)
from angle_llm.config.train import CheckpointSettings, EvaluationSettings, OptimizerSettings, TrainSettings

__all__ = [
    "Checked",
    "CheckpointSettings",
    "DataSettings",
    "DataSource",
    "EvaluationSettings",
    "LoraSettings",
    "MixedSet",
    "ModelSettings",
    "NestedSettings",
    "ObjectiveSettings",
    "OptimizerSettings",
    "SettingsError",
    "TrainSettings",
    "changed_settings",
    "load_settings",
    "merged_settings",
    "parse_settings",
    "save_settings",
    "settings_from_dict",
    "settings_to_dict",
]
