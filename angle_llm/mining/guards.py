"""What may not be a negative, and why: a table of small functions, asked one after another.

A guard is asked about the candidates that those before it left, and says which it refuses, so each is counted under one
reason. Texts that differ in case, spacing and punctuation alone are one text to all guards that know texts.

Legend: W candidates in the window of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from angle_llm.mining.pairs import Material
from angle_llm.mining.settings import MineSettings
from angle_llm.vectors import Array

Judge = Callable[[int, Array], Array]
"""The cosine of a text (its number) with others (W,), by the second encoder."""


@dataclass(frozen=True)
class Window:
    """Candidates for the negative of one pair, nearest first."""

    anchor: int
    positive: int
    positive_cosine: float
    text_W: Array
    """Text numbers."""
    cosine_W: Array
    """With the anchor."""
    rank_W: Array
    """Among all candidates, from 1."""

    def where(self, kept_W: Array) -> Window:
        """Some of the candidates: by a mask, or by their places."""
        return replace(self, text_W=self.text_W[kept_W], cosine_W=self.cosine_W[kept_W], rank_W=self.rank_W[kept_W])


@dataclass(frozen=True)
class Guards:
    """All guards that the settings ask for."""

    material: Material
    settings: MineSettings
    judge: Judge | None = None

    def left(self, window: Window, refused: Counter[str]) -> Window:
        """The candidates that no guard refuses; `refused` counts the others by reason."""
        for reason, refuses in GUARDS.items():
            refused_W = refuses(self, window)
            refused[reason] += int(refused_W.sum())
            window = window.where(~refused_W)
        return window


def _is_anchor(guards: Guards, window: Window) -> Array:
    key_T = guards.material.key_T
    found: Array = key_T[window.text_W] == key_T[window.anchor]
    return found


def _is_positive(guards: Guards, window: Window) -> Array:
    """A positive of this anchor in any row, or a text whose positive this anchor is."""
    return _among(guards.material.positives, guards, window)


def _is_known(guards: Guards, window: Window) -> Array:
    """Stands beside this anchor in a row that says what it is to it: nothing is left to mine."""
    return _among(guards.material.known, guards, window)


def _among(neighbours: dict[int, set[int]], guards: Guards, window: Window) -> Array:
    key_T = guards.material.key_T
    return np.isin(key_T[window.text_W], list(neighbours.get(int(key_T[window.anchor]), ())))


def _is_of_cluster(guards: Guards, window: Window) -> Array:
    if guards.settings.same_cluster == "allow":
        return _nothing(window)
    cluster_T = guards.material.cluster_T
    found: Array = cluster_T[window.text_W] == cluster_T[window.anchor]
    return found


def _is_above_max(guards: Guards, window: Window) -> Array:
    limit = guards.settings.max_score
    return _nothing(window) if limit is None else window.cosine_W > limit


def _is_below_min(guards: Guards, window: Window) -> Array:
    limit = guards.settings.min_score
    return _nothing(window) if limit is None else window.cosine_W < limit


def _is_within_margin(guards: Guards, window: Window) -> Array:
    margin = guards.settings.margin
    return _nothing(window) if margin is None else window.cosine_W >= window.positive_cosine - margin


def _is_within_share(guards: Guards, window: Window) -> Array:
    share = guards.settings.relative_margin
    if share is None:
        return _nothing(window)
    asked = share * abs(window.positive_cosine)  # below the positive's also where that is negative
    return window.cosine_W >= window.positive_cosine - asked


def _is_doubted(guards: Guards, window: Window) -> Array:
    if guards.judge is None or not len(window.text_W):
        return _nothing(window)
    cosine_W1 = guards.judge(window.anchor, np.append(window.text_W, window.positive))
    found: Array = cosine_W1[:-1] >= cosine_W1[-1]
    return found


def _nothing(window: Window) -> Array:
    return np.zeros(len(window.text_W), dtype=bool)


GUARDS: dict[str, Callable[[Guards, Window], Array]] = {
    "the anchor itself": _is_anchor,
    "a positive of it": _is_positive,
    "known from another row": _is_known,
    "of its cluster": _is_of_cluster,
    "above --max-score": _is_above_max,
    "below --min-score": _is_below_min,
    "within --margin": _is_within_margin,
    "within --relative-margin": _is_within_share,
    "the judge disagrees": _is_doubted,
}
"""Reason → which candidates are refused for it, (W,) bool; in the order in which they are asked."""
