"""The trie: cuts of least cost, and states and gradients of texts one by one, on every causal kind of backbone."""

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CAUSAL, POSITIONS, WINDOW, tiny_backbone, tiny_encoder
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, GraniteConfig, LlamaConfig, Phi3Config

from angle_llm import SentenceEncoder
from angle_llm.config import LoraSettings
from angle_llm.model.attention import LONGEST, _gathered, _steady_positions, find_sharing, trie_states
from angle_llm.model.fast_paths import PooledLastLayer
from angle_llm.model.micro_batches import PrefixSharing, plan_micro_batches
from angle_llm.model.prefix_trie import KEYS_A_NODE, LENGTH_STEP, build_trie, cut, shared_prefixes

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
    """Counted trie by trie, the plain way; infinite if one is too large."""
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
    starts, nodes = cut(lengths, shared, most)
    every = [
        nodes_of(lengths, shared, [0, *inner], most)
        for count in range(len(texts))
        for inner in combinations(range(1, len(texts)), count)
    ]
    assert nodes == min(every) == nodes_of(lengths, shared, starts, most)


def test_no_text_makes_no_trie() -> None:
    assert cut([], [], 10) == ([], 0)


def test_nodes_are_numbered_depth_first() -> None:
    texts = [[1, 2], [1, 2], [1, 2, 3], [1, 4], [5]]
    ids_1T, trie = build_trie(texts, shared_prefixes(texts))
    assert ids_1T.tolist() == [[1, 2, 3, 4, 5]]
    assert trie.depth_1T.tolist() == [[0, 1, 2, 1, 0]]
    assert trie.end_R.tolist() == [1, 1, 2, 3, 4]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=12))
def test_every_node_asks_once_and_sees_its_texts_beginning(texts: list[list[int]]) -> None:
    texts = sorted(texts)
    ids_1T, trie = build_trie(texts, shared_prefixes(texts))
    ids_T, depth_T = ids_1T[0], trie.depth_1T[0]
    asked = torch.cat([group.query_UQ.flatten() for group in trie.groups])
    assert asked[trie.place_T].tolist() == list(range(len(ids_T))), "each node reads its own answer"
    beginnings = {}
    for group in trie.groups:
        for query_Q, key_L, shared in zip(*group, strict=True):
            for q, node in enumerate(query_Q.tolist()):
                if q == 0 or node:  # padding points at node 0
                    beginnings[node] = ids_T[key_L[: int(shared) + q + 1]].tolist()
    assert sorted(beginnings) == list(range(len(ids_T)))
    prefixes = {tuple(text[: length + 1]) for text in texts for length in range(len(text))}
    assert sorted(map(tuple, beginnings.values())) == sorted(prefixes)
    assert all(len(beginnings[node]) == depth + 1 for node, depth in enumerate(depth_T.tolist()))
    assert [beginnings[int(end)] for end in trie.end_R] == texts


# --- states -----------------------------------------------------------------------------------------------------------


def wide(kind: str) -> SentenceEncoder:
    """An encoder whose sliding window, if it has one, is wider than any text here."""
    backbone = tiny_backbone(kind, window=POSITIONS) if kind in WINDOWED else tiny_backbone(kind)
    tokenizer = tiny_encoder(kind).tokenizer
    return SentenceEncoder(backbone, tokenizer)


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
def test_rows_are_those_of_single_texts(kind: str, micro_batch_tokens: int) -> None:
    encoder = wide(kind)
    rows, stats = encoder.encode(TEXTS, micro_batch_tokens=micro_batch_tokens, return_stats=True)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert stats.layout == ("trie" if micro_batch_tokens > 1 else "padded")
    assert stats.computed_tokens < stats.logical_tokens
    # One unit in the last place of float32 for each of some dozen terms, relative to the length of a row.
    assert (np.linalg.norm(rows - alone, axis=1) / np.linalg.norm(alone, axis=1)).max() < 1e-6


