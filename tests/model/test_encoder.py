"""Encoding: equal to the plain model on one text at a time, whatever the batch, the order and the padding."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import BIDIRECTIONAL, CAUSAL, KINDS, POSITIONS, save_tiny_base, tiny_backbone, tiny_encoder
from tiny_tokenizers import TOKENIZERS

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.model.pooling import POOLINGS

Rows = NDArray[np.float32]

LONG = "Two dogs run along the river while a man in a red hat eats bread, and nobody looks at the small boat."
TEXTS = ["A man is eating.", LONG, "Hi", "Someone eats.", 'She said "no".', "Hi", "A man is eating.", "Where is it?"]
ROUNDING = 1e-6
"""Relative difference of two rows that are equal but for float32 rounding: sums of 32 to 48 terms in another order, one
unit in the last place (6e-8) each, through three layers; up to 8e-7 seen. A leak of one padding token makes 1e-1."""

every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def encoder_of(kind: str) -> SentenceEncoder:
    """Not to be changed."""
    return tiny_encoder(kind)


@cache
def backbone_of(kind: str) -> Any:
    """The same weights as `encoder_of`, in another model. Not to be changed."""
    return tiny_backbone(kind)


def worded_ids(kind: str, text: str) -> list[int]:
    """What a user of the plain tokenizer would write."""
    prompt = 'Summarize sentence "{text}" in one word:"' if KINDS[kind].causal else "{text}"
    ids: list[int] = TOKENIZERS[KINDS[kind].tokenizer]()(prompt.format(text=text))["input_ids"]
    return ids


def pooled_by_hand(name: str, last_TD: torch.Tensor, first_TD: torch.Tensor) -> Rows:
    states, first = last_TD.numpy(), first_TD.numpy()
    ways: dict[str, Any] = {
        "last": lambda: states[-1],
        "cls": lambda: states[0],
        "mean": lambda: states.mean(axis=0),
        "last-avg": lambda: states.mean(axis=0),
        "last-max": lambda: states.max(axis=0),
        "cls-last-avg": lambda: (states[0] + states.mean(axis=0)) / 2,
        "first-last-avg": lambda: ((first + states) / 2).mean(axis=0),
    }
    row: Rows = ways[name]()
    return row


def one_at_a_time(kind: str, texts: list[str], pooling: str) -> Rows:
    """No padding, no mask, no batch."""
    rows = []
    for text in texts:
        with torch.no_grad():
            output = backbone_of(kind)(input_ids=torch.tensor([worded_ids(kind, text)]), output_hidden_states=True)
        rows.append(pooled_by_hand(pooling, output.last_hidden_state[0], output.hidden_states[1][0]))
    return np.stack(rows)


def left_padded(kind: str, texts: list[str]) -> Rows:
    """The usual way of batching a decoder: padding in front, a mask, positions counted from the first real token."""
    ids = [worded_ids(kind, text) for text in texts]
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


def assert_same_rows(rows: Rows, expected: Rows, tolerance: float = ROUNDING) -> None:
    assert rows.dtype == expected.dtype == np.float32
    assert rows.shape == expected.shape
    difference = np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert difference.max() <= tolerance, difference


# --- the same vector, whatever stands beside the text ---------------------------------------------------------------


@every_kind
def test_equals_the_plain_model_on_one_text_at_a_time(kind: str) -> None:
    assert_same_rows(encoder_of(kind).encode(TEXTS), one_at_a_time(kind, TEXTS, "last" if kind in CAUSAL else "mean"))


@every_kind
def test_equals_the_plain_model_on_a_left_padded_batch(kind: str) -> None:
    assert_same_rows(encoder_of(kind).encode(TEXTS), left_padded(kind, TEXTS))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "bert", "roberta"])
def test_every_pooling_equals_the_plain_model(kind: str, pooling: str) -> None:
    if pooling == "cls" and kind in CAUSAL:
        with pytest.raises(ValueError, match=r"'cls' reads the first token.* every text .* same vector\. Use last"):
            tiny_encoder(kind, pooling=pooling)
        return
    assert_same_rows(tiny_encoder(kind, pooling=pooling).encode(TEXTS), one_at_a_time(kind, TEXTS, pooling))


@every_kind
def test_alone_together_and_in_any_micro_batches(kind: str) -> None:
    encoder = encoder_of(kind)
    together = encoder.encode(TEXTS, micro_batch_tokens=100_000)
    assert_same_rows(np.concatenate([encoder.encode([text]) for text in TEXTS]), together)
    for tokens in (1, 50, 100, None):
        assert_same_rows(encoder.encode(TEXTS, micro_batch_tokens=tokens), together)


@every_kind
def test_rows_come_in_the_order_given(kind: str) -> None:
    rows = encoder_of(kind).encode(TEXTS)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    assert_same_rows(encoder_of(kind).encode([TEXTS[i] for i in order], micro_batch_tokens=60), rows[order])
    distinct = np.unique(np.round(rows, 4), axis=0)
    assert len(distinct) == len(set(TEXTS))  # else any order would do


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_repeated_texts_are_encoded_once(kind: str) -> None:
    encoder = tiny_encoder(kind)
    seen: list[int] = []
    encoder.model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    rows = encoder.encode(TEXTS)
    assert sum(seen) == len(set(TEXTS)) < len(TEXTS)
    assert np.array_equal(rows[TEXTS.index("Hi")], rows[5])
    assert np.array_equal(rows[0], rows[6])


@pytest.mark.parametrize("pad", ["as it is", "none", "a word of the text"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama-tied", "gpt2", "bert", "roberta"])
def test_the_tokenizers_padding_has_no_say(kind: str, side: str, pad: str) -> None:
    """RoBERTa counts positions past its own padding id, which its config knows; the tokenizer's may differ."""
    import copy

    encoder = tiny_encoder(kind)
    expected = encoder.encode(TEXTS)
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.padding_side = side
    if pad == "none":
        tokenizer.pad_token = None
    elif pad != "as it is":
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(worded_ids(kind, "Hi")[1])
    changed = SentenceEncoder(tiny_backbone(kind), tokenizer)
    assert_same_rows(changed.encode(TEXTS), expected)


