"""Settings of the loss of a training run; part of `TrainSettings`."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from angle_llm.objective import FalseNegativeFields, ObjectiveFields
from angle_llm.settings.parsing import SettingsError, settings_class


@settings_class
class FalseNegativeSettings(FalseNegativeFields):
    """Exclude in-batch negatives that are too similar to the anchor. Disabled unless margin or ratio is set."""

    PREFIX: ClassVar[str] = "objective."

    guide: str | None = None
    """An encoder whose cosines decide which negatives are skipped: a folder, a hub id (also ID@REVISION), or
    package:NAME/path. Its vectors of the training texts are computed once and stored in the run directory. None: the
    model in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, is_set in (("scope", self.scope != "in_batch"), ("guide", self.guide is not None)):
            if is_set and not self.is_on:
                raise SettingsError(
                    f"objective.false_negatives.{name}: expected a margin or a ratio too, such as margin 0."
                )

    @property
    def is_on(self) -> bool:
        """Whether in-batch negatives that are too similar to the anchor are skipped: margin or ratio is set."""
        return self.margin is not None or self.ratio is not None


@settings_class
class ObjectiveSettings(ObjectiveFields):
    """The training loss: a weighted sum of terms (formulas in `angle_llm.losses`, measurements in docs/results.md)."""

    PREFIX: ClassVar[str] = "objective."

    false_negatives: FalseNegativeSettings = field(default_factory=FalseNegativeSettings)
    teacher: str | None = None
    """A teacher encoder whose vectors, or cosines, the model learns to imitate: a folder, a hub id (also ID@REVISION),
    or package:NAME/path. Its vectors of the training texts are computed once and stored in the run directory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("teacher_vector_weight", "teacher_similarity_weight"):
            if getattr(self, name) and self.teacher is None:
                flag = name.replace("_", "-")
                raise SettingsError(
                    f"--objective.{flag}: expected --objective.teacher too, got none. Set it to a model."
                )


@settings_class
class NestedSettings:
    """Layers and embedding dimensions at which the loss is computed too, so that the encoder can be truncated
    (Matryoshka). Every number of layers is combined with every number of dimensions. All layers and all dimensions are
    always included; the terms have equal weights."""

    dimensions: list[int] = field(default_factory=list)
    """Numbers of leading embedding dimensions at which the loss is computed too, ascending, such as 64 128 256."""
    layers: list[int] = field(default_factory=list)
    """Numbers of leading layers after which the loss is computed too, ascending, such as 10 20."""

    def __post_init__(self) -> None:
        for name, values in (("dimensions", self.dimensions), ("layers", self.layers)):
            if values != sorted(set(values)) or any(value < 1 for value in values):
                raise SettingsError(f"nested.{name}: expected ascending numbers of 1 or more, got {values}.")
