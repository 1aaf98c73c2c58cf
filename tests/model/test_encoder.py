"""Encoding: equal to the plain model on one text at a time, in any batch, order and padding."""

import copy
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import one_in
from numpy.typing import NDArray
from test_pooling import by_hand
from tiny import CAUSAL, KINDS, POSITIONS, save_tiny_base, tiny_backbone, tiny_encoder
from tiny_tokenizers import TOKENIZERS

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.model.layers.activation_checkpointing import forward_lock
from angle_llm.model.pooling import POOLINGS

Rows = NDArray[np.float32]

LONG = "Two dogs run along the river while a man in a red hat eats bread, and nobody looks at the small boat."
TEXTS = ["A man is eating.", LONG, "Hi", "Someone eats.", 'She said "no".', "Hi", "A man is eating.", "Where is it?"]
ROUNDING = 1e-6
"""Relative difference of rows that differ by float32 rounding: sums of 32 to 48 terms in another order, 6e-8 each, through
three layers; up to 8e-7 seen. A leak of one padding token makes 1e-1."""

every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def encoder_of(kind: str) -> SentenceEncoder:
    """Read-only."""
    return tiny_encoder(kind)


@cache
def backbone_of(kind: str) -> Any:
    """The weights of `encoder_of` in another model. Read-only."""
    return tiny_backbone(kind)


def prompted_ids(kind: str, text: str) -> list[int]:
    prompt = 'Summarize sentence "{text}" in one word:"' if KINDS[kind].causal else "{text}"
    ids: list[int] = TOKENIZERS[KINDS[kind].tokenizer]()(prompt.format(text=text))["input_ids"]
    return ids


def one_at_a_time(kind: str, texts: list[str], pooling: str) -> Rows:
    """No padding, no mask, no batch."""
    rows = []
    for text in texts:
        with torch.no_grad():
            output = backbone_of(kind)(input_ids=torch.tensor([prompted_ids(kind, text)]), output_hidden_states=True)
        states_TD = output.last_hidden_state[0]
        if pooling == "first-last-avg":
            states_TD = (output.hidden_states[1][0] + states_TD) / 2
        rows.append(by_hand(pooling, states_TD.tolist()))
    return np.array(rows, dtype=np.float32)


def left_padded(kind: str, texts: list[str]) -> Rows:
    """The usual batch of a decoder: padding on the left, a mask, positions counted from the first real token."""
    ids = [prompted_ids(kind, text) for text in texts]
    longest = max(map(len, ids))
    ids_BT = torch.tensor([[3] * (longest - len(sequence)) + sequence for sequence in ids])
    mask_BT = torch.tensor([[0] * (longest - len(sequence)) + [1] * len(sequence) for sequence in ids])
    first_position = 2 if kind == "roberta" else 0
    positions_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0) + first_position
    with torch.no_grad():
        output = backbone_of(kind)(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT)
    states_BTD = output.last_hidden_state
    if KINDS[kind].causal:
        return np.asarray(states_BTD[:, -1].numpy())
    return np.stack([s[m.bool()].mean(dim=0).numpy() for s, m in zip(states_BTD, mask_BT, strict=True)])


def assert_same_rows(rows: Rows, expected: Rows) -> None:
    assert rows.dtype == expected.dtype == np.float32
    assert rows.shape == expected.shape
    difference = np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert difference.max() <= ROUNDING, difference


@every_kind
def test_equals_the_plain_model_alone_left_padded_and_in_any_micro_batches(kind: str) -> None:
    encoder = encoder_of(kind)
    expected = one_at_a_time(kind, TEXTS, "last" if kind in CAUSAL else "mean")
    assert_same_rows(left_padded(kind, TEXTS), expected)
    assert_same_rows(np.concatenate([encoder.encode([text]) for text in TEXTS]), expected)
    for tokens in (1, 50, 100, 100_000, None):
        assert_same_rows(encoder.encode(TEXTS, micro_batch_tokens=tokens), expected)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    assert_same_rows(encoder.encode([TEXTS[i] for i in order], micro_batch_tokens=60), expected[order])
    assert len(np.unique(np.round(expected, 4), axis=0)) == len(set(TEXTS)), "else any order would pass"


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    "kind",
    ["llama", "gpt2", "bert", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "roberta"))],
)
def test_every_pooling_equals_the_plain_model(kind: str, pooling: str) -> None:
    if pooling == "cls" and kind in CAUSAL:
        with pytest.raises(ValueError, match=r"'cls'.*same vector"):
            tiny_encoder(kind, pooling=pooling)
        return
    assert_same_rows(tiny_encoder(kind, pooling=pooling).encode(TEXTS), one_at_a_time(kind, TEXTS, pooling))


