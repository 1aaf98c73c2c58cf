"""An encoder leaves home: its forms are made here, and each is shown to be the same encoder as the one that was trained."""

from angle_llm.export.command import MergeSettings, VerifySettings, merge_main, verify_main
from angle_llm.export.merge import merge
from angle_llm.export.report import Comparison, FormFacts, Verification
from angle_llm.export.verify import VerificationError, verify

__all__ = [
    "Comparison",
    "FormFacts",
    "MergeSettings",
    "Verification",
    "VerificationError",
    "VerifySettings",
    "merge",
    "merge_main",
    "verify",
    "verify_main",
]
