"""The prefix trie: cuts with the fewest nodes; states and gradients of texts one by one, for every causal kind."""

from collections.abc import Callable
from functools import cache
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CAUSAL, KINDS, POSITIONS, WINDOW, micro_batches_of, tiny_backbone, tiny_encoder
from tiny_tokenizers import TOKENIZERS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, LlamaConfig, Phi3Config

from angle_llm import SentenceEncoder
from angle_llm.model.layout.attention import sequence_output
from angle_llm.model.layout.micro_batches import LayoutSupport, plan_micro_batches
from angle_llm.model.layout.support import _steady_positions, probe_layouts
from angle_llm.model.layout.token_sequence import (
    KEYS_A_NODE,
    LENGTH_STEP,
    build_sequence,
    cut,
    gather_rows,
    shared_prefixes,
)

WINDOWED = ("mistral", "gemma2")
TEXTS = [
    "A man is eating.",
    "A man is eating.",
    "A man",
    "A man is eating bread and drinks a glass of water beside the river.",
    "Hi",
    "Someone eats.",
    'She said "no".',
    "A man is",
    "A man is eating.",
    "Where is it?",
]


def nodes_of(lengths: list[int], shared: list[int], starts: list[int], most: int) -> float:
    """Nodes, counted trie by trie; infinite if one is too large."""
    total = 0.0
    for first, last in zip(starts, [*starts[1:], len(lengths)], strict=True):
        nodes = lengths[first] + sum(lengths[k] - shared[k] for k in range(first + 1, last))
        total += nodes if nodes <= most or last - first == 1 else float("inf")
    return total


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 30),
)
def test_no_other_cuts_compute_fewer_nodes(texts: list[list[int]], most: int) -> None:
    texts = sorted(texts)
    lengths, shared = [len(text) for text in texts], shared_prefixes(texts)
    starts = cut(lengths, shared, most)
    every = [
        nodes_of(lengths, shared, [0, *inner], most)
        for count in range(len(texts))
        for inner in combinations(range(1, len(texts)), count)
    ]
    assert nodes_of(lengths, shared, starts, most) == min(every)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=12))
def test_every_node_is_one_query_and_sees_its_prefix(texts: list[list[int]]) -> None:
    texts = sorted(texts)
    ids_1T, sequence = build_sequence(texts, shared_prefixes(texts))
    ids_T, depth_T = ids_1T[0], sequence.depth_1T[0]
    groups, place_T = sequence.groups()
    queries = torch.cat([group.query_UQ.flatten() for group in groups])
    assert queries[place_T].tolist() == list(range(len(ids_T))), "each node reads its own output"
    seen = {}
    for group in groups:
        for query_Q, key_L, shared, _ in zip(*group, strict=True):
            for q, node in enumerate(query_Q.tolist()):
                if q == 0 or node:  # padding is node 0
                    seen[node] = ids_T[key_L[: int(shared) + q + 1]].tolist()
    assert sorted(seen) == list(range(len(ids_T)))
    prefixes = {tuple(text[: length + 1]) for text in texts for length in range(len(text))}
    assert sorted(map(tuple, seen.values())) == sorted(prefixes)
    assert all(len(seen[node]) == depth + 1 for node, depth in enumerate(depth_T.tolist()))
    assert [seen[int(end)] for end in sequence.end_R] == texts


@cache
def wide(kind: str) -> SentenceEncoder:
    """An encoder whose sliding window, if it has one, is wider than any text here; do not change it."""
    backbone = tiny_backbone(kind, window=POSITIONS) if kind in WINDOWED else tiny_backbone(kind)
    return SentenceEncoder(backbone, TOKENIZERS[KINDS[kind].tokenizer]())


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
def test_rows_equal_those_of_single_texts(kind: str, micro_batch_tokens: int) -> None:
    encoder = wide(kind)
    rows, stats = encoder.encode(TEXTS, micro_batch_tokens=micro_batch_tokens, return_stats=True)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    plan = encoder.plan(TEXTS, micro_batch_tokens)
    assert plan.layout == ("trie" if micro_batch_tokens > 1 else "padded")
    assert stats.computed_tokens < stats.logical_tokens
    # Float32 rounding of some dozen terms, relative to the length of a row.
    assert (np.linalg.norm(rows - alone, axis=1) / np.linalg.norm(alone, axis=1)).max() < 1e-6


@pytest.mark.parametrize("kind", WINDOWED)
def test_texts_longer_than_the_sliding_window_are_padded_and_the_others_in_a_trie(kind: str) -> None:
    assert probe_layouts(tiny_backbone(kind), "last", causal=True).max_tokens == WINDOW
    assert "longer than 6 tokens" in tiny_encoder(kind).plan(TEXTS, 2048).reason
    encoder = SentenceEncoder(tiny_backbone(kind, window=20), tiny_encoder(kind).tokenizer)
    rows, plan = encoder.encode(TEXTS), encoder.plan(TEXTS, 2048)
    assert plan.layout == "trie"
    assert plan.reason.endswith("1 texts longer than 20 tokens are padded")
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert np.abs(rows - alone).max() < 1e-5


