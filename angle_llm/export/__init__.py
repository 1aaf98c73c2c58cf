"""An encoder leaves home: its forms are made here, and each is shown to be the same encoder as the one that was trained."""

from angle_llm.export.command import ExportSettings, MergeSettings, VerifySettings, export_main, merge_main, verify_main
from angle_llm.export.library import MissingLibraryError
from angle_llm.export.merge import merge
from angle_llm.export.report import Comparison, FormFacts, Verification
from angle_llm.export.to_sentence_transformers import export_sentence_transformers
from angle_llm.export.verify import VerificationError, verify

__all__ = [
    "Comparison",
    "ExportSettings",
    "FormFacts",
    "MergeSettings",
    "MissingLibraryError",
    "Verification",
    "VerificationError",
    "VerifySettings",
    "export_main",
    "export_sentence_transformers",
    "merge",
    "merge_main",
    "verify",
    "verify_main",
]
