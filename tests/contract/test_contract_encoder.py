"""`SentenceEncoder` in Python: exact vectors, saving and loading, and refused arguments."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Files
from tiny_folders import DIMENSIONS, contents, sentences, write_model
from transformers import AutoModel, AutoTokenizer

from angle_llm import PromptTemplate, SentenceEncoder, TrainSettings

PROMPT = 'Summarize sentence "{text}" in one word:"'
TEXTS = [*sentences(12, seed=9), "Hi", 'She said "no".', "Hi", "A man runs in the park, and nobody looks at him. " * 2]
CLOSE = 2e-6
"""Relative difference of two rows that are equal but for the rounding of float32."""


def plain_rows(folder: str, texts: list[str], template: str = "{text}", pooling: str = "last") -> np.ndarray:
    """Rows of plain transformers for one text at a time: no batch, no padding, no mask."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = tokenizer(template.replace("{text}", text), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states = model(input_ids=ids).last_hidden_state[0]
        rows.append((states[-1] if pooling == "last" else states.mean(dim=0)).numpy())
    return np.stack(rows)


def assert_close(rows: np.ndarray, due: np.ndarray, within: float = CLOSE) -> None:
    assert rows.shape == due.shape
    assert (np.linalg.norm(rows - due, axis=1) / np.linalg.norm(due, axis=1)).max() <= within


@pytest.fixture(scope="module")
def llama(files: Files) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(files.llama)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model folder that a test may change."""
    return write_model("llama", tmp_path / "base")


@pytest.fixture
def copied(model: str, tmp_path: Path) -> Path:
    """A copy of the trained adapter's folder that a test may change."""
    return Path(shutil.copytree(model, tmp_path / "copied"))


def lora(**values: Any) -> Any:
    """Settings of an adapter."""
    return type(TrainSettings().lora)(**values)


@pytest.mark.parametrize(
    ("kind", "template", "pooling"),
    [("llama", PROMPT, "last"), ("mistral", PROMPT, "last"), ("llama", "{text}", "mean"), ("bert", "{text}", "mean")],
)
@pytest.mark.parametrize("budget", [None, 60])
def test_rows_equal_the_plain_model_on_one_text_at_a_time(
    kind: str, template: str, pooling: str, budget: int | None, files: Files
) -> None:
    prompt = PromptTemplate(name="x", template=template)
    encoder = SentenceEncoder.from_pretrained(getattr(files, kind), prompt=prompt, pooling=pooling)
    rows = encoder.encode(TEXTS, micro_batch_tokens=budget)
    assert_close(rows, plain_rows(getattr(files, kind), TEXTS, template, pooling))


def test_the_edits_of_a_prompt_change_the_text(llama: SentenceEncoder) -> None:
    rows = llama.with_prompt("summarize_one_word_edited").encode(['A "dog" runs', "Who runs?", "A dog."])
    assert_close(rows, llama.encode(["A 'dog' runs.", "Who runs.", "A dog."]))


def test_defaults_depend_on_the_kind_of_model(files: Files) -> None:
    llama, bert = (SentenceEncoder.from_pretrained(path) for path in (files.llama, files.bert))
    assert (llama.prompt.name, llama.pooling) == ("summarize_one_word", "last")
    assert (bert.prompt.name, bert.pooling) == ("plain", "mean")


def test_rows_are_float32_in_the_order_given(llama: SentenceEncoder) -> None:
    rows = llama.encode(TEXTS)
    assert (rows.dtype, rows.shape) == (np.float32, (len(TEXTS), DIMENSIONS))
    order = np.random.default_rng(0).permutation(len(TEXTS))
    assert_close(llama.encode([TEXTS[at] for at in order]), rows[order])
    assert np.array_equal(rows[12], rows[14]), "the same text twice"


def test_no_text_gives_no_row(llama: SentenceEncoder) -> None:
    rows = llama.encode([])
    assert (rows.dtype, rows.shape) == (np.float32, (0, DIMENSIONS))


