"""`recipes/domain_search.py`: from documents to answers, every stage once, with exact search instead of a database."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from domain_search import STARTER, DomainSearchSettings, fill_index, fill_table, main, title_pairs
from tiny import save_tiny_base

from angle_llm.config import DataSettings, ModelSettings
from angle_llm.data import DataError
from angle_llm.settings_io import SettingsError

DOCUMENTS = 40


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DomainSearchSettings:
    folder = tmp_path_factory.mktemp("search")
    rows = [{"title": f"A man eats {n}", "text": f"Someone has {n} things for lunch."} for n in range(DOCUMENTS)]
    rows += [{"title": "", "text": "No title."}, {"title": "a MAN eats 3!", "text": "He has 3 more."}]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ModelSettings(
        path=str(save_tiny_base("bert", folder / "base")),
        dtype="float32",
        prompt={"query": "query", "document": "passage"},
    )
    return replace(
        STARTER,
        documents=str(folder / "documents.jsonl"),
        run_dir=str(folder / "run"),
        model=model,
        database="none",
        held_out=0.2,
        negatives=2,
        batch_size=8,
        ask=["A man eats 5", "lunch"],
        top=2,
    )


@pytest.fixture(scope="module")
def made(settings: DomainSearchSettings) -> Path:
    main(settings)
    return settings.run_path


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_held_out_texts_are_in_no_training_pair(made: Path) -> None:
    train, held, corpus = (rows_of(made / f"{name}.jsonl") for name in ("train", "held_out", "corpus"))
    assert len(held) == 8
    assert len(train) >= DOCUMENTS + 1 - len(held) - 1  # two titles are near duplicates
    words = [{text.casefold().strip("!.") for row in rows for text in row.values()} for rows in (train, held)]
    assert not words[0] & words[1]
    assert len(corpus) == DOCUMENTS + 1


def test_all_documents_are_candidates_and_scores_are_kept(made: Path) -> None:
    before, after = (json.loads((made / f"{name}.json").read_text()) for name in ("before", "after"))
    (task,) = after["tasks"].values()
    assert (task["queries"], task["candidates"]) == (8, DOCUMENTS + 1)
    assert before["encoder"] != after["encoder"]  # its own prompt, and two prompts
    assert after["comparison"]["tasks"]["held_out"].keys() == task["figures"].keys()
    assert (made / "before_after.png").stat().st_size > 10_000
    assert len(rows_of(made / "mined.jsonl")) == len(rows_of(made / "train.jsonl"))


def test_a_second_call_only_answers(
    settings: DomainSearchSettings, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [path for suffix in ("*.jsonl", "*.safetensors", "*.parquet", "after.json") for path in made.rglob(suffix)]
    before = {path: path.stat().st_mtime_ns for path in kept}
    main(replace(settings, ask=["A man eats 7"], top=1))
    shown = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert shown.splitlines()[-2] == "A man eats 7"
    with pytest.raises(SettingsError, match=r"made with other settings \(negatives\)"):
        main(replace(settings, negatives=1))


def test_pairs_replace_documents(settings: DomainSearchSettings, made: Path, tmp_path: Path) -> None:
    data = DataSettings(path=str(made / "train.jsonl"), format="positive_pair")
    run = replace(settings, documents=None, data=data, negatives=0, ask=[], run_dir=str(tmp_path / "run"))
    main(run)
    assert not (tmp_path / "run" / "mined.jsonl").exists()
    assert (tmp_path / "run" / "training" / "model").is_dir()


def test_documents_without_title_are_refused(tmp_path: Path) -> None:
    (tmp_path / "documents.jsonl").write_text('{"body": "A text."}\n')
    with pytest.raises(DataError, match="title"):
        list(title_pairs(str(tmp_path / "documents.jsonl")))


def test_the_vectors_go_into_lancedb(settings: DomainSearchSettings, made: Path) -> None:
    lancedb = pytest.importorskip("lancedb", reason="pip install 'angle_llm[search]'")
    for _ in range(2):  # once
        fill_table(made)
    assert lancedb.connect(str(made / "database")).open_table("documents").count_rows() == DOCUMENTS + 1
    main(replace(settings, database="lancedb", top=1))


def test_the_vectors_go_into_faiss(made: Path) -> None:
    faiss = pytest.importorskip("faiss", reason="pip install 'angle_llm[mining]'")
    fill_index(made)
    assert faiss.read_index(str(made / "database" / "vectors.faiss")).ntotal == DOCUMENTS + 1
