"""`recipes/domain_search.py`: from documents to answers, every stage once, with exact search instead of a database."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from domain_search import (
    STARTER,
    DomainSearchSettings,
    lexical_metrics,
    main,
    read_documents,
    read_questions,
    write_page,
    write_pairs,
    write_questions,
    write_real,
)
from fake_server import Reply, Writer
from tiny import save_tiny_base

from angle_llm.data import DataError
from angle_llm.evaluate.retrieval_tasks import RetrievalTask
from angle_llm.settings.commands import QuestionSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSettings, ModelSettings

DOCUMENTS = 40
NOUNS = """apple book bread camera candle carpet chair clock computer drum engine flute fridge guitar hammer helmet jacket
knife lamp mirror oven pencil piano printer radio scissors telescope tent umbrella violin""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DomainSearchSettings:
    folder = tmp_path_factory.mktemp("search")
    names = [first + second for first in "abcdefg" for second in "abcdef"]  # the tiny tokenizer has no token of a digit
    rows = [{"title": f"A man eats {name} ", "text": f"Someone has {name} for lunch.\n"} for name in names[:DOCUMENTS]]
    rows += [{"title": "", "text": "No title."}, {"title": "a MAN eats ad!", "text": "He has more ad."}]
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
        held_out=0.2,
        negatives=2,
        batch_size=8,
        ask=["A man eats af", "lunch"],
    )


@pytest.fixture(scope="module")
def made(settings: DomainSearchSettings) -> Path:
    main(settings)
    return settings.run_path


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def held_out_of(run: Path) -> list[dict[str, str]]:
    """Held-out pairs, from the BEIR folder."""
    texts = [
        {row["_id"]: row["text"] for row in rows_of(run / f"held_out/{name}.jsonl")} for name in ("queries", "corpus")
    ]
    lines = [line.split("\t") for line in (run / "held_out/qrels/test.tsv").read_text().splitlines()[1:]]
    return [{"query": texts[0][query], "positive": texts[1][text]} for query, text, _ in lines]


def test_held_out_texts_are_in_no_training_pair(made: Path) -> None:
    train, held, corpus = rows_of(made / "train.jsonl"), held_out_of(made), rows_of(made / "held_out/corpus.jsonl")
    assert len(held) == 8
    assert len(train) >= DOCUMENTS + 1 - len(held) - 1  # two titles are near duplicates
    words = [{text.casefold().strip("!.") for row in rows for text in row.values()} for rows in (train, held)]
    assert not words[0] & words[1]
    assert len(corpus) == DOCUMENTS + 2  # also the one without a title


def test_all_documents_are_candidates_and_scores_are_kept(made: Path) -> None:
    before, after = (json.loads((made / f"{name}.json").read_text()) for name in ("before", "after"))
    (task,) = after["tasks"].values()
    assert (task["queries"], task["candidates"]) == (8, DOCUMENTS + 2)
    assert before["encoder"] != after["encoder"]  # its own prompt, and two prompts
    assert after["comparisons"][0]["tasks"]["held_out"].keys() == task["metrics"].keys()
    assert len(rows_of(made / "mined.jsonl")) == len(rows_of(made / "train.jsonl"))