def test_repeated_texts_and_shared_prefixes_are_computed_once(llama: SentenceEncoder, files: Files) -> None:
    texts = sentences(20) * 3
    _, stats = llama.encode(texts, return_stats=True)
    assert (stats.texts, stats.unique_texts) == (60, 20)
    assert stats.computed_tokens < 0.3 * stats.logical_tokens
    _, alone = llama.encode(sentences(20), return_stats=True)
    assert stats.computed_tokens == alone.computed_tokens < alone.logical_tokens
    _, padded = SentenceEncoder.from_pretrained(files.bert).encode(texts, return_stats=True)
    assert padded.unique_texts == 20
    assert padded.computed_tokens >= padded.logical_tokens / 3


@pytest.mark.parametrize(
    ("texts", "error", "named"),
    [("one text", TypeError, "list|sequence"), (["a", ""], ValueError, r"\b1\b"), (["a", "b", 3], TypeError, r"\b2\b")],
)
def test_encode_refuses_input_that_is_not_a_list_of_texts(
    texts: Any, error: type[Exception], named: str, llama: SentenceEncoder
) -> None:
    with pytest.raises(error, match=named):
        llama.encode(texts)


@pytest.mark.parametrize("tokenization", ["joined", "segments"])
def test_a_long_text_loses_its_end_and_the_prompt_nothing(tokenization: str, files: Files) -> None:
    """In `segments` the ids are head, as much of the text as fits, tail."""
    prompt = PromptTemplate(name="x", template='Say "{text}" now:', tokenization=tokenization)
    encoder = SentenceEncoder.from_pretrained(files.llama, prompt=prompt, max_length=40)
    long = "runs in the park and " * 30
    rows = encoder.encode([long, long + "something else", long[:40]])
    assert np.array_equal(rows[0], rows[1]), "the end is cut"
    assert not np.allclose(rows[0], rows[2])
    if tokenization == "segments":
        model, tokenizer = AutoModel.from_pretrained(files.llama).eval(), AutoTokenizer.from_pretrained(files.llama)
        head = tokenizer('Say "')["input_ids"]
        middle, tail = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (long, '" now:'))
        ids = [*head, *middle[: 40 - len(head) - len(tail)], *tail]
        with torch.no_grad():
            due = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1:].numpy()
        assert_close(rows[:1], due)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_names_of_special_tokens_in_a_text_are_plain_text(kind: str, files: Files) -> None:
    encoder = SentenceEncoder.from_pretrained(getattr(files, kind))
    special = ["</s>", "<s>", "<|im_end|>"] if kind == "llama" else ["[SEP]", "[CLS]", "[PAD]", "[MASK]"]
    rows = encoder.encode([f"A dog {token} runs." for token in special] + ["A dog runs."])
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2) + np.eye(len(rows))
    assert distances.min() > 1e-3
    tokenizer = AutoTokenizer.from_pretrained(getattr(files, kind))
    inert = tokenizer(encoder.prompt.template.replace("{text}", special[0]), split_special_tokens=True)["input_ids"]
    with torch.no_grad():
        states = (
            AutoModel.from_pretrained(getattr(files, kind)).eval()(input_ids=torch.tensor([inert])).last_hidden_state
        )
    due = (states[:, -1] if kind == "llama" else states.mean(dim=1)).numpy()
    assert_close(encoder.encode([special[0]]), due)


