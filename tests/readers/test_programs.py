"""Exported folders and model folders of all families, opened by the programs that people use: `make test-readers`.

Each program runs in an environment of its own (`.ci/readers`, made under `.bench/readers`). Its vectors are compared with
`SentenceEncoder.encode` in float32, and the token ids of `AutoTokenizer` and `tokenizers` there with the encoder's.
Afterwards `.bench/readers.md` has the table of docs/export.md.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import open_folder
import pytest
from families import (
    FAMILIES,
    MARKUP,
    REAL,
    TEXTS,
    VARIANTS,
    is_made,
    make_encoder,
    make_real_encoder,
    save_what_the_library_cannot_open,
)

from angle_llm import SentenceEncoder, load_prompt
from angle_llm.export import programs
from angle_llm.export.exported_folder import ExportFacts
from angle_llm.export.programs import program_notes
from angle_llm.export.texts import SENTENCES
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model.source.composite import text_part
from angle_llm.model.vectors import cosine_differences, untokenizable
from angle_llm.prompts import SIDES, SidePrompts

ROOT = Path(__file__).parents[2]
LARGEST = 1e-6
"""Of 1 − cosine. Other orders of summation in float32 give up to 1e-9."""


@dataclass(frozen=True)
class Reader:
    """A program in versions of its own."""

    title: str
    program: str
    python: Path
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Family that it refuses → a part of its message."""
    logged: Mapping[str, str] = field(default_factory=dict)
    """Family that it refuses → the reason in its log, if it is not in the message."""
    wrong_bidirectional: tuple[str, ...] = ()
    """Families whose bidirectional attention it computes wrongly without a message; the notes of an export say so."""
    refuses_bidirectional: bool = False
    """Whether it must refuse decoder-only models with bidirectional attention, which transformers 4 does not have."""
    strips: bool = False
    """Whether it removes outer white space from a text."""
    variants: tuple[str, ...] = tuple(VARIANTS)


def _environment(name: str) -> Path:
    return ROOT / ".bench/readers" / name / "bin/python"


def _without(*families: str) -> dict[str, str]:
    """Families whose model type a version of transformers does not have, with the message."""
    message = "model type `{}` but Transformers does not recognize this architecture"
    return {family: message.format(FAMILIES[family].model_type) for family in families}


GEMMA_3 = ("gemma-3", "gemma-3-gguf", "embedding-gemma")
NEED_5 = ("gemma-4", "qwen3.5", "embedding-gemma-2")
"""Families that transformers 4 does not have."""
READERS = {
    "sentence-transformers 3.4": Reader(
        "sentence-transformers 3.4.1 (transformers 4.48.3)",
        "sentence-transformers",
        _environment("sentence-transformers-3.4"),
        unknown=_without("qwen3", "lfm2", *GEMMA_3, *NEED_5),
        refuses_bidirectional=True,
        strips=True,
    ),
    "sentence-transformers 5.1": Reader(
        "sentence-transformers 5.1.2 (transformers 4.57.1)",
        "sentence-transformers",
        _environment("sentence-transformers-5.1"),
        unknown=_without(*NEED_5),
        refuses_bidirectional=True,
        strips=True,
    ),
    "sentence-transformers 6.2": Reader(
        "sentence-transformers 6.2.0 (transformers 5.23.0)", "sentence-transformers", Path(sys.executable)
    ),
    "vLLM 0.32": Reader(
        "vLLM 0.32.0 (transformers 5.19.0)",
        "vllm",
        _environment("vllm-0.32"),
        unknown={
            "mpnet": "Model architectures ['MPNetModel'] are not supported",
            "qwen3.5": "Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected",
            "embedding-gemma-2": "'head_dim' is a per-layer attribute",
        },
        logged={"qwen3.5": "No module named 'torchvision'"},  # see `.bench/readers` in the Makefile
        wrong_bidirectional=("mistral", "gemma-2", "gemma-4", *GEMMA_3),
        variants=("one prompt", "two prompts, normalised", "bidirectional", "dense"),
    ),
}
NEEDS_5 = "bidirectional attention needs transformers 5"
REFUSED = "refused"
"""Name of the folders that sentence-transformers must not open."""