@one_in(
    5,
    "kind, side, pad",
    ["llama-tied", "gpt2", "bert", "roberta"],
    ["left", "right"],
    ["unchanged", "none", "a token of the text"],
)
def test_the_padding_of_the_tokenizer_has_no_effect(kind: str, side: str, pad: str) -> None:
    """RoBERTa counts positions past its own padding id, which is in its config; that of the tokenizer can differ."""
    encoder = tiny_encoder(kind)
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.padding_side = side
    if pad == "none":
        tokenizer.pad_token = None
    elif pad != "unchanged":
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(prompted_ids(kind, "Hi")[1])
    changed = SentenceEncoder(tiny_backbone(kind), tokenizer)
    assert_same_rows(changed.encode(TEXTS), encoder.encode(TEXTS))


@every_kind
def test_a_long_text_is_truncated_to_the_positions_of_the_model(kind: str) -> None:
    encoder = encoder_of(kind)
    assert encoder.max_length == POSITIONS
    huge = " ".join([LONG] * 30)
    rows = encoder.encode([huge, "Hi", huge + " More."])
    assert np.isfinite(rows).all()
    assert_same_rows(rows[1:2], encoder.encode(["Hi"]))
    assert np.array_equal(rows[0], rows[2])
    with pytest.raises(ValueError, match=rf"max_length.*{POSITIONS}.*{POSITIONS + 1}"):
        tiny_encoder(kind, max_length=POSITIONS + 1)
    with pytest.raises(ValueError, match=r"max_length: expected 1 or more, got 0"):
        tiny_encoder(kind, max_length=0)


@every_kind
def test_shapes_and_dtypes(kind: str) -> None:
    encoder, dimensions = encoder_of(kind), KINDS[kind].dimensions
    assert encoder.dimensions == dimensions
    nothing = encoder.encode([])
    assert (nothing.shape, nothing.dtype) == ((0, dimensions), np.float32)
    exact = encoder.encode(TEXTS)
    for dtype, precision in ((torch.bfloat16, 0.99), (torch.float16, 0.9999)):
        rows = tiny_encoder(kind, dtype).encode(TEXTS)
        assert rows.dtype == np.float32
        cosine = (rows * exact).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(exact, axis=1)
        assert cosine.min() > precision
    assert np.array_equal(encoder.encode(tuple(TEXTS)), encoder.encode(np.array(TEXTS)))  # type: ignore[arg-type]


def test_a_series_of_pandas_is_read_in_its_order() -> None:
    """Its index is not a position."""
    encoder = encoder_of("llama")
    series: Any = pd.Series(TEXTS, index=range(len(TEXTS)))[::-1]
    assert np.array_equal(encoder.encode(series), encoder.encode(TEXTS[::-1]))
    assert encoder.tokenize(series) == encoder.tokenize(TEXTS[::-1])
    chosen: Any = pd.Series(["plain", "text"], index=[7, 9])
    assert np.array_equal(encoder.encode(chosen), encoder.encode(["plain", "text"]))


def test_encode_keeps_the_token_ids_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, plans = encoder_of("llama"), list[weakref.ref[Any]]()
    most = 0

    def plan(self: SentenceEncoder, *arguments: Any) -> Any:
        nonlocal most
        planned = plan_ids(self, *arguments)
        plans.append(weakref.ref(planned))
        most = max(most, sum(plan() is not None for plan in plans))
        return planned

    plan_ids = SentenceEncoder.plan_ids
    monkeypatch.setattr(SentenceEncoder, "plan_ids", plan)
    monkeypatch.setattr("angle_llm.model.encoder.TEXTS_PLANNED", 1)
    encoder.encode([f"text {number}" for number in range(20)])
    assert 0 < most <= 4, "two blocks are prepared while one is computed"


def test_a_table_is_refused() -> None:
    """The texts of a table or dictionary would be the names of its columns."""
    for table in (pd.DataFrame({"answer": TEXTS}), {"answer": TEXTS}):
        with pytest.raises(TypeError, match="Pass one column"):
            encoder_of("llama").encode(table)  # type: ignore[call-overload]


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown side 'documents'\. Did you mean 'document'"):
        encoder_of("llama").for_side("documents")  # type: ignore[arg-type]


def test_a_pooling_is_refused_if_unknown_or_impossible() -> None:
    with pytest.raises(ValueError, match=r"unknown pooling 'lsat'.*'last'"):
        tiny_encoder("llama", pooling="lsat")
    with pytest.raises(ValueError, match="'cls' reads the first token"):
        tiny_encoder("llama", pooling="cls")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["opt", "bert"])  # they have a dropout of 10 %