def test_complex_rows_are_the_halves(llama: SentenceEncoder) -> None:
    rows, complex_rows = llama.encode(TEXTS), llama.encode_complex(TEXTS)
    assert (complex_rows.dtype, complex_rows.shape) == (np.complex64, (len(TEXTS), DIMENSIONS // 2))
    assert np.array_equal(np.concatenate([complex_rows.real, complex_rows.imag], axis=1), rows)


def test_a_saved_and_loaded_encoder_gives_the_same_rows(files: Files, tmp_path: Path) -> None:
    for kind in ("llama", "bert"):
        encoder = SentenceEncoder.from_pretrained(
            getattr(files, kind), prompt="prompteol", max_length=50, pooling="mean"
        )
        encoder.save_pretrained(tmp_path / kind)
        again = SentenceEncoder.from_pretrained(tmp_path / kind)
        assert (again.prompt.name, again.pooling, again.max_length) == ("prompteol", "mean", 50)
        assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
        assert not [name for name in contents(tmp_path / kind) if Path(name).suffix in (".bin", ".pt", ".pkl")]


def test_an_adapter_is_added_saved_and_loaded(base: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(base)
    before = encoder.encode(TEXTS)
    encoder.add_lora(lora(rank=4, alpha=8))
    assert_close(encoder.encode(TEXTS), before)
    trained = [weight for weight in encoder.model.parameters() if weight.requires_grad]
    assert 0 < sum(weight.numel() for weight in trained) < sum(w.numel() for w in encoder.model.parameters()) / 4
    with torch.no_grad():
        for weight in trained:
            weight.add_(0.1)
    rows = encoder.encode(TEXTS)
    assert np.abs(rows - before).max() > 1e-2
    encoder.save_pretrained(tmp_path / "saved")
    assert {"adapter_model.safetensors", "angle_llm.json"} <= set(contents(tmp_path / "saved"))
    assert np.array_equal(SentenceEncoder.from_pretrained(tmp_path / "saved").encode(TEXTS), rows)
    with pytest.raises(ValueError, match=r"(?i)adapter"):
        encoder.add_lora(lora(rank=4, alpha=8))


def test_a_cut_encoder_gives_the_first_dimensions_and_layers(
    files: Files, llama: SentenceEncoder, tmp_path: Path
) -> None:
    cut = SentenceEncoder.from_pretrained(files.llama, dimensions=8)
    assert np.array_equal(cut.encode(TEXTS), llama.encode(TEXTS)[:, :8])
    short = SentenceEncoder.from_pretrained(files.llama, dimensions=8, layers=1)
    assert not np.allclose(short.encode(TEXTS), cut.encode(TEXTS))
    short.save_pretrained(tmp_path / "short")
    assert np.array_equal(SentenceEncoder.from_pretrained(tmp_path / "short").encode(TEXTS), short.encode(TEXTS))
    with pytest.raises(ValueError, match="33"):
        SentenceEncoder.from_pretrained(files.llama, dimensions=33)


def test_an_adapter_on_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(base)
    encoder.add_lora(lora(rank=4, alpha=8))
    encoder.save_pretrained(tmp_path / "saved")
    shutil.rmtree(base)
    write_model("llama", base, seed=1)
    with pytest.raises(ValueError, match=r"(?i)base|weights"):
        SentenceEncoder.from_pretrained(tmp_path / "saved")
    shutil.rmtree(base)
    with pytest.raises((ValueError, FileNotFoundError), match=str(base)):
        SentenceEncoder.from_pretrained(tmp_path / "saved")


def test_pickled_weights_are_refused(base: Path) -> None:
    torch.save(AutoModel.from_pretrained(base).state_dict(), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        SentenceEncoder.from_pretrained(base)


def test_code_in_a_model_folder_is_not_run(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "own.Own", "AutoConfig": "own.OwnConfig"}, "model_type": "own"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match=str(base)):
        SentenceEncoder.from_pretrained(base)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "angle_llm.json", "adapter_config.json"])
def test_a_damaged_folder_is_refused_with_the_name_of_the_file(name: str, copied: Path) -> None:
    whole = (copied / name).read_bytes()
    (copied / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=str(copied)):
        SentenceEncoder.from_pretrained(copied)


def test_an_unknown_key_of_the_card_is_refused(copied: Path) -> None:
    card = json.loads((copied / "angle_llm.json").read_text())
    (copied / "angle_llm.json").write_text(json.dumps(card | {"poolng": "last"}))
    with pytest.raises(ValueError, match=r"angle_llm\.json.*poolng.*pooling"):
        SentenceEncoder.from_pretrained(copied)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pooling": "lats"}, "last"),
        ({"dtype": "float23"}, "float32"),
        ({"max_length": 4000}, "4000"),
        ({"pooling": "cls"}, "cls"),
    ],
)
def test_an_invalid_option_is_refused(options: dict[str, Any], named: str, files: Files) -> None:
    with pytest.raises(ValueError, match=named):
        SentenceEncoder.from_pretrained(files.llama, **options)


def test_save_does_not_overwrite_a_folder_with_other_files(llama: SentenceEncoder, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=str(tmp_path)):
        llama.save_pretrained(tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}