@pytest.mark.parametrize("kind", WINDOWED)
def test_texts_longer_than_the_sliding_window_are_padded_beside_the_trie_of_the_others(kind: str) -> None:
    assert find_sharing(tiny_backbone(kind), "last", causal=True).max_tokens == WINDOW
    assert "longer than 6 tokens" in tiny_encoder(kind).encode(TEXTS, return_stats=True)[1].reason
    encoder = SentenceEncoder(tiny_backbone(kind, window=20), tiny_encoder(kind).tokenizer)
    rows, stats = encoder.encode(TEXTS, return_stats=True)
    assert stats.layout == "trie"
    assert stats.reason.endswith("1 texts longer than 20 tokens are padded")
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert np.abs(rows - alone).max() < 1e-5


def test_frequencies_that_follow_the_longest_text_keep_long_texts_apart() -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=48,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    assert find_sharing(AutoModel.from_config(config).eval(), "last", causal=True).max_tokens == 64
    config = Phi3Config(
        vocab_size=50,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=48,
        pad_token_id=0,
        max_position_embeddings=64,
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
    assert find_sharing(AutoModel.from_config(config).eval(), "last", causal=True).max_tokens == 16
    by_type = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert _steady_positions(SimpleNamespace(rope_parameters=by_type, max_position_embeddings=32)) == 32
    assert _steady_positions(SimpleNamespace(rope_parameters=None)) == LONGEST


def test_layers_that_are_not_plain_attention_are_refused() -> None:
    backbone = tiny_backbone("llama")
    backbone.config.layer_types = ["full_attention", "conv", "full_attention"]
    assert (
        find_sharing(backbone, "last", causal=True).disabled_because
        == "its layers of type conv are not plain attention"
    )


def test_a_small_leak_between_neighbours_is_seen() -> None:
    """A layer that mixes in a hundredth of the token before it, which in a trie may be another text's."""
    backbone = tiny_backbone("llama")
    backbone.layers[1].register_forward_hook(
        lambda _, __, states: states + 0.01 * torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
    )
    assert (
        find_sharing(backbone, "last", causal=True).disabled_because == "as a trie the architecture gives other states"
    )


def test_activation_checkpointing_is_refused_where_it_would_compute_other_gradients() -> None:
    encoder = wide("llama")
    plan = encoder.plan(TEXTS, 10_000)
    encoder.model.train()
    encoder.model.backbone.activation_checkpointing_enable()
    with pytest.raises(RuntimeError, match=r"activation checkpointing\. Call activation_checkpointing_disable"):
        encoder.model(**plan.micro_batches[0].inputs(torch.device("cpu")))


def test_threads_may_share_an_encoder() -> None:
    encoder = wide("llama")
    expected = encoder.encode(TEXTS)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda count: encoder.encode(TEXTS[:count]), [2, 5, 8, 10] * 10))
    assert all(np.abs(found - expected[: len(found)]).max() < 1e-5 for found in rows)
    assert encoder.model.backbone.config._attn_implementation == "sdpa"


def test_another_encoder_need_not_wait() -> None:
    one, other = wide("llama"), wide("llama")
    same = one.with_prompt("plain")  # on the same backbone
    with ThreadPoolExecutor(2) as pool:
        with one.model.reading(()):
            waits = pool.submit(same.encode, TEXTS)
            assert len(pool.submit(other.encode, TEXTS).result(timeout=60)) == len(TEXTS)
            assert not waits.done()
        assert len(waits.result(timeout=60)) == len(TEXTS)