def test_encode_uses_no_dropout_and_keeps_mode_weights_and_gradients(kind: str, training: bool) -> None:
    encoder = tiny_encoder(kind)
    assert not any(module.training for module in encoder.model.modules())
    encoder.model.train(training)
    before = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    assert_same_rows(encoder.encode(TEXTS), encoder_of(kind).encode(TEXTS))
    assert all(module.training is training for module in encoder.model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in encoder.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.model.state_dict().items())


@every_kind
def test_a_published_folder_is_an_encoder_with_defaults_by_kind(kind: str, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base(kind, tmp_path), device="cpu")
    assert np.array_equal(encoder.encode(TEXTS), encoder_of(kind).encode(TEXTS))
    assert (encoder.base, encoder.device) == (str(tmp_path), torch.device("cpu"))
    prompt, pooling = ("summarize_one_word", "last") if KINDS[kind].causal else ("plain", "mean")
    assert (encoder.prompt, encoder.pooling) == (load_prompt(prompt), pooling)


def test_options_of_loading_and_the_default_length(tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path)
    mine = PromptTemplate(name="mine", template="{text} means")
    for prompt in ("prompteol", mine):
        encoder = SentenceEncoder.from_pretrained(
            str(tmp_path), prompt=prompt, pooling="mean", max_length=60, dtype="bfloat16", device="cpu"
        )
        assert encoder.prompt == (mine if prompt is mine else load_prompt("prompteol"))
        assert (encoder.pooling, encoder.max_length) == ("mean", 60)
        assert {parameter.dtype for parameter in encoder.model.parameters()} == {torch.bfloat16}
    backbone = tiny_backbone("llama")
    backbone.config.max_position_embeddings = 4096
    assert SentenceEncoder(backbone, TOKENIZERS["llama2"]()).max_length == 512


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), "gpu"])
def test_a_device_that_does_not_exist_is_refused(device: Any, tmp_path: Path) -> None:
    if str(device) != "gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises((ValueError, RuntimeError), match=rf"device.*{device}"):
        SentenceEncoder.from_pretrained(tmp_path / "no model is read", device=device)


def test_a_corpus_is_planned_in_blocks_with_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, counts = encoder_of("llama").encode(TEXTS, return_stats=True)
    assert (counts.texts, counts.unique_texts) == (len(TEXTS), len(set(TEXTS)))
    assert counts.seconds > 0
    assert 0 < counts.computed_tokens < counts.logical_tokens
    assert counts.lengths == list(map(len, encoder_of("llama").tokenize(TEXTS)))
    assert counts.logical_tokens == sum(counts.lengths)
    monkeypatch.setattr("angle_llm.model.encoder.TEXTS_PLANNED", 3)
    blocks, in_blocks = encoder_of("llama").encode(TEXTS, return_stats=True)
    assert_same_rows(blocks, whole)
    assert (in_blocks.texts, in_blocks.lengths) == (counts.texts, counts.lengths)
    assert in_blocks.computed_tokens > counts.computed_tokens, "blocks share nothing with each other"
    with pytest.raises(ValueError, match="text 7 is empty"):
        encoder_of("llama").encode([*TEXTS[:7], " "])


@pytest.mark.parametrize("planned", [2, 100])
def test_an_embedding_that_is_not_finite_is_an_error(planned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the text, also in a later block."""
    encoder = tiny_encoder("bert")
    (row,) = encoder.encode(["spoilt"])

    def spoil(_: Any, __: Any, rows: torch.Tensor) -> None:
        rows[(rows - torch.from_numpy(row)).abs().amax(dim=1) < 1e-5] = torch.nan

    encoder.model.register_forward_hook(spoil)
    monkeypatch.setattr("angle_llm.model.encoder.TEXTS_PLANNED", planned)
    with pytest.raises(FloatingPointError, match="the embedding of 'spoilt' is not finite"):
        encoder.encode(["a", "b", "c", "spoilt", "d"])


def test_one_text_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"list|sequence"):
        encoder_of("llama").encode("one text")


def test_threads_can_share_an_encoder_and_other_encoders_do_not_wait() -> None:
    encoder, other = tiny_encoder("llama"), tiny_encoder("llama")
    expected = encoder.encode(TEXTS)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda count: encoder.encode(TEXTS[:count]), [2, 5, 8] * 10))
        assert all(np.abs(found - expected[: len(found)]).max() < 1e-5 for found in rows)
        assert encoder.model.backbone.config._attn_implementation == "sdpa"
        with forward_lock(encoder.model.backbone):
            waits = pool.submit(encoder.with_prompt("plain").encode, TEXTS)
            assert len(pool.submit(other.encode, TEXTS).result(timeout=60)) == len(TEXTS)
            assert not waits.done()
        assert len(waits.result(timeout=60)) == len(TEXTS)
