"""Settings of the commands `init`, `embed`, `search`, `eval` and `data`, in the order of `angle-llm --help`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from annotated_types import Ge, Gt, Le, Lt, MinLen

from angle_llm.settings.encoder import EncoderName, EncoderOptions, RowSettings
from angle_llm.settings.parsing import (
    Finite,
    NonNegative,
    Positive,
    PositiveFloat,
    SettingsError,
    check_new_folder,
    settings_class,
)

REST, CORPUS = "train", "corpus"
"""Names of files that `data split` writes besides the parts: the rows of no part, and the distinct second texts."""
FilterName = Literal["copied", "language", "repeated", "not found"]
"""Filters of `data questions`."""


# --- init -------------------------------------------------------------------------------------------------------------


@settings_class
class InitSettings:
    """Write recipes, configurations of DeepSpeed, prompts, evaluation programs and guides into a new folder.

    The commands of the guides work in this folder, such as `accelerate launch recipes/llama2_nli.py`.
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder that does not exist, or is empty."""


# --- embed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbedFiles(EncoderName):
    """Encoder, input and output of `angle-llm embed`."""

    input: Path
    """UTF-8 text, one text per line; .jsonl, .csv, .tsv (each also .gz) or .parquet; a folder of such files;
    `-` reads text from standard input."""
    output: Path
    """A folder for shards and their index; or a .npy file with a row per text.
    The same command resumes after a kill."""
    column: str | None = None
    """Column of a table that contains the text. None: `text`, `sentence`, or the only column."""
    id_column: str | None = None
    """Column of a table with ids, which are stored with the vectors as text."""


@settings_class
class EmbedSettings(EncoderOptions, EmbedFiles):
    """Files, encoder and form of the vectors of `angle-llm embed`."""

    side: Annotated[Literal["query", "document"] | None, tyro.conf.arg(name="as")] = None
    """Whether the texts are queries or documents (in YAML `side`). Required if queries and documents have different prompts."""
    normalize: bool = False
    """Scale every row to length 1. An encoder that normalises always does this."""
    dim: Positive | None = None
    """Number of first dimensions to keep; rows are cut before they are scaled. None: all."""
    precision: Literal["float32", "float16", "int8", "binary"] = "float32"
    """Type of the stored values. int8: with a scale per row, the largest magnitude / 127. binary: the signs, eight per byte."""
    format: Literal["parquet", "npy"] = "parquet"
    """Where a folder holds the vectors: in a column of the Parquet shards, or in a .npy file beside each shard."""
    shard_rows: Positive = 8192
    """Rows per shard. At most three shards are in memory at a time, and are embedded again after a kill."""
    store_text: bool = False
    """Store the texts with the vectors."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a text that is empty or not valid UTF-8. error: stop before the model is loaded. skip: skip the row,
    and list it in a .skipped.jsonl file beside the shard or the .npy file."""

    def __post_init__(self) -> None:
        if self.one_file and (self.id_column or self.store_text or self.precision == "int8"):
            raise SettingsError(
                "--id-column, --store-text and --precision int8 do not fit into one .npy file. Set --output to a folder."
            )

    @property
    def one_file(self) -> bool:
        """Whether the output is one .npy file."""
        return self.output.suffix == ".npy"


# --- search -----------------------------------------------------------------------------------------------------------


@settings_class
class SearchSettings:
    """Folder, queries and encoder of `angle-llm search`."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder that `angle-llm embed` wrote."""
    queries: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="QUERY [QUERY …]")] = ()
    """Texts to search for."""
    file: Path | None = None
    """A text file, one query per line, or a table with more queries."""
    column: str | None = None
    """Column of a table that contains the query. None: `text`, `sentence`, or the only column."""
    top: Positive = 5
    """Number of hits to print for each query."""
    json: bool = False
    """Print a JSON object per query, with the whole texts."""
    model: str | None = None
    """Path of the encoder, if it was moved. None: the path in the folder."""
    side: Annotated[Literal["query", "document"] | None, tyro.conf.arg(name="as")] = None
    """Whether QUERY is a query or a document (in YAML `side`). None: query; required if the folder was embedded as queries."""

    def __post_init__(self) -> None:
        if not (self.queries or self.file) or not all(query.strip() for query in self.queries):
            raise SettingsError("expected a QUERY that is not blank, in quotes if it contains spaces, or --file.")
        if self.column is not None and self.file is None:
            raise SettingsError("--column belongs to --file, which is not set.")


