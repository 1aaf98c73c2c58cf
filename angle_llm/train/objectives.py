"""What a run learns, from its settings: its task, and the loss of each dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from angle_llm.data.mixture import Mixture, sets_of
from angle_llm.losses import AngleObjective, FalseNegatives, FunctionTerm, NestedObjective, Objective, Term
from angle_llm.losses.ranking import RankingTerm
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import DepthsHead, Head
from angle_llm.model.meta_model import put_in
from angle_llm.model.source.resolve import ModelSource
from angle_llm.objective import ObjectiveFields
from angle_llm.settings.parsing import SettingsError, merged_settings, settings_from_dict, settings_to_dict
from angle_llm.settings.train import ObjectiveSettings, TrainSettings
from angle_llm.train.pretraining import TASKS, MaskedTokenTask, TwoViewsTask


@dataclass(frozen=True)
class PairTask:
    """Training on scored pairs; with `settings.nested`, also of truncated vectors and fewer layers."""

    settings: TrainSettings
    partition_problem: ClassVar[str | None] = None
    """Why ZeRO-3 and FSDP cannot be used, with advice, for an error message; None if they can."""

    def loss(self, plain: Objective) -> Objective:
        """Return the loss of a dataset; `plain` is the loss on full vectors.

        Raises:
            SettingsError: for odd nested dimensions with an angle term.
        """
        nested = self.settings.nested
        if not nested.dimensions and not nested.layers:
            return plain
        odd = [width for width in nested.dimensions if width % 2]
        if odd and any(isinstance(term, RankingTerm) and term.name == "angle" for term in _terms(plain)):
            raise SettingsError(
                f"nested.dimensions: expected even numbers, as an angle reads two halves of the columns; got {odd[0]}. "
                "Use even numbers, or set objective.angle_weight to 0."
            )
        return NestedObjective(plain, nested.dimensions, nested.layers)

    def head(self, encoder: SentenceEncoder, _: ModelSource) -> Head:
        """Return the head for an encoder that has its adapter.

        Raises:
            ValueError: if `nested.layers` does not fit the backbone (see `DepthsHead`).
        """
        layers = self.settings.nested.layers
        return DepthsHead(encoder.model, layers) if layers else Head()

    def planned_head(self, encoder: SentenceEncoder, backbone: Any) -> Head:
        """Return the head for a forecast; `backbone` is on the meta device, and `encoder` is a small copy.

        Raises:
            ValueError: see `head`.
        """
        if self.settings.nested.layers:
            DepthsHead(put_in(encoder.model, backbone), self.settings.nested.layers)  # raises for wrong layers
        return Head()


def task_of(settings: TrainSettings) -> PairTask | MaskedTokenTask | TwoViewsTask:
    """Return what a run learns: scored pairs, or a pretraining task."""
    name = settings.pretraining.task
    return PairTask(settings) if name is None else TASKS[name](settings)


def make_losses(settings: TrainSettings, loss: Objective | None = None) -> list[Objective]:
    """Return one loss per training dataset: `settings.objective` with the fields that the dataset overrides.

    `loss` of a Python program replaces the objective of the settings. The task of the settings adds nested depths and
    widths, or replaces the loss (`task_of`).

    Raises:
        SettingsError: if a dataset sets its own teacher or another guide, no dataset uses the teacher of the run, or a
            option of the in-batch term has no effect in any dataset.
        ValueError: if a field of an objective is out of range.
    """
    # Loss of each dataset; the teacher and the guide belong to the run.
    common = settings_to_dict(settings.objective)
    task = task_of(settings)
    objectives: list[ObjectiveSettings] = []
    losses: list[Objective] = []
    for dataset in sets_of(settings.data):
        name = f"objective of {dataset.path}"
        objective = settings_from_dict(ObjectiveSettings, merged_settings(common, dataset.objective), name)
        if objective.teacher != settings.objective.teacher:
            raise SettingsError(
                f"{name}: expected no teacher, got {objective.teacher!r}. Set objective.teacher for the run, and "
                "objective.teacher_vector_weight or teacher_similarity_weight per dataset."
            )
        guide = objective.false_negatives.guide
        if guide not in (None, settings.objective.false_negatives.guide):
            raise SettingsError(
                f"{name}: expected the guide of the run or none, got {guide!r}. Set objective.false_negatives.guide for "
                "the run."
            )
        if settings.pretraining.task is not None and dataset.objective:
            raise SettingsError(f"{name}: expected none with --pretraining.task. Omit it.")
        objectives.append(objective)
        losses.append(task.loss(_plain_loss(objective) if loss is None else loss))
    if loss is not None and (missing := loss.needs & {"teacher_vectors", "guide"}):
        raise SettingsError(
            f"loss needs {', '.join(missing)}, which only objective.teacher and objective.false_negatives.guide supply. Set the "
            "terms of the teacher in objective, and pass no loss."
        )
    # Every setting must be used.
    is_set = any(objective != ObjectiveSettings() for objective in objectives)
    if loss is not None and (is_set or settings.pretraining.task is not None):
        raise SettingsError(
            "loss excludes the settings objective and pretraining.task. To add a term to the AnglE objective, pass a list: "
            "loss=[AngleObjective(…), term]."
        )
    if settings.objective.teacher is not None and not any("teacher_vectors" in set_loss.needs for set_loss in losses):
        raise SettingsError(
            "--objective.teacher: expected --objective.teacher-vector-weight or --objective.teacher-similarity-weight above 0, "
            "got 0 for both. Set one of them, such as to 1."
        )
    _check_used(objectives)
    return losses


def _plain_loss(settings: ObjectiveSettings) -> AngleObjective:
    """Convert settings of an objective to a loss on full vectors, without nested widths or depths."""
    rule = settings.false_negatives
    false_negatives = None
    if rule.is_on:
        false_negatives = FalseNegatives(rule.margin, rule.ratio, rule.scope, guided=rule.guide is not None)
    values = {field.name: getattr(settings, field.name) for field in fields(ObjectiveFields)}
    return AngleObjective(**values, false_negatives=false_negatives)


def _check_used(objectives: Sequence[ObjectiveSettings]) -> None:
    """Check that the options of the in-batch term have an effect in at least one of the objectives.

    They need `in_batch_weight` above 0.

    Raises:
        SettingsError: names the setting without effect.
    """
    unset = ObjectiveSettings()
    for name in ("false_negatives", "hardness_strength", "contrastive_form"):
        users = [objective for objective in objectives if getattr(objective, name) != getattr(unset, name)]
        if users and not any(objective.in_batch_weight for objective in users):
            raise SettingsError(
                f"objective.{name} is set, but objective.in_batch_weight is 0. Set it above 0, or omit {name}."
            )


def checked_data(losses: Sequence[Objective], data: Mixture) -> Mixture:
    """Return the data, without classes if no loss can read them, because classes change the order of the examples.

    `losses` has one loss per dataset of `data`.

    Raises:
        SettingsError: if a dataset lacks what its loss reads: teacher scores, or classes.
    """
    _check_examples(losses, data)
    terms = chain.from_iterable(map(_terms, losses))
    reads_classes = any("label" in loss.needs for loss in losses) or any(
        isinstance(term, FunctionTerm) for term in terms
    )
    return data if reads_classes else data.without_classes()


def _terms(loss: Objective) -> Sequence[Term]:
    """Return the terms of a loss on full vectors; empty if the loss is not a sum of terms."""
    terms: Sequence[Term] = getattr(getattr(loss, "plain", loss), "terms", ())
    return terms


def _check_examples(losses: Sequence[Objective], data: Mixture) -> None:
    """Check that the data have the teacher scores or classes that a loss reads, and that all classes are used.

    A dataset without classes needs a term besides the class term. Raises `SettingsError`.
    """
    if any("label" in loss.needs for loss in losses) and all(class_N is None for class_N in data.draws.classes):
        raise SettingsError(
            "the data have no classes, which the loss reads (objective.class_weight): expected texts with a class (--data.format "
            "labelled_text)."
        )
    for loss, dataset, class_N in zip(losses, data.sets, data.draws.classes, strict=True):
        if "teacher" in loss.needs and not any(getattr(example, "scores", None) for example in dataset.examples):
            raise SettingsError(
                f"{dataset.name} has no teacher scores, which the loss reads (objective.kl_weight, objective.margin_mse_weight): "
                "expected groups with scores (--data.format group with a column scores). Set the weights to 0, or add scores."
            )
        if class_N is not None and loss.needs_pairs:
            raise SettingsError(
                f"{dataset.name} has texts with a class: set --objective.class-weight above 0, such as to 1."
            )
        terms = _terms(loss)
        if class_N is None and terms and all("label" in term.needs for term in terms):
            raise SettingsError(
                f"{dataset.name} has no classes, and class_weight is the only weight, so nothing is learned from it. Set "
                "--objective.in-batch-weight 1, or the objective of each dataset (data.sets)."
            )
        if class_N is not None and "label" in loss.needs and (classes := len(np.unique(class_N))) in (1, len(class_N)):
            raise SettingsError(
                f"{dataset.name}: expected two classes or more, and a class with two texts; got {len(class_N):,} texts in "
                f"{classes:,} classes. Check which column is the label."
            )