def test_rotary_frequencies_that_depend_on_the_longest_text_limit_sharing() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 64}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config: Any = LlamaConfig(**sizes, rope_parameters=dynamic)
    assert probe_layouts(AutoModel.from_config(config).eval(), "last", causal=True).max_tokens == 64
    config = Phi3Config(
        **sizes,
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 16,
            "factor": 4.0,
        },
    )
    assert probe_layouts(AutoModel.from_config(config).eval(), "last", causal=True).max_tokens == 16
    by_type = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert _steady_positions(SimpleNamespace(rope_parameters=by_type, max_position_embeddings=32), 1024) == 32
    assert _steady_positions(SimpleNamespace(rope_parameters=None), 1024) == 1024


def test_the_activation_checkpointing_of_transformers_is_refused() -> None:
    encoder = wide.__wrapped__("llama")
    plan = encoder.plan(TEXTS, 10_000)
    encoder.model.train()
    backbone = encoder.model.backbone
    word = "activation" if hasattr(backbone, "activation_checkpointing_enable") else "gradient"  # older transformers
    getattr(backbone, f"{word}_checkpointing_enable")()
    inputs = micro_batches_of(plan)[0].inputs(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="activation_checkpointing_disable"):
        encoder.model(**inputs)
    getattr(backbone, f"{word}_checkpointing_disable")()
    encoder.model.checkpoint_activations(True)
    assert encoder.model(**inputs).shape == (len(plan.groups[0].rows), encoder.dimensions)


def test_a_long_prompt_head_does_not_multiply_the_gathered_keys() -> None:
    texts = sorted([*range(100, 550), first, second, 7] for first in range(20) for second in range(20))
    plan = plan_micro_batches(texts, 2048, LayoutSupport("trie"))
    assert plan.layout == "trie"
    for micro in micro_batches_of(plan):
        assert micro.sequence is not None
        keys = sum(group.key_UL.numel() for group in micro.sequence.groups()[0])
        scores = sum(group.query_UQ.shape[1] * group.key_UL.numel() for group in micro.sequence.groups()[0])
        needed = 450**2 + len(micro.rows) * 3 * 453
        assert keys <= 2 * KEYS_A_NODE * 2048
        assert scores <= 4 * needed


def why_not(change: Callable[[Any], object], pooling: str = "last") -> str:
    backbone = tiny_backbone("llama")
    change(backbone)
    return probe_layouts(backbone, pooling, causal=True).reason


def mix_neighbours(backbone: Any) -> None:
    """A layer adds a hundredth of the previous token, which in a trie can belong to another text."""
    backbone.layers[1].register_forward_hook(
        lambda _, __, states: states + 0.01 * torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
    )


def ignore_positions(backbone: Any) -> None:
    forward = backbone.forward
    backbone.forward = lambda **named: forward(**{key: named[key] for key in named if key != "position_ids"})


def take_no_positions(backbone: Any) -> None:
    backbone.forward = lambda input_ids, attention_mask=None, use_cache=False: pytest.fail("not reached")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (mix_neighbours, "differ from single texts"),
        (ignore_positions, "differ from single texts"),
        (take_no_positions, "TypeError"),
        (lambda backbone: setattr(backbone.config, "window_size", 8), "window_size"),
        (lambda backbone: setattr(backbone.config, "layer_types", ["full_attention", "conv"]), "type conv"),
    ],
)
def test_a_backbone_that_cannot_share_is_found_by_probe_or_config(change: Callable[[Any], object], reason: str) -> None:
    assert why_not(lambda backbone: None) == ""
    assert reason in why_not(change)


def test_bidirectional_models_and_other_poolings_do_not_share() -> None:
    assert "bidirectional" in probe_layouts(tiny_backbone("bert"), "cls", causal=False).reason
    assert "pooling mean" in str(why_not(lambda backbone: None, "mean"))


class Largest(TorchDispatchMode):
    """Records the largest tensor of any operation, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_tensor_grows_with_the_square_of_the_nodes() -> None:
    texts = sorted([first, second, *range(4)] for first in range(40) for second in range(5, 9))
    ids_1T, sequence = build_sequence(texts, shared_prefixes(texts))
    backbone = tiny_backbone("llama")
    with Largest() as seen:
        sequence_output(backbone, ids_1T, sequence).last_hidden_state.sum().backward()
    nodes = ids_1T.numel()
    widest = 48  # of the MLP; the vocabulary's gradient is larger, and of a fixed size
    vocabulary = backbone.embed_tokens.weight.numel()
    scores = len(texts) * 4 * len(texts[0]) * LENGTH_STEP  # texts × heads × queries × keys
    assert seen.elements <= max(nodes * widest, vocabulary, scores) < nodes**2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_shared_node_are_added_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand equal terms, eight at a time: in half precision the sum would stop growing."""
    monkeypatch.setattr("angle_llm.model.layout.token_sequence.GATHERED_ROWS", 8)
    states_TD = torch.ones(3, 4, dtype=dtype, requires_grad=True)
    index_I = torch.zeros(20_000, dtype=torch.int64)
    index_I[10_000:] = 2
    terms_ID = torch.full((20_000, 4), 2.0**-8, dtype=dtype)
    gather_rows(states_TD, index_I).backward(terms_ID)
    assert states_TD.grad is not None
    assert states_TD.grad.dtype == dtype
    # 10,000 / 256, rounded once.
    assert torch.equal(states_TD.grad, torch.tensor([[10_000 / 256], [0], [10_000 / 256]]).to(dtype).expand(3, 4))