# --- eval -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvalSettings(EncoderOptions, EncoderName):
    """Settings of every evaluation command: the encoder, and a file for the results."""

    side: Annotated[Literal["query", "document"] | None, tyro.conf.arg(name="as")] = None
    """Encode all texts as queries, or all as documents (in YAML: `side`). None: encode each text with the prompt of its
    side. Tasks of single texts need this flag if the encoder has two prompts."""

    json: Path | None = None
    """Also write model, settings and results to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class StsTaskSettings(EvalSettings):
    """Settings that select STS tasks and the variant of their text."""

    data_dir: Path | None = None
    """Directory with sts/, stsb/ and sick/ (SentEval's text: sts_senteval_tok/, …), or with STS/ and SICK/ as
    SentEval's download script writes them. `angle-llm data get sts --to DATA` downloads them."""

    tasks: tuple[str, ...] = ()
    """sts12 … sts16, stsb, stsb-dev, sickr (test split), sickr-all, starter:graded_pairs.tsv, or files (TSV, CSV,
    JSONL, Parquet; FOLDER@NAME) with columns sentence1, sentence2, score, or column names that training recognises.
    Empty: all available published tasks."""

    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question score rating`, if the files in --tasks have other column names. The
    fields are text1, text2, score."""

    score_range: tuple[float, float] | None = None
    """In files in --tasks, the score that means *unrelated* and the score that means *same meaning*. Set it for a reversed
    range, such as 1 0; the scale of other scores has no effect. None: a larger score means more similar."""

    variant: Literal["auto", "raw", "senteval"] = "auto"
    """raw: sentences as released. senteval: tokenised and lower-cased (published tables, STS12 to STS16 of MTEB). auto:
    the text with which the directory has more of the tasks, raw if equal."""


@settings_class
class StsEvalSettings(StsTaskSettings):
    """Spearman and Pearson correlation on STS tasks, with intervals and published scores.

    Scores depend on the text of the sentences. Published tables and STS12 to STS16 of MTEB use SentEval's text (--variant
    senteval); published scores of prompted models also use --edits published. Intervals cover the choice of test pairs,
    not the training seed. --against compares two models pair by pair.
    """

    against: str | None = None
    """Compare with a second model, pair by pair: differences with 95 % interval and p-value. The value is a model, opened
    with the same flags (prompt, pooling, …), or a .json file written by --json."""

    edits: Literal["none", "published"] = "none"
    """Edits of each sentence, with any prompt. published: the edits of PromptEOL and AnglE in evaluation with a prompt.
    They add a full stop, make double quotes single, and replace a final question mark by a full stop."""


@settings_class
class RetrievalSettings(RowSettings, EvalSettings):
    """Exact retrieval by cosine similarity: BEIR folders, questions with answers, lists of texts, texts with a class.

    Intervals cover the choice of queries, not the training seed. --against compares models query by query.
    Truncation changes scores: compare models at the same --max-length.
    """

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = ()
    """BEIR folders with corpus.jsonl, queries.jsonl and qrels/test.tsv (or .jsonl). FOLDER@NAME uses qrels/NAME.tsv instead."""

    binary: bool = False
    """In BEIR folders, count every grade above 0 as 1 in nDCG. Default: grades are gains, as in trec_eval."""

    pairs: tuple[str, ...] = ()
    """Files of questions and their answers (positive_pair, or another --format). Candidates of a question are all
    answers in its file. Equal answers are one candidate."""

    corpus: Path | None = None
    """A text file or table with more candidates for --pairs."""

    groups: tuple[Path, ...] = ()
    """Files with a list of texts in each row. The first text is a query, and the other texts are its answers.
    Candidates are all texts in the file."""

    classes: tuple[str, ...] = ()
    """Files of texts with a class. Scores: accuracy of the nearest class mean, of 5 neighbours, and MAP of the class."""

    reference: str | None = None
    """A labelled file, such as the training data, whose texts give the class means and neighbours of --classes. None: all
    other texts of the file."""

    column: str | None = None
    """Column with the lists of --groups; without --groups, with the texts of --corpus. None: captions, texts or set for
    --groups; text or sentence for --corpus."""

    against: tuple[str, ...] = ()
    """Compare with other models, query by query: differences with 95 % interval and p-value. A value is a model, opened
    with the same flags (prompt, pooling, …), or a .json file written by --json."""

    rerank: str | None = None
    """Compare with the same search after this reranker (cross-encoder) has ordered the first --top candidates of each query:
    a model folder, a hub id, or package:NAME/path. Needs sentence-transformers (extra `export`)."""

    top: Positive = 100
    """Number of first candidates that --rerank orders."""

    def __post_init__(self) -> None:
        if self.rerank is None and self.top != RetrievalSettings.top:
            raise SettingsError("--top belongs to --rerank, which is not set.")
        if self.binary and not self.folders:
            raise SettingsError("--binary belongs to BEIR folders, got none.")
        if self.rerank is not None and self.classes:
            raise SettingsError(
                "--rerank orders answers of queries, and texts of --classes have none. Omit one of them."
            )
        if self.classes and not self.pairs and self.format not in ("auto", "labelled_text"):
            raise SettingsError(
                f"--format {self.format} belongs to --pairs; files of --classes are labelled_text. Omit it."
            )
        sources_of = {"corpus": ["pairs"], "reference": ["classes"], "column": ["groups", "corpus"]}
        for name, default in (vars(RowSettings()) | dict.fromkeys(sources_of)).items():
            sources = sources_of.get(name, ["pairs", "classes"])
            if getattr(self, name) != default and not any(getattr(self, source) for source in sources):
                raise SettingsError(
                    f"--{name.replace('_', '-')} belongs to --{' or --'.join(sources)}, which is not set."
                )


@settings_class
class MtebSettings(EvalSettings):
    """Main scores on tasks of MTEB. The package mteb runs the tasks and downloads data from the Hugging Face hub."""

    tasks: Annotated[tuple[str, ...], MinLen(1)]
    """Names of MTEB's tasks, such as STSBenchmark, Banking77Classification, NFCorpus."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Prompts (name or YAML file) by use. A use is Retrieval-query, Retrieval-document, STS, Classification, the name
    of a task, … A task without a matching use gets --prompt, or the prompt saved with the model."""

    name: str | None = None
    """Model name ORGANISATION/MODEL in result files. None: the hub id, or local/ and the name of the folder, or of the run
    directory."""

    output: Path | None = None
    """Also write mteb's result files, in the format of its leaderboard, to this folder."""


# --- data get ---------------------------------------------------------------------------------------------------------


@settings_class
class GetSettings:
    """Names of public data sets, and the folder that they are written to.

    Without NAME, the command lists the sets with size and license. `sts` is the group of all STS sets. The files have the
    layout that `eval sts` and `eval retrieval` read.

    STS12 to STS16 have SentEval's text, as in published tables; the hub has no raw text of them. Training data have a
    column `sts_overlap`: 1 for a row with a text of four words or more that is in an STS or SICK evaluation set, else 0.
    These sets are downloaded with training data. Train with `where: {sts_overlap: 0}`.

    Sources are downloaded from pinned commits into the cache of huggingface_hub (HF_HOME). With HF_HUB_OFFLINE=1 only the
    cache is read. A file is written if its number of rows and its gold scores equal the stored values. After an
    interruption, run the same command again: complete files are checked and kept, a partial download is repeated.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]")] = ()
    """Data sets or groups, such as sts nanobeir all-nli. Without NAME: list them."""
    to: Path | None = None
    """The data directory, new or not. Later commands read it by --data-dir; relative paths of files are also searched in the
    folder of the variable ANGLE_LLM_DATA."""

    def __post_init__(self) -> None:
        if bool(self.names) != bool(self.to):
            expected = "a folder, such as --to data" if self.names else "a data set before it, such as sts --to data"
            raise SettingsError(f"--to: expected {expected}. `angle-llm data get` lists the data sets.")


# --- data check -------------------------------------------------------------------------------------------------------


@settings_class
class CheckSettings(RowSettings):
    """Check data files: format, bad, repeated and contradictory rows, overlap with evaluation sets, token lengths."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE …]")]
    """Data files, as for training. A row that repeats a row of an earlier file is reported for the later file."""
    against: tuple[str, ...] = ()
    """Evaluation sets that must not be trained on: files (also FOLDER@NAME, starter:NAME), BEIR folders (or one split,
    FOLDER@test), or folders of them. In a folder, files and splits named after train are skipped; if any file is named
    after a test, dev, valid or held-out set, only such files are read."""
    model: str = "none"
    """Model whose tokenizer counts and prints tokens; its weights are not loaded. none: count no tokens."""
    prompt: str | dict[str, str] | None = None
    """Prompt name or YAML file, or `query NAME document NAME`. None: as saved with the model."""
    max_length: Positive | None = None
    """Maximum tokens of a text with its prompt. None: as saved with the model."""
    json: bool = False
    """Print JSON instead of text."""
    fix: Path | None = None
    """A new folder for cleaned copies, NAME.jsonl, without bad rows, repeated rows and rows of --against. Rows
    that contradict each other, and rows that label equal texts as dissimilar, are all removed too. Case, spacing and
    punctuation are ignored. Removed rows are written to NAME.quarantine.jsonl with the reason."""

    def __post_init__(self) -> None:
        if not self.files:
            raise SettingsError(
                "FILE is missing: expected at least one data file, before flags that take several values."
            )
        if self.model == "none" and (self.prompt or self.max_length):
            raise SettingsError("--prompt and --max-length belong to --model, which is not set.")


# --- data split -------------------------------------------------------------------------------------------------------


@settings_class
class SplitSettings(RowSettings):
    """Split a data file into parts that share no text, for training, selection of the best model, and evaluation.

    Rows that share a text, up to case, spacing and punctuation, are in the same part, also if other rows link them. A
    hash of the texts selects the part: the same rows give the same parts. Split before negatives are mined.
    """

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Rows of any format, as training reads them. `data check --fix` removes bad and repeated rows first."""
    out: Path
    """A new folder for the parts, NAME.jsonl, and for corpus.jsonl: the distinct second texts of all rows."""
    parts: dict[str, Annotated[float, Gt(0), Lt(1)]] = field(default_factory=dict)
    """Name of each part and its fraction of the rows. Other rows: train.jsonl. Empty: valid 0.15 held_out 0.15."""

    def __post_init__(self) -> None:
        for name in self.parts:
            if not re.fullmatch(r"\w[\w.-]*", name) or name.lower() in (REST, CORPUS):
                raise SettingsError(
                    f"--parts: expected file names other than {REST} and {CORPUS}, such as valid; got {name!r}."
                )
        if len({name.lower() for name in self.parts}) < len(self.parts):  # one file on macOS
            raise SettingsError(
                f"--parts: expected names that differ, also in lower case; got {', '.join(self.parts)}."
            )
        if sum(self.parts.values()) >= 1:
            raise SettingsError(f"--parts: expected shares that add up to less than 1, got {self.parts}.")
        check_new_folder("--out", self.out)


# --- data mine --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NegativeRules:
    """Rules that decide which candidates become negatives of a query."""

    ranks: tuple[int, int | None] | None = None
    """First and last rank to use; rank 1 is the candidate nearest to the query. The nearest candidates are often unlabelled
    paraphrases. None as the last rank: no limit. Not set: chosen by the number of candidates, from 1 41 for few to 10 50
    for 9,000 or more."""
    margin: Finite | None = None
    """The cosine of a negative must be below the cosine of every positive by more than this. None: no bound."""
    relative_margin: Finite | None = 0.05
    """The cosine of a negative must be below the cosine of every positive by more than this fraction: with 0.05, below
    95 % of the positive cosine, the best positive-aware rule in NV-Retriever (arXiv 2407.15831). None: no bound."""
    max_score: Finite | None = None
    """Largest cosine of a negative with its query. None: no bound."""
    judge_margin: Finite = 0.0
    """By the scores of --judge, a negative must be more than this below every positive. Unit: cosines of an encoder, raw
    scores (logits) of a reranker."""
    negatives: Positive = 1
    """Negatives to mine per query."""
    sampling: Literal["top", "random"] = "top"
    """Which candidates to use of those that pass all rules: the nearest, or random ones."""
    short: Literal["keep", "drop"] = "keep"
    """What to do with a query that gets fewer negatives than requested, or none: keep it, or drop it."""

    def __post_init__(self) -> None:
        if self.ranks is not None:
            first, last = self.ranks
            if first < 1 or (last is not None and self.negatives > last - first + 1):
                raise SettingsError(
                    f"--ranks: expected a first and a last rank, from 1, such as 10 50, with as many ranks as --negatives "
                    f"{self.negatives}; got {first} {last}."
                )


@dataclass(frozen=True)
class MineFiles(EncoderName):
    """Encoder, pairs, corpus and output of mining."""

    pairs: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PAIRS")]
    """Positive pairs, scored pairs, triples or groups: a file, dataset folder or hub id, as for training.
    With two prompts, the first texts of the pairs are queries, and candidates are documents."""
    out: Path
    """The .jsonl file of groups (a query, positives, negatives). NAME.report.json in the same folder is the report.
    The same command resumes after a kill."""

    limit: Positive | None = None
    """Mine for at most this many queries. All examples are read and all candidates embedded, so that no positive becomes
    a negative."""
    shuffle_seed: int | None = None
    """Shuffle the examples with this seed. None: file order."""
    positive_above: Finite = 0.8
    """Scored pairs above this score (rescaled to 0..1) are positive pairs."""
    split_positives: bool = False
    """Write a group for each positive, with all negatives of its query, instead of a group for each query. Each
    positive is then a separate example in training."""

    corpus: Path | None = None
    """Candidates (UTF-8): text, .jsonl, .csv, .tsv, .parquet, a folder of them, or a BEIR folder (title and text). None: the
    positives of all pairs."""
    column: str | None = None
    """Column of the corpus that contains the text. None: `text`, `sentence`, or the only column."""
    judge: str | None = None
    """A second encoder, or a reranker (cross-encoder; a classifier, or saved by CrossEncoder). By its scores too, a negative
    must be less similar to the query than every positive (--judge-margin)."""

    vectors: Path | None = None
    """A folder that keeps the vectors, to mine the same texts with other rules.
    None: vectors are removed when the groups are written."""


@settings_class
class MineSettings(NegativeRules, RowSettings, EncoderOptions, MineFiles):
    """Files and rules of `angle-llm data mine`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_json_lines(self.out)
        if self.judge_margin and self.judge is None:
            raise SettingsError("--judge-margin belongs to --judge, which is not set.")
        if self.column is not None and self.corpus is None:
            raise SettingsError("--column belongs to --corpus, which is not set.")


# --- data questions ---------------------------------------------------------------------------------------------------


@settings_class
class Prices:
    """Prices of a server, in the currency of --max-cost."""

    input: Annotated[float, Ge(0)] = 0.0
    """Price of a million input tokens (requests)."""
    output: Annotated[float, Ge(0)] = 0.0
    """Price of a million output tokens (answers)."""

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of a request with these numbers of tokens."""
        return (input_tokens * self.input + output_tokens * self.output) / 1e6


@settings_class
class LanguageModelSettings:
    """Language models that generate texts, their sampling, and limits on requests and cost."""

    llm: tuple[str, ...] = ()
    """local:MODEL (a folder, a .gguf file, ID or ID@REVISION on the hub, package:NAME/path), run with transformers; or
    URL#MODEL, such as http://127.0.0.1:8000/v1#MODEL, a server with OpenAI's chat completions API. Every model gets all
    requests."""
    seed: int = 42
    """Seed from which the seed of each request is derived."""
    max_new_tokens: Positive = 128
    """Maximum tokens of an answer. If an answer is cut off, its last line is dropped."""
    temperature: Annotated[float, Ge(0), Lt(10)] = 0.7
    """Sampling temperature. 0: always the most likely token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 0.9
    """Sample from the smallest set of tokens with this total probability."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of a local model. auto: as stored; float32 for a .gguf file."""
    device: str | None = None
    """Device of a local model and the judge, such as cpu or cuda:0. None: a GPU if there is one."""
    batch_size: Positive = 32
    """Number of requests that a local model answers in a batch."""
    concurrency: Positive = 4
    """Number of requests that are sent to a server at the same time."""
    requests_per_minute: PositiveFloat | None = None
    """Maximum number of new requests to a server per minute; retries are not counted."""
    retries: NonNegative = 5
    """Number of times that a failed request to a server is repeated, with growing waiting times."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key of a server.
    The key is sent by https or to this machine only, and never written."""
    max_requests: NonNegative | None = None
    """Maximum number of requests, including answered requests of earlier runs with the same settings."""
    max_cost: Annotated[float, Ge(0)] | None = None
    """Maximum cost by --prices.input and --prices.output, including the cost of earlier runs with the same settings."""
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True)
class QuestionFiles(EncoderName):
    """Documents, encoder and output of `angle-llm data questions`."""

    documents: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DOCUMENTS")]
    """Documents (UTF-8): .jsonl, .csv, .tsv, .parquet, a text file with a document per line, or a folder of such files."""
    out: Path
    """The .jsonl file of pairs. The same command resumes after a kill."""

    column: str | None = None
    """Column with the texts. None: text, sentence, or the only column."""
    id_column: str | None = None
    """Column with the ids of the documents. None: id or _id, else the number of the row."""
    limit: Positive | None = None
    """Maximum number of documents for which questions are written. All documents are searched by the filters."""
    shuffle_seed: int | None = None
    """Seed to choose the documents of --limit at random. None: the first documents."""
    passage_characters: Positive = 1200
    """Documents with more characters are cut into passages, at headings, paragraphs or sentences."""

    styles: tuple[str, ...] = ("question", "keyword", "symptom")
    """Styles of questions, from --prompts. Each passage gets one request per style."""
    count: Positive = 2
    """Number of questions that a request asks for."""
    prompts: Path | None = None
    """YAML file with a template for each style, with {count} and {passage} once each. None: the built-in templates."""
    examples: Path | None = None
    """Your own questions: a text file with a question per line, or a table. Some of them are shown in each request."""

    filters: tuple[FilterName, ...] = get_args(FilterName)
    """Filters to apply. copied: --copied-words consecutive words of the passage. language: another language than the
    passage. repeated: similar to an earlier question to the same document. not found: a search with --model does
    not find the document."""
    first: Positive = 20
    """Filter `not found`: a passage of the document must be among this many nearest passages."""
    copied_words: Positive = 7
    """Filter `copied`: drop a question with this many consecutive words of its passage. Two characters of Chinese, Japanese
    or Thai are a word."""
    similar: float = 0.95
    """Filter `repeated`: drop a question with at least this cosine (of --model) to an earlier question."""


@settings_class
class QuestionSettings(LanguageModelSettings, QuestionFiles):
    """Documents, language models, and filters of `angle-llm data questions`."""

    def __post_init__(self) -> None:
        _check_json_lines(self.out)
        written = self.out.expanduser().resolve()
        beside = [self.beside(f"{name}.jsonl").resolve() for name in ("passages", "dropped", "journal")]
        if Path(self.documents).expanduser().resolve() in (written, *beside, *written.parents):
            raise SettingsError(
                f"--out {self.out} would overwrite {self.documents} or be written into it. Name another file."
            )
        if written.exists() and not self.beside("journal.jsonl").exists():
            raise SettingsError(f"--out: {self.out} is not from this command. Remove it, or name another file.")
        if not self.llm:
            raise SettingsError("--llm: expected local:MODEL or URL#MODEL, got none.")
        if self.max_cost is not None and not any(asdict(self.prices).values()):
            raise SettingsError("--max-cost needs --prices.input or --prices.output above 0.")

    def beside(self, name: str) -> Path:
        """Return the path of an output file beside the file of pairs."""
        return self.out.expanduser().with_suffix(f".{name}")


# --- data score -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreFiles:
    """Data file, teacher and output of `angle-llm data score`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Examples of any format, as for training. With two prompts, the first text of an example is a
    query; its other texts are documents."""
    out: Path
    """The .jsonl file of groups (a query, positives, negatives). The same command resumes after a kill."""
    teacher: str | None = None
    """The encoder that scores: a saved directory, a model folder, a hub id, a .gguf file, or package:NAME/path/inside."""
    reranker: str | None = None
    """The reranker (cross-encoder) that scores in place of --teacher, with raw scores (logits): a model folder, a hub id, or
    package:NAME/path. Needs sentence-transformers (extra `export`)."""

    positive_above: Finite = 0.8
    """Scored pairs above this score (rescaled to 0..1) are positives of their first text, other pairs are negatives."""
    split_positives: bool = False
    """Write a group for each positive, with all negatives of its query, instead of a group for each query."""


@settings_class
class ScoreSettings(RowSettings, EncoderOptions, ScoreFiles):
    """Score the pairs of a data file with the cosines of an encoder, or the scores of a reranker."""

    def __post_init__(self) -> None:
        _check_json_lines(self.out)
        if (self.teacher is None) == (self.reranker is None):
            raise SettingsError("expected --teacher ENCODER or --reranker RERANKER, and not both.")
        for name in ("prompt", "instruction", "pooling", "bits", "attention"):
            if self.reranker is not None and getattr(self, name) != getattr(EncoderOptions, name):
                raise SettingsError(f"--{name} belongs to --teacher; a reranker has none. Omit it.")


def _check_json_lines(out: Path) -> None:
    """Raise `SettingsError` if the file name of an output does not end in .jsonl."""
    if out.suffix != ".jsonl":
        raise SettingsError(f"--out: expected a name that ends in .jsonl, got {out}.")