@every_kind
def test_a_text_longer_than_the_model_is_shortened_to_its_positions(kind: str) -> None:
    encoder = encoder_of(kind)
    assert encoder.max_length == POSITIONS
    huge = " ".join([LONG] * 30)
    rows = encoder.encode([huge, "Hi", huge + " More."])
    assert np.isfinite(rows).all()
    assert_same_rows(rows[1:2], encoder.encode(["Hi"]))
    assert np.array_equal(rows[0], rows[2])  # equal ids after shortening: one piece of work


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_a_sliding_window_is_in_force(kind: str) -> None:
    """Else those two kinds would test nothing that llama does not. Three layers of window 6 look back 15 tokens."""
    far, near = "Cats sleep " + LONG, "Dogs sleep " + LONG
    rows = tiny_encoder(kind, prompt=load_prompt("plain")).encode([far, near])
    if kind == "mistral":
        assert_same_rows(rows[:1], rows[1:])
    else:  # every second layer of Gemma 2 sees everything
        assert np.abs(rows[0] - rows[1]).max() > 1e-3


# --- what comes out -------------------------------------------------------------------------------------------------


@every_kind
def test_shape_and_dimensions(kind: str) -> None:
    encoder = encoder_of(kind)
    assert encoder.dimensions == KINDS[kind].dimensions
    assert encoder.encode(TEXTS[:3]).shape == (3, KINDS[kind].dimensions)
    nothing = encoder.encode([])
    assert nothing.shape == (0, KINDS[kind].dimensions)
    assert nothing.dtype == np.float32
    assert encoder.encode_complex([]).shape == (0, KINDS[kind].dimensions // 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_kind
def test_a_half_precision_backbone_gives_float32_rows(kind: str, dtype: torch.dtype) -> None:
    rows = tiny_encoder(kind, dtype).encode(TEXTS)
    exact = encoder_of(kind).encode(TEXTS)
    assert rows.dtype == np.float32
    cosine = (rows * exact).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(exact, axis=1)
    # Weights and states of 8 (bfloat16) or 11 bits; float16 is the finer of the two.
    assert cosine.min() > {torch.bfloat16: 0.99, torch.float16: 0.9999}[dtype]


def test_the_complex_vector_is_the_two_halves() -> None:
    encoder = encoder_of("llama")
    rows, complex_rows = encoder.encode(TEXTS), encoder.encode_complex(TEXTS)
    assert complex_rows.dtype == np.complex64
    assert np.array_equal(complex_rows.real, rows[:, :16])
    assert np.array_equal(complex_rows.imag, rows[:, 16:])


def test_any_sequence_of_texts_will_do() -> None:
    encoder = encoder_of("bert")
    expected = encoder.encode(TEXTS)
    assert np.array_equal(encoder.encode(tuple(TEXTS)), expected)
    assert np.array_equal(encoder.encode(np.array(TEXTS)), expected)


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    encoder_of("bert").encode(TEXTS)
    assert capsys.readouterr().err == ""
    encoder_of("bert").encode(TEXTS, show_progress=True)
    assert "encode" in capsys.readouterr().err


# --- what is refused ------------------------------------------------------------------------------------------------


def test_one_string_is_no_list_of_texts() -> None:
    with pytest.raises(TypeError, match=r"got one string\. Put it in a list"):
        encoder_of("bert").encode("A man is eating.")


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_an_empty_text_is_told_with_its_position(empty: str) -> None:
    with pytest.raises(ValueError, match="text 1 is empty"):
        encoder_of("bert").encode(["A man is eating.", empty, "Hi"])


def test_what_is_no_text_is_told_with_its_position() -> None:
    texts: list[Any] = ["Hi", "Hi", 3.5]
    with pytest.raises(TypeError, match=r"text 2 must be a string, got float: 3\.5"):
        encoder_of("bert").encode(texts)


@every_kind
def test_a_max_length_beyond_the_positions_is_refused(kind: str) -> None:
    assert tiny_encoder(kind, max_length=POSITIONS).max_length == POSITIONS
    with pytest.raises(ValueError, match=f"max_length {POSITIONS + 1} is more than the {POSITIONS} positions"):
        tiny_encoder(kind, max_length=POSITIONS + 1)


def test_a_pooling_is_refused_if_unknown_or_impossible() -> None:
    with pytest.raises(ValueError, match=r"unknown pooling 'lsat'.*'last'"):
        tiny_encoder("llama", pooling="lsat")
    with pytest.raises(ValueError, match=r"'first-last-avg'.* from 32 to 24 dimensions"):
        tiny_encoder("opt", pooling="first-last-avg")


# --- what is left as it was -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["opt", "bert"])  # they drop out 10 %
def test_encode_is_free_of_dropout_and_leaves_the_mode_as_found(kind: str, training: bool) -> None:
    encoder = tiny_encoder(kind)
    assert not any(module.training for module in encoder.model.modules())
    encoder.model.train(training)
    assert_same_rows(encoder.encode(TEXTS), encoder_of(kind).encode(TEXTS))
    assert all(module.training is training for module in encoder.model.modules())


def test_a_failing_encode_leaves_the_mode_as_found() -> None:
    encoder = tiny_encoder("bert")
    encoder.model.train()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    encoder.model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        encoder.encode(TEXTS)
    assert all(module.training for module in encoder.model.modules())


def test_encode_keeps_no_graph_and_moves_no_weight() -> None:
    encoder = tiny_encoder("llama")
    before = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    encoder.encode(TEXTS)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in encoder.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.model.state_dict().items())


