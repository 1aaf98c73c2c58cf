"""The loss of each dataset, built from the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence

from angle_llm.data.formats import Group
from angle_llm.data.mixture import Mixture, sets_of
from angle_llm.losses import AngleObjective, FalseNegatives, NestedObjective, Objective
from angle_llm.losses.pretraining import MaskedTokenLoss, TwoViews
from angle_llm.settings.parsing import SettingsError, merged_settings, settings_from_dict, settings_to_dict
from angle_llm.settings.train import ObjectiveSettings, TrainSettings


def make_losses(settings: TrainSettings) -> list[Objective]:
    """Return one loss per training dataset: `settings.objective` with the fields that the dataset overrides.

    With `settings.nested`, a loss also covers truncated vectors and fewer layers (`NestedObjective`). With
    `settings.pretraining.task`, the loss is `MaskedTokenLoss` or `TwoViews`.

    Raises:
        SettingsError: if a dataset sets its own teacher or another guide, no dataset uses the teacher of the run, or a
            setting has no effect in any dataset.
        ValueError: if a field of an objective is out of range.
    """
    common, nested = settings_to_dict(settings.objective), settings.nested
    losses: list[Objective] = []
    all_own: list[ObjectiveSettings] = []
    for each in sets_of(settings.data):
        own = settings_from_dict(
            ObjectiveSettings, merged_settings(common, each.objective), f"objective of {each.path}"
        )
        if own.teacher != settings.objective.teacher:
            raise SettingsError(
                f"objective of {each.path}: expected no teacher, got {own.teacher!r}. Set objective.teacher for the run, and "
                "objective.teacher_vector_weight or teacher_similarity_weight per dataset."
            )
        if own.false_negatives.guide not in (None, settings.objective.false_negatives.guide):
            raise SettingsError(
                f"objective of {each.path}: expected the guide of the run or none, got {own.false_negatives.guide!r}. Set "
                "objective.false_negatives.guide for the run."
            )
        all_own.append(own)
        loss = _plain_loss(own)
        if settings.pretraining.task is not None and each.objective:
            raise SettingsError(f"objective of {each.path}: expected none with --pretraining.task. Omit it.")
        if settings.pretraining.task == "mntp":
            losses.append(MaskedTokenLoss())
        elif settings.pretraining.task == "simcse":
            losses.append(TwoViews(loss))
        elif nested.layers or nested.dimensions:
            losses.append(NestedObjective(loss, **settings_to_dict(nested)))
        else:
            losses.append(loss)
    if settings.objective.teacher is not None and not any(
        own.teacher_vector_weight or own.teacher_similarity_weight for own in all_own
    ):
        raise SettingsError(
            "--objective.teacher: expected --objective.teacher-vector-weight or --objective.teacher-similarity-weight above 0, "
            "got 0 for both. Set one of them, such as to 1."
        )
    _check_used(all_own)
    return losses


def _check_used(objectives: Sequence[ObjectiveSettings]) -> None:
    """Check that `false_negatives` and `hardness_strength` have an effect in at least one of the objectives.

    Both change the in-batch term only, so they need `in_batch_weight` above 0.

    Raises:
        SettingsError: names the setting without effect.
    """
    unset = ObjectiveSettings()
    for name in ("false_negatives", "hardness_strength"):
        given = [each for each in objectives if getattr(each, name) != getattr(unset, name)]
        if given and not any(each.in_batch_weight for each in given):
            raise SettingsError(
                f"objective.{name} is set, but objective.in_batch_weight is 0. Set it above 0, or omit {name}."
            )


def _plain_loss(settings: ObjectiveSettings) -> AngleObjective:
    """Convert settings of an objective to a loss on full vectors, without nested widths or depths."""
    values = settings_to_dict(settings)
    del values["teacher"]
    rules = values["false_negatives"]
    guided = rules.pop("guide") is not None
    values["false_negatives"] = FalseNegatives(**rules, guided=guided) if settings.false_negatives.is_on else None
    return AngleObjective(**values)


def check_teacher_scores(losses: Sequence[Objective], data: Mixture) -> None:
    """Check that every dataset whose loss has a KL term contains teacher scores.

    `losses` has one loss per dataset of `data`.

    Raises:
        SettingsError: names the dataset without teacher scores.
    """
    for loss, each in zip(losses, data.sets, strict=True):
        plain = loss.plain if isinstance(loss, NestedObjective) else loss
        if not isinstance(plain, AngleObjective) or not plain.kl_weight:
            continue
        if not any(isinstance(example, Group) and example.scores is not None for example in each.examples):
            raise SettingsError(
                "objective.kl_weight: expected groups with teacher scores (--data.format group with a column scores); "
                f"{each.name} has none. Set the weight to 0, or add scores."
            )
