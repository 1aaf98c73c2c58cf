"""Figures from the literature, to stand beside a measured row: Spearman × 100, "all" protocol, SentEval's text.

Sources: Li & Li, AnglE (arXiv 2309.12871) and the cards of its LLaMA adapters, SimCSE-LLaMA2 included; Jiang et al.
(2023), PromptEOL; Gao et al. (2021), SimCSE. SICK-R is the test split, 4,927 pairs. The evaluation code of AnglE and
PromptEOL edits the sentences of models that take a prompt (`--edits published`), and leaves the others as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from angle_llm.evaluate.tasks import PUBLISHED_TASKS


@dataclass(frozen=True)
class PublishedRow:
    """A model's figures by task name (empty where only the average is known) and its average over all seven tasks."""

    model: str
    spearman: dict[str, float]
    average: float

    def average_over(self, tasks: tuple[str, ...]) -> float | None:
        """Mean over `tasks`, None where this row does not have them all. All seven: the average as published."""
        if set(tasks) == set(PUBLISHED_TASKS):
            return self.average
        if not tasks or any(task not in self.spearman for task in tasks):
            return None
        return sum(self.spearman[task] for task in tasks) / len(tasks)


def _row(model: str, *figures: float, average: float) -> PublishedRow:
    return PublishedRow(model, dict(zip(PUBLISHED_TASKS, figures, strict=True)) if figures else {}, average)


PUBLISHED = (
    _row("AnglE-LLaMA2-13B", 79.33, 90.65, 86.89, 90.45, 87.32, 89.69, 81.32, average=86.52),
    _row("AnglE-LLaMA2-7B v2", 79.00, 90.56, 85.79, 89.43, 87.00, 88.97, 80.94, average=85.96),
    _row("AnglE-LLaMA2-7B v1", 78.68, 90.58, 85.49, 89.56, 86.91, 88.92, 81.18, average=85.90),
    _row("PromptEOL LLaMA-7B", average=85.70),
    _row("PromptEOL OPT-2.7B", average=85.62),
    _row("SimCSE-LLaMA2-7B", average=85.24),
    _row("PromptEOL OPT-1.3B", average=84.79),
    _row("AnglE-BERT-base", 75.09, 85.56, 80.66, 86.44, 82.47, 85.16, 81.23, average=82.37),
    _row("sup-SimCSE-BERT-base", average=81.57),
    _row("LLaMA2-7B untuned, prompted", 50.66, 73.32, 62.76, 67.00, 70.98, 63.28, 67.40, average=65.06),
)