# --- defaults and loading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_decoder_is_worded_and_read_at_its_last_token(kind: str) -> None:
    encoder = encoder_of(kind)
    assert (encoder.prompt, encoder.pooling) == (load_prompt("summarize_one_word"), "last")
    assert not any(module.training for module in encoder.model.modules())


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_an_encoder_reads_the_plain_text_and_averages(kind: str) -> None:
    assert (encoder_of(kind).prompt, encoder_of(kind).pooling) == (load_prompt("plain"), "mean")


def test_the_default_length_is_the_models_and_at_most_512() -> None:
    assert encoder_of("llama").max_length == POSITIONS
    backbone = tiny_backbone("llama")
    backbone.config.max_position_embeddings = 4096
    assert SentenceEncoder(backbone, TOKENIZERS["llama2"]()).max_length == 512


@every_kind
def test_a_published_model_folder_is_an_encoder(kind: str, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base(kind, tmp_path), device="cpu")
    assert np.array_equal(encoder.encode(TEXTS), encoder_of(kind).encode(TEXTS))
    assert encoder.base == str(tmp_path)
    assert encoder.device == torch.device("cpu")


def test_what_is_named_when_loading_is_used(tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path)
    mine = PromptTemplate(name="mine", template="{text} means")
    for prompt in ("prompteol", mine):
        encoder = SentenceEncoder.from_pretrained(
            str(tmp_path), prompt=prompt, pooling="mean", max_length=60, dtype="bfloat16", device="cpu"
        )
        assert encoder.prompt == (mine if prompt is mine else load_prompt("prompteol"))
        assert (encoder.pooling, encoder.max_length) == ("mean", 60)
        assert {parameter.dtype for parameter in encoder.model.parameters()} == {torch.bfloat16}


def test_a_corpus_is_planned_in_blocks_with_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, counted = encoder_of("llama").encode(TEXTS, return_stats=True)
    assert (counted.texts, counted.unique_texts) == (len(TEXTS), len(set(TEXTS)))
    assert counted.texts_per_second == pytest.approx(len(TEXTS) / counted.seconds)
    assert counted.flops == counted.flops_per_token * counted.computed_tokens > 0
    monkeypatch.setattr("angle_llm.model.encoder.TEXTS_PLANNED", 3)
    blocks, in_blocks = encoder_of("llama").encode(TEXTS, return_stats=True)
    assert_same_rows(blocks, whole)
    assert (in_blocks.texts, in_blocks.logical_tokens) == (counted.texts, counted.logical_tokens)
    assert in_blocks.computed_tokens > counted.computed_tokens, "blocks share nothing with each other"
    with pytest.raises(ValueError, match="text 7 is empty"):
        encoder_of("llama").encode([*TEXTS[:7], " "])
