"""Positive pairs to mine from, and the command run on them with a tiny encoder."""

import json
import random
from pathlib import Path
from typing import Any

from angle_llm.data.formats import PositivePair
from angle_llm.mining.pairs import Material, gather
from angle_llm.mining.settings import MineSettings

PAIRS = [
    ("A man eats.", "Someone eats."),
    ("A man eats.", "Someone has food."),
    ("Someone has food.", "There is food."),
    ("A dog runs.", "An animal moves."),
    ("The dog sleeps.", "An animal rests."),
    ("A child sings.", "Someone makes music."),
    ("Two women talk.", "People speak."),
    ("A car stops.", "A vehicle stands still."),
]
"""Of the first anchor "There is food." is a positive's positive: of its cluster, and no positive of it."""


def material(pairs: list[tuple[str, str]] = PAIRS) -> Material:
    return gather([PositivePair(*pair) for pair in pairs], None, 0.8)


def settings(**changed: Any) -> MineSettings:
    """Settings that refuse nothing by cosine, and look at all candidates."""
    usual = {"ranks": (1, None), "relative_margin": None}
    return MineSettings(**{"pairs": "-", "model": "-", "out": Path("t.jsonl"), **usual, **changed})


def many_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    words = [
        "a",
        "man",
        "woman",
        "dog",
        "cat",
        "child",
        "runs",
        "eats",
        "sleeps",
        "sings",
        "in",
        "on",
        "the",
        "park",
        "house",
        "small",
        "old",
        "two",
        "street",
        "food",
    ]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, 9)))

    return [(text(), text()) for _ in range(count)]


def write_pairs(path: Path, pairs: list[tuple[str, str]] = PAIRS) -> Path:
    lines = [json.dumps({"anchor": anchor, "positive": positive}) + "\n" for anchor, positive in pairs]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
