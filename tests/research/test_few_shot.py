"""`eval/few_shot.py`: frozen and trained vectors on classes, on real sentences with a tiny model."""

import sys
from pathlib import Path

import pytest
from tiny import save_tiny_base

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'angle_llm[transfer]'")
import few_shot

CLASSES = {"animal": ("dog", "cat", "horse", "bird"), "food": ("bread", "soup", "rice", "cake")}


def write_trec(folder: Path) -> None:
    """Write questions whose class depends on one word; training and test texts differ in the verb."""
    (folder / "transfer").mkdir()
    for split, verbs in {"train": ("sees", "likes", "finds", "takes"), "test": ("draws", "wants")}.items():
        rows = [
            f"Who {verb} the {noun} ?\t{label}\n"
            for verb in verbs
            for label, nouns in CLASSES.items()
            for noun in nouns
        ]
        text = "text\tcoarse\n" + "".join(rows)
        (folder / "transfer" / f"trec.{split}.tsv").write_text(text, encoding="utf-8")


def test_training_on_the_classes_changes_the_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trec(tmp_path)
    base = save_tiny_base("bert", tmp_path / "base")
    words = ["--model", str(base), "--data", str(tmp_path), "--sets", "TREC", "--texts", "8", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["few_shot.py", *words, "--steps", "12", "--rate", "3e-3"])
    few_shot.main()
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0] == f"| set | {' | '.join(few_shot.METHODS)} |"
    means = [float(cell.split("±")[0]) for cell in table[2].split("|")[2:-1]]
    assert len(means) == len(few_shot.METHODS)
    frozen, trained = means[0], means[2]
    assert trained > frozen, "the class means of trained vectors separate classes better"


def test_drawn_texts_are_different_and_balanced(tmp_path: Path) -> None:
    write_trec(tmp_path)
    texts = few_shot.read(tmp_path / "transfer" / "trec.train.tsv", {"text": "text", "label": "coarse"})
    drawn = few_shot.drawn([*texts, *texts], 3, seed=0, least_words=1)
    assert len({text.text for text in drawn}) == len(drawn) == 6
    assert sorted(text.label for text in drawn) == ["animal"] * 3 + ["food"] * 3
    assert few_shot.drawn(texts, 3, seed=1, least_words=1) != drawn
