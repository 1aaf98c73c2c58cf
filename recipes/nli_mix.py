"""Build the NLI mix of docs/results.md (167,131 pairs, 43,627 triples) from six public repositories.

    angle-llm data get sts --to DATA
    python recipes/nli_mix.py                                  # prints the git commands that get the repositories
    python recipes/nli_mix.py --sources SOURCES --to DATA

writes nli/nli_pairs.jsonl.gz and nli/nli_triplets.jsonl.gz in DATA, which recipes/smollm2_nli.yaml reads. A row has
`sts_overlap` 1 if one of its texts has four words or more and is in STS12, 14 or 15, STS-B dev or test, SICK trial or
test. A triple is a premise with an entailed and a contradicting hypothesis of one source. The recipe itself uses no
network. Licenses: SNLI CC BY-SA 4.0, MNLI mixed, Wikipedia CC BY-SA 3.0, counterfactual data Apache 2.0.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.cli import run_cli
from angle_llm.evaluate.sts_tasks import data_file
from angle_llm.io import write_json_lines
from angle_llm.settings.parsing import SettingsError, parse_settings, settings_class
from angle_llm.tools.public_data.get import evaluation_texts, sts_overlap

REPOSITORIES = {  # owner/name → commit, and the folders that are read
    "robertoviegas/SimCSE": ("a0d98a537ceffe5f728077dd0930c41171db2d16", "SentEval/data/downstream/SNLI"),
    "academic-repository/cat": ("9c98ebb0d26edad9a3c8e8a7314a867e1b451d81", "data/snli"),
    "Alicia-Parrish/ling_in_loop": ("9def304e19161efa3a3959349021e6a7860b0afe", "NLI_data tasks/raw_data/mnli/data"),
    "nyu-mll/semi-automatic-nli": ("853c480133141f1b737744dc7d6e2db2686578bb", "data"),
    "google-research-datasets/Textual-Entailment-New-Protocols": ("24a5a1d69b24b6fc6f575f7145d3871f1611df2c", "data"),
    "acmi-lab/counterfactually-augmented-data": ("6f232a1d2a11462a30ce08fb4825b734ab30828e", "NLI/all_combined"),
}
EVALUATED = ["sts_senteval_tok/sts12.test", "sts_senteval_tok/sts14.test", "sts_senteval_tok/sts15.test"]
EVALUATED += ["stsb/dev", "stsb/test", "sick/trial", "sick/test"]
LABELS = {"e": "entailment", "n": "neutral", "c": "contradiction"}
CAT_LABELS = {"1": "neutral", "2": "contradiction", "3": "entailment"}
EXTRA_DRAW = "A bearded man wearing a blue shirt is playing an acoustic guitar."
"""A premise after which the published triples were drawn with one more random number: 65 triples depend on it."""
PUBLISHED = {
    "nli_pairs": "d4f9c01e91da57a9059a1e03a55ead1e70f8d0586c00dfa38e3bebde85b8d7c9",
    "nli_triplets": "f61398613eecd792970f6e5bd08046e93cdf94ccf961678cf619d294916218a8",
}
"""SHA-256 of the rows of the published runs, as one JSON list."""


@settings_class
class NliMixSettings:
    """Folders of the NLI mix."""

    sources: Path | None = None
    """A folder with a checkout of each repository, named SimCSE, cat, and so on. None: print the git commands."""
    to: Path = Path("data")
    """The data directory, with the STS sets of `angle-llm data get sts`."""


class NliPair(NamedTuple):
    """A premise and a hypothesis with their label, source and split."""

    premise: str
    hypothesis: str
    label: str
    source: str
    split: str


def main(settings: NliMixSettings) -> None:
    """Write pairs and triples, and print their numbers and whether they equal those of the published runs."""
    folders = {repository: repository.partition("/")[2] for repository in REPOSITORIES}
    if settings.sources is None:
        for repository, (commit, paths) in REPOSITORIES.items():
            folder = f"SOURCES/{folders[repository]}"
            print(f"git clone --filter=blob:none --no-checkout https://github.com/{repository} {folder}")
            print(f"git -C {folder} checkout {commit} -- {paths}")
        return
    files = [data_file(settings.to / f"{name}.jsonl") for name in EVALUATED]
    needed = [*files, *(settings.sources / folder for folder in folders.values())]
    if absent := [str(path) for path in needed if not path.exists()]:
        raise SettingsError(
            f"expected {', '.join(absent)}, which do not exist. Run `angle-llm data get sts --to {settings.to}`, and the "
            "commands that this recipe prints without --sources."
        )
    evaluated = evaluation_texts(files)
    pairs = list(distinct(read_sources(settings.sources)))
    tables: dict[str, Iterable[tuple[list[str], dict[str, Any]]]] = {  # the texts of each row, and the row
        "nli_pairs": (([pair.premise, pair.hypothesis], pair._asdict()) for pair in pairs),
        "nli_triplets": (
            (texts, {**dict(zip(("anchor", "positive", "negative"), texts, strict=True)), "source": source})
            for *texts, source in triples(pairs)
        ),
    }
    for name, table in tables.items():
        rows = [{**row, "sts_overlap": sts_overlap(texts, evaluated)} for texts, row in table]
        write_json_lines(settings.to / f"nli/{name}.jsonl.gz", rows)
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        same = "equal to those" if digest == PUBLISHED[name] else "NOT equal to those"
        flagged = sum(row["sts_overlap"] for row in rows)
        print(f"nli/{name}.jsonl.gz: {len(rows):,} rows ({flagged:,} with sts_overlap), {same} of the published runs")


def read_sources(root: Path) -> Iterator[NliPair]:
    """Yield the labelled pairs of all sources in the order of the published mix; texts are on one line, without ends."""
    for source, split, rows in _files(root):
        for premise, hypothesis, label in rows:
            one, two = (re.sub(r"[\t\r\n]", " ", text).strip() for text in (premise, hypothesis))
            yield NliPair(one, two, LABELS.get(label, label), source, split)


def _files(root: Path) -> Iterator[tuple[str, str, Iterable[tuple[str, str, str]]]]:
    """Yield source, split, and the premise, hypothesis and label of each row."""
    for split in ("dev", "test"):
        folder = root / "SimCSE/SentEval/data/downstream/SNLI"
        files = (folder / f"{name}.{split}" for name in ("s1", "s2", "labels"))
        lines = zip(*(file.read_text(encoding="utf-8").splitlines() for file in files), strict=True)
        yield "snli", split, ((detokenised(one), detokenised(two), label) for one, two, label in lines)
    for split in ("train", "test"):
        cells = csv.reader(_lines(root / f"cat/data/snli/{split}.csv"), delimiter="\t")
        yield "snli_subset_cat", split, ((row[2], row[3], CAT_LABELS[row[0]]) for row in cells)
    yield "mnli", "dev", _json_rows(root / "ling_in_loop/tasks/raw_data/mnli/data/mnli/val.jsonl")
    for protocol in sorted((root / "ling_in_loop/NLI_data").glob("[123]_*")):
        for path in sorted(protocol.glob("*_round[1-5]_*.jsonl")):
            if "combined" not in path.name:
                yield "lingnli", path.name.partition("_")[0], _json_rows(path)
    for name in ("base", "sim", "translate"):
        for split in ("train", "test"):
            path = root / f"semi-automatic-nli/data/{name}_wiki/{split}.jsonl"
            yield f"semiauto_{name}_wiki", split, _json_rows(path)
    for name in ("base", "contrast", "edit_other", "edit_premise"):
        for split in ("train", "val"):
            path = root / f"Textual-Entailment-New-Protocols/data/{name}/{split}.tsv"
            yield f"newprot_{name}", split, _table_rows(path, csv.QUOTE_MINIMAL)
    for split in ("train", "dev", "test"):
        path = root / f"counterfactually-augmented-data/NLI/all_combined/{split}.tsv"
        yield "cad_nli", split, _table_rows(path, csv.QUOTE_NONE)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from file


def _json_rows(path: Path) -> Iterator[tuple[str, str, str]]:
    for row in map(json.loads, _lines(path)):
        yield row["premise"], row["hypothesis"], row["label"]


def _table_rows(path: Path, quoting: Any) -> Iterator[tuple[str, str, str]]:
    for row in csv.DictReader(_lines(path), delimiter="\t", quoting=quoting):
        yield row["sentence1"], row["sentence2"], row["gold_label"]


def detokenised(text: str) -> str:
    """Return a text of the Penn Treebank tokenizer with usual quotes and spaces."""
    text = re.sub(" ?''", '"', re.sub("`` ?", '"', text))
    text = re.sub(r"([(\[$#]) ", r"\1", re.sub(r" ([.,!?;:%)\]])", r"\1", text))
    return re.sub(r" (n't|'s|'m|'re|'ve|'ll|'d)\b", r"\1", text).replace("can not", "cannot")


def distinct(pairs: Iterable[NliPair]) -> Iterator[NliPair]:
    """Yield the first of pairs that are equal up to case."""
    seen: set[tuple[str, str]] = set()
    for pair in pairs:
        key = (pair.premise.lower(), pair.hypothesis.lower())
        if key not in seen:
            seen.add(key)
            yield pair


def triples(pairs: Iterable[NliPair]) -> Iterator[tuple[str, str, str, str]]:
    """Yield premise, entailed hypothesis, contradicting hypothesis and source; no hypothesis is used twice."""
    generator = random.Random(42)
    groups: defaultdict[tuple[str, str], dict[str, list[str]]] = defaultdict(
        lambda: {label: [] for label in LABELS.values()}
    )
    for pair in pairs:
        groups[pair.source, pair.premise][pair.label].append(pair.hypothesis)
    for (source, premise), group in groups.items():
        for label in ("entailment", "contradiction"):
            generator.shuffle(group[label])
        if premise == EXTRA_DRAW:
            generator.shuffle([0, 1])
        for positive, negative in zip(group["entailment"], group["contradiction"], strict=False):
            yield premise, positive, negative, source


if __name__ == "__main__":
    run_cli(lambda: main(parse_settings(NliMixSettings, description=__doc__ or "")))