def test_a_long_prompt_head_does_not_multiply_what_is_gathered() -> None:
    texts = sorted([*range(100, 550), first, second, 7] for first in range(20) for second in range(20))
    plan = plan_micro_batches(texts, 2048, 0, PrefixSharing(None))
    assert plan.layout == "trie"
    for micro in plan.micro_batches:
        assert micro.trie is not None
        keys = sum(group.key_UL.numel() for group in micro.trie.groups)
        scores = sum(group.query_UQ.shape[1] * group.key_UL.numel() for group in micro.trie.groups)
        needed = 450**2 + len(micro.rows) * 3 * 453
        assert keys <= 2 * KEYS_A_NODE * 2048
        assert scores <= 4 * needed


def test_the_probe_refuses_a_model_that_does_not_heed_positions() -> None:
    backbone = tiny_backbone("llama")
    assert find_sharing(backbone, "last", causal=True).disabled_because is None
    forward = backbone.forward

    def deaf(**named: Any) -> Any:
        return forward(**{name: value for name, value in named.items() if name != "position_ids"})

    backbone.forward = deaf
    assert "gives other states" in str(find_sharing(backbone, "last", causal=True).disabled_because)


def test_the_probe_refuses_a_model_that_takes_no_positions() -> None:
    backbone = tiny_backbone("llama")

    def narrow(input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
        raise AssertionError("not reached")

    backbone.forward = narrow
    assert "TypeError" in str(find_sharing(backbone, "last", causal=True).disabled_because)


def test_what_cannot_share_says_why() -> None:
    assert "bidirectional" in str(find_sharing(tiny_backbone("bert"), "cls", causal=False).disabled_because)
    assert "pooling mean reads more" in str(find_sharing(tiny_backbone("llama"), "mean", causal=True).disabled_because)
    backbone = tiny_backbone("llama")
    backbone.config.window_size = 8
    assert "window_size" in str(find_sharing(backbone, "last", causal=True).disabled_because)


class Largest(TorchDispatchMode):
    """Notes the most elements any tensor has that an operation makes."""

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
    ids_1T, trie = build_trie(texts, shared_prefixes(texts))
    backbone = tiny_backbone("llama")
    with Largest() as seen:
        trie_states(backbone, ids_1T, trie).sum().backward()
    nodes = ids_1T.numel()
    widest = 48  # of the MLP; the vocabulary's gradient is larger, and of a fixed size
    vocabulary = backbone.embed_tokens.weight.numel()
    scores = len(texts) * 4 * len(texts[0]) * LENGTH_STEP  # texts × heads × queries × keys
    assert seen.elements <= max(nodes * widest, vocabulary, scores) < nodes**2


@pytest.fixture
def linear_widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last dimension of all that linear layers make."""
    seen: list[int] = []
    original = torch.nn.Linear.forward

    def forward(layer: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        result = original(layer, states)
        seen.append(result.shape[-1])
        return result

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    return seen


def test_no_head_is_computed(linear_widths: list[int]) -> None:
    encoder = tiny_encoder("llama")
    encoder.add_lora(LoraSettings(rank=2, alpha=2))
    encoder.encode(TEXTS)
    vocabulary = encoder.model.backbone.config.vocab_size
    assert linear_widths
    assert max(linear_widths) < vocabulary
    assert not any(name.endswith("lm_head") for name, _ in encoder.model.named_modules())


# --- nothing for nobody -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mistral", "qwen2", "qwen3"])
def test_the_last_layer_goes_on_with_pooled_positions_alone(kind: str) -> None:
    encoder = wide(kind)
    encoder.add_lora(LoraSettings(rank=2, alpha=2))
    seen: list[int] = []
    layers = encoder.model.backbone.get_base_model().layers
    for layer in layers[-2:]:
        layer.mlp.register_forward_hook(lambda _, __, output: seen.append(output.numel() // output.shape[-1]))
    for way in ("trie", "padded"):
        if way == "padded":
            encoder.sharing = PrefixSharing("the test asks")
        seen.clear()
        _, stats = encoder.encode(TEXTS, micro_batch_tokens=10**6, return_stats=True)
        assert stats.layout == way
        assert seen == [stats.computed_tokens, len(set(TEXTS))]
    assert "forward" not in vars(layers[-1]), "the layer is left as it was"


@pytest.mark.parametrize("kind", ["gemma2", "opt", "gpt2"])
def test_other_layers_are_left_alone(kind: str) -> None:
    assert PooledLastLayer.find(tiny_backbone(kind)) is None


def test_a_layer_of_the_same_parts_put_together_otherwise_is_left_alone() -> None:
    config = GraniteConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_multiplier=0.5,
    )
    torch.manual_seed(0)
    backbone = AutoModel.from_config(config).eval()
    assert [name for name, _ in backbone.layers[-1].named_children()]
    assert PooledLastLayer.find(backbone) is None
    config.residual_multiplier = 1.0
    assert PooledLastLayer.find(AutoModel.from_config(config).eval()) is not None


def test_layers_below_the_lowest_adapter_are_not_in_the_graph() -> None:
    encoder = wide("llama")
    encoder.add_lora(LoraSettings(rank=2, alpha=2, targets=["layers.2.mlp.down_proj"]))
    plan = encoder.plan(TEXTS, 10**6)
    kept: list[bool] = []
    for layer in encoder.model.backbone.get_base_model().layers[:2]:
        layer.register_forward_hook(lambda _, __, output: kept.append(output.requires_grad))
    rows = encoder.model(**plan.micro_batches[0].inputs(torch.device("cpu")))
    assert rows.requires_grad
    assert kept == [False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_shared_node_are_added_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand equal terms, eight at a time: kept in half precision, the sum would stand still on the way."""
    monkeypatch.setattr("angle_llm.model.attention._GATHERED_AT_ONCE", 8)
    states_TD = torch.ones(3, 4, dtype=dtype, requires_grad=True)
    index_I = torch.zeros(20_000, dtype=torch.int64)
    index_I[10_000:] = 2
    terms_ID = torch.full((20_000, 4), 2.0**-8, dtype=dtype)
    _gathered(states_TD, index_I).backward(terms_ID)
    assert states_TD.grad is not None
    assert states_TD.grad.dtype == dtype
    # 10,000 / 256, rounded once.
    assert torch.equal(states_TD.grad, torch.tensor([[10_000 / 256], [0], [10_000 / 256]]).to(dtype).expand(3, 4))


def test_half_precision_gradients_through_a_trie_are_no_worse_than_of_padded_texts() -> None:
    """Hundreds of texts below one prompt head, against float32."""
    torch.manual_seed(0)
    encoder = tiny_encoder("llama")
    texts = [f"A man number {number} is eating bread." for number in range(600)]
    ids = encoder.tokenize(texts)
    weights_RD = torch.randn(len(ids), encoder.dimensions)

    def gradients(dtype: torch.dtype, refused: str | None) -> dict[str, torch.Tensor]:
        encoder.model.to(dtype).requires_grad_(True).zero_grad()
        plan = plan_micro_batches(ids, 10**6, encoder.pad_id, PrefixSharing(refused))
        for micro in plan.micro_batches:
            (encoder.model(**micro.inputs(encoder.device)) * weights_RD[micro.rows]).sum().backward()
        return {name: p.grad.float() for name, p in encoder.model.named_parameters() if p.grad is not None}

    encoder.model.to(torch.bfloat16)  # the weights are those of bfloat16 in all three
    exact = gradients(torch.float32, "asked")
    apart = {
        way: {
            name: float((found - exact[name]).norm() / exact[name].norm())
            for name, found in gradients(torch.bfloat16, refused).items()
        }
        for way, refused in (("trie", None), ("padded", "asked"))
    }
    for name in ("k_proj", "v_proj"):
        trie, padded = (
            max(value for key, value in apart[way].items() if f"{name}.weight" in key) for way in ("trie", "padded")
        )
        assert trie < 1.5 * padded + 2**-9, (name, trie, padded)