def test_a_second_call_only_answers(
    settings: DomainSearchSettings, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [path for suffix in ("*.jsonl", "*.safetensors", "*.parquet", "after.json") for path in made.rglob(suffix)]
    before = {path: path.stat().st_mtime_ns for path in kept}
    main(replace(settings, ask=["A man eats bb"], resume="auto", layout="padded", micro_batch_tokens=512))
    shown = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert shown.splitlines()[-4] == "A man eats bb"
    with pytest.raises(SettingsError, match=r"made with other settings \(negatives "):
        main(replace(settings, negatives=1))


def test_groups_replace_documents_and_keep_their_own_negatives(settings: DomainSearchSettings, tmp_path: Path) -> None:
    rows = [{"query": f"Ask {n} ", "positives": [f"Answer {n} "], "negatives": [f"Not {n}"]} for n in range(20)]
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    data = DataSettings(path=str(tmp_path / "groups.jsonl"))
    run = replace(settings, documents=None, data=data, negatives=0, ask=[], run_dir=str(tmp_path / "run"))
    with pytest.raises(DataError, match=r"groups\.jsonl:21: .*data check .*groups\.jsonl .*--fix FOLDER"):
        main(run)
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(run)  # in the same directory
    assert not (tmp_path / "run" / "mined.jsonl").exists()
    train = rows_of(tmp_path / "run" / "train.jsonl")
    assert len(train) == 16
    assert all(row["query"] == row["query"].strip() for row in train), "as texts of a BEIR folder are read"
    assert all(row["negatives"] == [row["query"].replace("Ask", "Not")] for row in train)
    assert len(rows_of(tmp_path / "run/held_out/corpus.jsonl")) == 40
    (tmp_path / "groups.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(SettingsError, match="was changed since"):
        main(run)


def test_all_answers_of_a_query_are_held_out_together(settings: DomainSearchSettings, tmp_path: Path) -> None:
    """Negatives of a row are no answers of its query, and no held-out texts."""
    words = [("Ask", n, m) for n in range(20) for m in range(3)]
    rows = [{"anchor": f"Ask {n}", "positive": f"Reply {n} {m}", "negative": f"Reply {n} {m - 1}"} for _, n, m in words]
    rows += [{"anchor": "ask 3!", "positive": f"More {n}", "negative": f"Reply {n} 0"} for n in range(20)]
    (tmp_path / "triples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(path=str(tmp_path / "triples.jsonl"))
    write_pairs(replace(settings, documents=None, data=data), tmp_path)
    train, held = rows_of(tmp_path / "train.jsonl"), held_out_of(tmp_path)
    assert len(train) + len(held) == 80
    assert len(held) == 15, "of 16 allowed; 23 pairs are linked by question 3"
    asked = {row["query"] for row in held}
    answers = {row["positive"] for row in held}
    assert not asked & {row["query"] for row in train}
    for row in train:
        assert not answers & {*row["positives"], *row["negatives"]}
        assert not any(
            text.startswith(f"Reply {row['query'][4:]} ") for text in row["negatives"] if "Ask" in row["query"]
        )
    few = replace(settings, documents=None, data=data, held_out=0.01)
    with pytest.raises(DataError, match=r"got 80 and 0 of 80\. .* stay together\. Set --held-out"):
        write_pairs(few, tmp_path / "few")


@pytest.mark.needs("bitsandbytes")
def test_a_base_is_quantised_in_all_stages(settings: DomainSearchSettings, tmp_path: Path) -> None:
    model, lora = replace(settings.model, bits=8), replace(settings.lora, rank=2)
    main(replace(settings, model=model, lora=lora, run_dir=str(tmp_path), ask=[]))
    assert json.loads((tmp_path / "mined.report.json").read_text())["identity"]["model"]["bits"] == 8
    assert json.loads((tmp_path / "before.json").read_text())["settings"]["bits"] == 8
    assert json.loads((tmp_path / "training/model/angle_llm.json").read_text())["bits"] == 8


def test_documents_or_pairs_are_required() -> None:
    with pytest.raises(SettingsError, match=r"expected --documents FILE, with --llm"):
        main(replace(STARTER, documents="a.jsonl", data=DataSettings(path="b.jsonl")))
    with pytest.raises(SettingsError, match=r"expected --documents FILE, with --llm"):
        main(STARTER)


def test_questions_by_a_quantised_base_are_refused(tmp_path: Path) -> None:
    run = replace(STARTER, documents="a.jsonl", llm=("local:m",), run_dir=str(tmp_path))
    with pytest.raises(SettingsError, match=r"--model\.bits: .*data questions"):
        main(replace(run, model=replace(run.model, bits=8), lora=replace(run.lora, rank=2)))


@pytest.mark.parametrize("content", ["{}\n", ""])
def test_a_run_ends_only_without_a_question(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(made: QuestionSettings) -> None:
        made.out.write_text(content)
        raise SystemExit(1)  # some requests have no answer

    monkeypatch.setattr("domain_search.questions_main", write)
    with nullcontext() if content else pytest.raises(SystemExit):
        write_questions(replace(STARTER, documents="a.jsonl", llm=("local:m",)), tmp_path)


def test_answers_of_people_are_found_in_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A short answer or document must equal the other. Questions that are trained on get a warning."""
    (tmp_path / "held_out").mkdir()
    texts = ["See the menu for lunch.", "menu", "Send the clock back to the shop. We pay."]
    rows = [json.dumps({"_id": f"text{number}", "text": text}) + "\n" for number, text in enumerate(texts)]
    (tmp_path / "held_out/corpus.jsonl").write_text("".join(rows))
    (tmp_path / "train.jsonl").write_text(json.dumps({"query": "Where is my clock?", "positive": "x"}) + "\n")
    pairs = {"where is my CLOCK": "Send the clock back to the shop.", "what is for lunch": "menu"}
    pairs["where is the list of dishes"] = "The menu is at the door."  # contains a short document
    asked = [json.dumps({"query": query, "positive": answer}) + "\n" for query, answer in pairs.items()]
    (tmp_path / "real.jsonl").write_text("".join(asked))
    write_real(str(tmp_path / "real.jsonl"), tmp_path)
    lines = [line.split("\t")[:2] for line in (tmp_path / "real/qrels/test.tsv").read_text().splitlines()[1:]]
    assert lines == [["q0", "text2"], ["q1", "text1"], ["q2", "real0"]]
    assert "1 questions are training questions too" in capsys.readouterr().out


def test_passages_have_no_space_at_their_ends(tmp_path: Path) -> None:
    """As in the texts that `read_beir` reads, which are looked up in the page."""
    row = {"query": "How?", "positive": "  a\n  b\n", "document": "d"}
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    passage = {"text": row["positive"], "document": "d", "start": 0}
    (tmp_path / "q.passages.jsonl").write_text(json.dumps(passage) + "\n")
    material = read_questions(tmp_path / "q.jsonl")
    assert (material.pairs, material.corpus) == ([("How?", "a\n  b")], {"a\n  b": "d#0"})


def test_documents_without_title_are_refused(tmp_path: Path) -> None:
    (tmp_path / "documents.jsonl").write_text('{"body": "A text."}\n')
    with pytest.raises(DataError, match="title"):
        read_documents(str(tmp_path / "documents.jsonl"))


@pytest.mark.slow  # loads a real model ten times; `test_guides` runs these stages with a tiny one
@pytest.mark.needs("bm25s", "openai", "py3langid", "semantic_text_splitter")
def test_a_language_model_writes_the_questions(
    settings: DomainSearchSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents without titles; one request has no answer; questions of people are measured too; all parts of the page."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    documents = {name: f"The {name} breaks <i>after</i> a week. Send the {name} back to the shop." for name in NOUNS}
    rows = [json.dumps({"id": name, "text": f"{text} \n"}) + "\n" for name, text in documents.items()]
    (tmp_path / "docs.jsonl").write_text("".join(rows))
    (tmp_path / "real.jsonl").write_text(
        json.dumps({"query": "my clock is dead", "positive": "Send the clock  back to the shop."}) + "\n"
    )

    def write(message: str) -> str:
        name = next(word for word in message.split() if word in documents)
        return f"1. What can I do with a {name} that is broken?\n2. return of a defective {name}"

    def write_some(message: str) -> str | Reply:
        return Reply(status=400) if "clock" in message else write(message)

    with Writer(write_some) as server:
        run = replace(
            settings,
            model=replace(STARTER.model, dtype="float32", max_length=32),
            documents=str(tmp_path / "docs.jsonl"),
            llm=(server.name,),
            run_dir=str(tmp_path / "run"),
            negatives=1,
            ask=[],
        )
        made = tmp_path / "run"
        main(run)
        assert "some requests have no answer" in capsys.readouterr().out
        assert not any("clock" in row["query"] for row in rows_of(made / "questions.jsonl"))
        server.rule = write  # the questions of a run do not change
        sent = len(server.requests)
        main(replace(run, real=str(tmp_path / "real.jsonl")))
    assert sent == len(server.requests)
    (tmp_path / "docs.jsonl").write_text("".join(rows[1:]))
    with pytest.raises(SettingsError, match=r"docs\.jsonl was changed"):
        main(run)
    assert len(rows_of(made / "questions.passages.jsonl")) == len(documents)
    (real,) = [line.split("\t") for line in (made / "real/qrels/test.tsv").read_text().splitlines()[1:]]
    assert real[1] == "clock#0", "the answer is a part of the passage"
    train, held = rows_of(made / "train.jsonl"), held_out_of(made)
    assert held
    assert not {row["positive"] for row in train} & {row["positive"] for row in held}
    lexical, after = (json.loads((made / f"{name}.json").read_text()) for name in ("lexical", "after"))
    assert lexical["tasks"].keys() == after["tasks"].keys() == {"held_out", "real"}
    assert lexical["tasks"]["held_out"]["R@1"] > 90, "each question has the word of its document"
    page = (made / "report.html").read_text()
    assert "easier than questions of people" in page
    assert "&lt;i&gt;after&lt;/i&gt;" in page
    assert "<i>after" not in page
    for text in ("BM25", "First answers", "Dropped questions", "angle-llm export"):
        assert text in page
    (made / "questions.dropped.jsonl").write_text("")
    write_page(run, made, str(made / "training/model"))  # without a dropped question


@pytest.mark.needs("lancedb")
def test_the_database_gives_the_cosines_of_the_exact_search(
    settings: DomainSearchSettings, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosines = []
    for database in ("none", "lancedb"):
        main(replace(settings, database=database))
        cosines.append(re.findall(r"^  (0\.\d{3})  ", capsys.readouterr().out, flags=re.MULTILINE))
    assert cosines[0] == cosines[1]
    assert len(cosines[0]) == 6
    before = (made / "database").stat().st_mtime_ns
    main(replace(settings, database="lancedb"))
    assert (made / "database").stat().st_mtime_ns == before


@pytest.mark.needs("bm25s")
def test_bm25_reads_scripts_without_spaces() -> None:
    documents = ("请检查防火墙设置。", "密码重置需要邮箱。", "服务器证书已经过期。", "डेटाबेस कनेक्शन का समय")
    queries = ("防火墙设置", "重置密码", "证书过期", "कनेक्शन")
    relevant = tuple({number: 1.0} for number in range(4))
    task = RetrievalTask("zh", queries, documents, relevant, (None,) * 4, "here", tuple("1234"))
    assert lexical_metrics(task)["R@1"] == 100