Opened = dict[tuple[str, str], tuple[SentenceEncoder, Path]]


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """All encoders and their folders, by family and variant."""
    folder = tmp_path_factory.mktemp("families")
    tiny = {
        (family, variant): make_encoder(family, variant, folder / f"{family} {number}")
        for family in FAMILIES
        for number, variant in enumerate(VARIANTS)
        if is_made(family, variant)
    }
    return tiny | {(name, "one prompt"): make_real_encoder(name, folder / name) for name in REAL}


@pytest.fixture(scope="session")
def table() -> Iterator[dict[tuple[str, str], str]]:
    """Cells by family and reader, written when all tests are done."""
    cells: dict[tuple[str, str], str] = {}
    yield cells
    columns = [name for name in READERS if any(reader == name for _, reader in cells)]
    rows = [["family", *columns], ["---"] * (1 + len(columns))]
    rows += [[family, *(cells.get((family, name), "") for name in columns)] for family in (*FAMILIES, *REAL)]
    versions = "; ".join(READERS[name].title for name in columns)
    lines = [f"{date.today()}: {versions}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    (ROOT / ".bench").mkdir(exist_ok=True)
    (ROOT / ".bench/readers.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


QUICK = ("llama-2", "gemma-3", "bert")
"""Families whose variants are compared in `make test`, except `dense` (`test_dense.py`)."""

ONE_PROMPT = (*QUICK, "smollm2", "embedding-gemma-2")
"""Families whose variant `one prompt` is compared in `make test`."""

SLOW = pytest.mark.slow
QUICK_TEXTS = [text for text in TEXTS if text not in MARKUP] + MARKUP[::7]
"""Texts whose vectors are compared in `make test`; token ids are compared for all texts."""


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        pytest.param(
            family,
            variant,
            marks=[] if family in (ONE_PROMPT if variant == "one prompt" else QUICK) and variant != "dense" else SLOW,
        )
        for variant in ("one prompt", "model folder, two prompts", "bidirectional", "dense")
        for family in FAMILIES
        if is_made(family, variant)
    ],
)
@pytest.mark.needs("sentence_transformers")
def test_the_installed_versions_give_the_vectors_and_token_ids(family: str, variant: str, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", minversion="6.2")
    encoder, path = make_encoder(family, variant, tmp_path)
    config = json.loads((path / "config.json").read_text())
    if theta := (config.get("rope_parameters") or {}).get("rope_theta"):
        assert config["rope_theta"] == theta
    heads = list(_prompts(path).values()) or [""]
    got = {
        "rows": open_folder.with_sentence_transformers(str(path), _prompts(path), QUICK_TEXTS),
        "ids": json.dumps([open_folder.ids_of(path, [head + text for text in TEXTS]) for head in heads]),
    }
    assert not _compare(encoder, path, got, READERS["sentence-transformers 6.2"], QUICK_TEXTS)[1]


@pytest.mark.needs("sentence_transformers")
def test_the_comparison_leaves_out_no_text_with_names_of_added_tokens(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", minversion="6.2")
    _, exported = make_encoder("gemma-3-gguf", "one prompt", tmp_path)
    found = verify([tmp_path / "model", exported], VerifyOptions(device="cpu"))
    assert found.holds
    assert (found.texts, found.notes) == (len(SENTENCES), ())


PROMPTS = SidePrompts(load_prompt("query"), load_prompt("passage"))
ONE = SidePrompts(load_prompt("query"), load_prompt("query"))
NOTES = [
    ("llama", ExportFacts(ONE, "last", 9), ["sentence-transformers 3.4.1", "vLLM 0.32.0 (", "white space"]),
    ("gemma3_text", ExportFacts(ONE, "last", 9), ["sentence-transformers 5.1.2", "vLLM 0.32.0 ("]),
    ("bert", ExportFacts(ONE, "max", 9), ["transformers 5.23.0).", "'max'"]),
    ("opt", ExportFacts(ONE, "last", 9), ["opt"]),
    ("bert", ExportFacts(PROMPTS, "mean", 9), ["'query: '", "'passage: '", 'prompt_name="query"']),
    ("bert", ExportFacts(ONE, "mean", 9, head="query: "), ["'query: '"]),
    ("llama", ExportFacts(ONE, "last", 9, as_llama=True), ["LLaMA", "Text Embeddings Inference drops its biases"]),
    ("llama", ExportFacts(ONE, "last", 9, [f"<{n}>" for n in range(12)]), ["'<9>'", "angle_llm_export.json"]),
]


@pytest.mark.parametrize(("model_type", "facts", "parts"), NOTES)
def test_notes_of_an_export(model_type: str, facts: ExportFacts, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    shown = "\n".join(program_notes(tmp_path, facts))
    assert [part for part in parts if part not in shown] == []
    unwanted = {"vLLM 0.32 computes": facts.pooling != "max", "must send": not (facts.prompt.differ or facts.head)}
    assert not [part for part, absent in unwanted.items() if absent and part in shown]


def test_notes_of_an_export_with_bidirectional_attention(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        config, _ = text_part(family.config(), name)
        values = {"model_type": config.model_type, "sliding_window": getattr(config, "sliding_window", None)}
        (tmp_path / "config.json").write_text(json.dumps(values | {"is_causal": False}))
        shown = "\n".join(program_notes(tmp_path, ExportFacts(ONE, "mean", 9)))
        assert "needs transformers 5.2" in shown
        assert "5.1.2" not in shown
        wrong = READERS["vLLM 0.32"].wrong_bidirectional
        in_vllm = is_made(name, "bidirectional") and name not in wrong
        assert ("vLLM 0.32.0 (" in shown, "vLLM 0.32 computes other" in shown) == (in_vllm, not in_vllm), name


def test_exports_name_the_measured_programs_and_model_types() -> None:
    types = {name: family.model_type for name, family in FAMILIES.items()}
    assert set(types.values()) == programs._MEASURED
    unknown = {reader.title: {types[name] for name in reader.unknown} for reader in READERS.values()}
    assert unknown == programs._PROGRAMS


@pytest.mark.readers
@pytest.mark.parametrize("name", READERS)
def test_a_reader_gives_the_vectors_and_token_ids_of_the_encoder(
    name: str, opened: Opened, table: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    reader = READERS[name]
    if not reader.python.is_file():
        pytest.skip(f"{reader.title}: `make test-readers` makes its environment")
    folders = {
        f"{family} {variant}": {"path": str(path), "prompts": _prompts(path)}
        for (family, variant), (_, path) in opened.items()
        if variant in reader.variants
    }
    if reader.program == "sentence-transformers":
        for kind, path in save_what_the_library_cannot_open(tmp_path / "models").items():
            folders[f"{REFUSED} {kind}"] = {"path": str(path), "prompts": {}}
    found = _open(reader, folders, tmp_path)
    wrong = []
    for kind in folders:
        if kind.startswith(REFUSED) and "angle-llm export" not in str(found[kind].get("error")):
            wrong.append(f"{kind}: opened, or refused without the reason: {found[kind].get('error')}")
    for family in (*FAMILIES, *REAL):
        largest = []
        log = "".join(str(found[name]["log"]) for name in folders if name.startswith(f"{family} "))
        for variant in reader.variants if family in FAMILIES else ["one prompt"]:
            if (family, variant) not in opened:
                continue
            if variant == "bidirectional" and family in reader.wrong_bidirectional:
                largest.append("wrong")
                continue
            got = found[f"{family} {variant}"]
            if "error" in got:
                if reader.refuses_bidirectional and variant == "bidirectional" and NEEDS_5 in str(got["error"]):
                    largest.append("refused")
                    continue
                reason = reader.logged.get(family, "")  # logged with the first variant
                if reader.unknown.get(family, "\0") not in str(got["error"]) or reason not in log:
                    wrong.append(f"{family}, {variant}: {got['error']}")
                continue
            encoder, path = opened[family, variant]
            difference, problems = _compare(encoder, path, got, reader)
            if reader.refuses_bidirectional and variant == "bidirectional":
                wrong.append(f"{family}, {variant}: opened, although transformers 4 is always causal")
            largest.append(f"{difference:.0e}")
            wrong += [f"{family}, {variant}: {problem}" for problem in problems]
        table[family, name] = " · ".join(largest) or "not supported"
    assert not wrong, "\n".join(wrong)


def _prompts(path: Path) -> dict[str, str]:
    """The prompts that sentence-transformers adds, and other programs must send."""
    prompts: dict[str, str] = json.loads((path / "config_sentence_transformers.json").read_text())["prompts"]
    return prompts


def _open(reader: Reader, folders: dict[str, Any], work: Path) -> dict[str, dict[str, Any]]:
    """Open folders with a reader; return what it wrote about each of them, with what it printed while it opened a folder."""
    job, out = work / "job.json", work / "out"
    out.mkdir()
    job.write_text(json.dumps({"program": reader.program, "texts": TEXTS, "folders": folders}))
    command = [str(reader.python), str(Path(__file__).with_name("open_folder.py")), str(job), str(out)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (work / "shown").open("w") as shown:  # no pipe: an engine of vLLM can outlive its program and hold it open
        program = subprocess.Popen(command, stdout=shown, stderr=shown, env=environment, start_new_session=True)
        code = program.wait()
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    shown_text = (work / "shown").read_text()
    assert code == 0, shown_text[-2000:]
    found: dict[str, dict[str, Any]] = {}
    for name in folders:  # a line with the name is printed last
        log, _, shown_text = shown_text.partition(f"\n{name} ")
        found[name] = {**np.load(out / f"{name}.npz"), "log": log}
    return found


def _compare(
    encoder: SentenceEncoder, path: Path, got: dict[str, Any], reader: Reader, row_texts: Sequence[str] = TEXTS
) -> tuple[float, list[str]]:
    """Return the largest 1 − cosine of all sides and texts, and differences that are not documented.

    `row_texts` are the texts of the rows that the reader computed.
    """
    facts = ExportFacts.read(path)
    texts = [text for text in TEXTS if not any(untokenizable(encoder.for_side(side), text) for side in SIDES)]
    assert facts is None or not facts.plain_names
    embedded = [text for text in row_texts if text in texts]
    places = [row_texts.index(text) for text in embedded]
    heads = list(_prompts(path).values()) or [""]
    largest, problems = 0.0, []
    sides: list[Any] = (
        [encoder.for_side("query"), encoder.for_side("document")]
        if encoder.prompts.differ
        else [encoder] * len(heads)  # a prompt that the library adds is stored for both sides
    )
    for side, head, rows, (automatic, raw) in zip(sides, heads, got["rows"], json.loads(str(got["ids"])), strict=True):
        read = [(head + text).strip()[len(head) :] for text in embedded] if reader.strips else embedded
        differences = cosine_differences(rows[places].astype(np.float64), side.encode(read).astype(np.float64))
        largest = max(largest, float(differences.max()))
        problems += [
            f"1-cos {value:.1e} for {text!r:.50}"
            for text, value in zip(embedded, differences, strict=True)
            if not value <= LARGEST
        ]
        if bool(np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-4)) != encoder.normalize:
            problems.append(f"normalize is {encoder.normalize}, lengths are {np.linalg.norm(rows, axis=1)[:3]}")
        expected = side.tokenize(texts)
        forms = {"AutoTokenizer": automatic} | ({} if facts is None else {"tokenizers": raw})
        for form, ids in forms.items():
            other = [text for text, due in zip(texts, expected, strict=True) if ids[TEXTS.index(text)] != due]
            problems += [f"{form} gives other ids for {text!r:.50}" for text in other]
    return largest, problems
