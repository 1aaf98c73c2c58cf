"""Fine-tune language models into text-embedding models with the AnglE losses and LoRA.

Public names are imported on first access, so `import angle_llm` is fast and imports no heavy library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from angle_llm.data.batch import TextBatch as TextBatch
    from angle_llm.losses import AngleObjective as AngleObjective
    from angle_llm.losses import ObjectiveValue as ObjectiveValue
    from angle_llm.model.encoder import SentenceEncoder as SentenceEncoder
    from angle_llm.prompts import PromptTemplate as PromptTemplate
    from angle_llm.prompts import load_prompt as load_prompt
    from angle_llm.run import fine_tune as fine_tune
    from angle_llm.settings.train import TrainSettings as TrainSettings
    from angle_llm.tools.search import VectorSearch as VectorSearch

__version__ = "0.2.0"

_MODULE_OF = {  # public name → module that defines the name
    "AngleObjective": "angle_llm.losses.angle",
    "ObjectiveValue": "angle_llm.losses.terms",
    "PromptTemplate": "angle_llm.prompts",
    "SentenceEncoder": "angle_llm.model.encoder",
    "TextBatch": "angle_llm.data.batch",
    "TrainSettings": "angle_llm.settings.train",
    "VectorSearch": "angle_llm.tools.search",
    "fine_tune": "angle_llm.run",
    "load_prompt": "angle_llm.prompts",
}

__all__ = sorted(["__version__", *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
