"""Fine-tune language models into text-embedding models with the AnglE losses and LoRA.

Public names are imported on first access, so `import angle_llm` is fast and imports no heavy library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from angle_llm.data.batch import TextBatch as TextBatch
    from angle_llm.data.formats import DataError as DataError
    from angle_llm.io import FolderError as FolderError
    from angle_llm.losses import AngleObjective as AngleObjective
    from angle_llm.losses import FalseNegatives as FalseNegatives
    from angle_llm.losses import FunctionTerm as FunctionTerm
    from angle_llm.losses import Objective as Objective
    from angle_llm.losses import ObjectiveValue as ObjectiveValue
    from angle_llm.losses import Relation as Relation
    from angle_llm.losses import SumOfTerms as SumOfTerms
    from angle_llm.losses import Term as Term
    from angle_llm.model.encoder import SentenceEncoder as SentenceEncoder
    from angle_llm.model.source.checks import ArtifactError as ArtifactError
    from angle_llm.prompts import PromptTemplate as PromptTemplate
    from angle_llm.prompts import load_prompt as load_prompt
    from angle_llm.run import fine_tune as fine_tune
    from angle_llm.settings.parsing import SettingsError as SettingsError
    from angle_llm.settings.train import TrainSettings as TrainSettings
    from angle_llm.tools.search import VectorSearch as VectorSearch
    from angle_llm.train.callbacks import Callback as Callback
    from angle_llm.train.callbacks import EarlyStopping as EarlyStopping
    from angle_llm.train.callbacks import TrainingState as TrainingState
    from angle_llm.train.run_folder import FineTuned as FineTuned
    from angle_llm.train.trainer import Interrupted as Interrupted
    from angle_llm.train.trainer import TrainingError as TrainingError

__version__ = "0.2.0"

_NAMES = {  # module → public names that it defines
    "data.batch": "TextBatch",
    "data.formats": "DataError",
    "io": "FolderError",
    "losses": "AngleObjective FalseNegatives FunctionTerm Objective ObjectiveValue Relation SumOfTerms Term",
    "model.encoder": "SentenceEncoder",
    "model.source.checks": "ArtifactError",
    "prompts": "PromptTemplate load_prompt",
    "run": "fine_tune",
    "settings.parsing": "SettingsError",
    "settings.train": "TrainSettings",
    "tools.search": "VectorSearch",
    "train.callbacks": "Callback EarlyStopping TrainingState",
    "train.run_folder": "FineTuned",
    "train.trainer": "Interrupted TrainingError",
}
_MODULE_OF = {name: f"angle_llm.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
