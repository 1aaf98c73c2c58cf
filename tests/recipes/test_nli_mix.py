"""The NLI mix: labels, detokenised text, order of the sources, distinct pairs, triples, and overlap with STS sets."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from nli_mix import EVALUATED, REPOSITORIES, NliMixSettings, NliPair, detokenised, main, triples

from angle_llm.io import write_json_lines, write_text
from angle_llm.settings.parsing import SettingsError


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A pair in every file that the recipe reads; the files of one source differ by their names."""
    root = tmp_path / "sources"
    for split in ("dev", "test"):
        folder = root / "SimCSE/SentEval/data/downstream/SNLI"
        texts = {"s1": f"A man , of {split} , eats .", "s2": f"He is n't in {split} .", "labels": "contradiction"}
        texts = {name: f"{text}\n{text}\n" for name, text in texts.items()}  # the second is a repetition
        texts["s1"] += f"A man , of {split} , eats .\n"
        texts["s2"] += f"Someone of {split} eats his lunch .\n"
        texts["labels"] += "entailment\n"
        for name, text in texts.items():
            write_text(folder / f"{name}.{split}", text)
    for split in ("train", "test"):
        write_text(
            root / f"cat/data/snli/{split}.csv", f'3\t3\t"A ""{split}"" premise."\tA cat.\n1\t1\tA dog.\t{split}.\n'
        )
    rows = [("ling_in_loop/tasks/raw_data/mnli/data/mnli/val.jsonl", "neutral")]
    for folder, name in (("1_Baseline", "baseline"), ("2_Side", "LotS"), ("3_Loop", "LitL")):
        for part in ("val_round1", "train_round2", "train_round1"):
            rows.append((f"ling_in_loop/NLI_data/{folder}/{part}_{name}.jsonl", "entailment"))
        rows.append((f"ling_in_loop/NLI_data/{folder}/train_round2_{name}_combined.jsonl", "entailment"))
    for name in ("base", "sim", "translate"):
        rows += [(f"semi-automatic-nli/data/{name}_wiki/{split}.jsonl", "c") for split in ("train", "test")]
    for path, label in rows:
        write_json_lines(root / path, [{"premise": f"In\t{path} ", "hypothesis": f"So {path}", "label": label}])
    header = "sentence1\tsentence2\tgold_label\n"
    for name in ("base", "contrast", "edit_other", "edit_premise"):
        for split in ("train", "val"):
            path = f"Textual-Entailment-New-Protocols/data/{name}/{split}.tsv"
            write_text(root / path, f'{header}"New ""{name}"""\t{split}\tneutral\n')
    for split in ("train", "dev", "test"):
        path = f"counterfactually-augmented-data/NLI/all_combined/{split}.tsv"
        write_text(root / path, f'{header}"A" of {split}\tB\tneutral\n')
    for place, name in enumerate(EVALUATED):
        texts = {
            "sentence1": f"Sentence of {name}",
            "sentence2": "Someone, of dev eats his lunch!" if place else "A cat.",
        }
        write_json_lines(tmp_path / f"data/{name}.jsonl", [{**texts, "score": 1}])
    return root


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def test_the_mix_of_all_sources(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    main(NliMixSettings(sources=sources, to=data))
    assert "NOT equal to those of the published runs" in capsys.readouterr().out
    pairs = rows_of(data / "nli/nli_pairs.jsonl.gz")
    assert [" ".join((row["source"], row["split"])) for row in pairs] == [
        *("snli dev", "snli dev", "snli test", "snli test"),
        *("snli_subset_cat train", "snli_subset_cat train", "snli_subset_cat test", "snli_subset_cat test", "mnli dev"),
        *("lingnli train", "lingnli train", "lingnli val") * 3,
        *(f"semiauto_{name}_wiki {split}" for name in ("base", "sim", "translate") for split in ("train", "test")),
        *(
            f"newprot_{n} {split}"
            for n in ("base", "contrast", "edit_other", "edit_premise")
            for split in ("train", "val")
        ),
        *("cad_nli train", "cad_nli dev", "cad_nli test"),
    ]
    first = {"premise": "A man, of dev, eats.", "hypothesis": "He isn't in dev.", "label": "contradiction"}
    assert pairs[0] == {**first, "source": "snli", "split": "dev", "sts_overlap": 0}
    assert next(row["premise"] for row in pairs if row["split"] == "train") == 'A "train" premise.'
    assert [row["label"] for row in pairs[4:6]] == ["entailment", "neutral"]  # numbers of their own
    assert [row["sts_overlap"] for row in pairs[:5]] == [0, 1, 0, 0, 0]  # "A cat." is too short
    rounds = [re.findall(r"train_round\d|val", row["hypothesis"]) for row in pairs if row["source"] == "lingnli"]
    assert rounds == [["train_round1"], ["train_round2"], ["val"]] * 3
    assert (pairs[9]["premise"].startswith("In ling"), pairs[18]["label"]) == (True, "contradiction")
    assert pairs[-1]["premise"] == '"A" of test'  # quotes are part of the text in this source
    assert rows_of(data / "nli/nli_triplets.jsonl.gz") == [
        {"anchor": f"A man, of {split}, eats.", "positive": f"Someone of {split} eats his lunch.",
            "negative": f"He isn't in {split}.", "source": "snli", "sts_overlap": int(split == "dev")}
        for split in ("dev", "test")
    ]  # fmt: skip
    before = (data / "nli/nli_pairs.jsonl.gz").read_bytes()
    main(NliMixSettings(sources=sources, to=data))
    assert (data / "nli/nli_pairs.jsonl.gz").read_bytes() == before


def test_triples_use_no_hypothesis_twice() -> None:
    labels = ["entailment"] * 3 + ["contradiction"] * 2 + ["neutral"]
    pairs = [NliPair("p", f"h{place}", label, "snli", "dev") for place, label in enumerate(labels)]
    found = list(triples([*pairs, NliPair("p", "other source", "contradiction", "cad_nli", "dev")]))
    assert len({text for _, positive, negative, _ in found for text in (positive, negative)}) == 4
    assert {(premise, source) for premise, *_, source in found} == {("p", "snli")}
    assert list(triples(pairs)) == found


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("He said `` no ! '' .", 'He said "no!".'),
        ("It is $ 5 ( or # 6 ) [ a ] , 50 % ; can not", "It is $5 (or #6) [a], 50%; cannot"),
        ("They 've seen it 's n't", "They've seen it'sn't"),
    ],
)
def test_detokenised_text(tokens: str, text: str) -> None:
    assert detokenised(tokens) == text


def test_without_sources_the_git_commands_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(NliMixSettings())
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed and commit in printed for name, (commit, _) in REPOSITORIES.items())
    with pytest.raises(SettingsError, match=r"sts12\.test\.jsonl.*/cat, .*angle-llm data get sts"):
        main(NliMixSettings(sources=tmp_path, to=tmp_path))
