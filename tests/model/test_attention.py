"""Attention of texts in one sequence: every kernel, pooling and kind of backbone equals the texts one by one."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from cases import one_in
from tiny import POSITIONS, micro_batches_of, tiny_backbone
from tiny_tokenizers import TOKENIZERS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, BertConfig, LlamaConfig, ModernBertConfig, MPNetConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel, EmbeddingOptions
from angle_llm.model.layout import flex as our_flex
from angle_llm.model.layout.attention import sequence_output
from angle_llm.model.layout.flex import (
    BLOCK,
    AttentionShape,
    block_mask,
    compiled_flex,
    flex_call,
    flex_problem,
    mask_blocks,
    padded_length,
)
from angle_llm.model.layout.micro_batches import LayoutSupport, plan_micro_batches
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.layout.token_sequence import TokenSequence, build_sequence, shared_prefixes
from angle_llm.model.pooling import POOLINGS
from angle_llm.model.source.backbone import probes_as_causal

CPU = torch.device("cpu")


def some_texts(count: int, longest: int = 9, vocabulary: int = 3) -> list[tuple[int, ...]]:
    """Sorted texts that share many prefixes."""
    draw = random.Random(0)
    return sorted(
        {tuple(draw.randrange(1, 1 + vocabulary) for _ in range(draw.randint(1, longest))) for _ in range(count)}
    )


def one_sequence(texts: list[tuple[int, ...]], *, causal: bool) -> tuple[Tensor, TokenSequence]:
    return build_sequence(texts, shared_prefixes(texts) if causal else None, causal=causal)


def visible(texts: list[tuple[int, ...]], *, causal: bool) -> Tensor:
    """Which node sees which, (T, T), from the texts alone: by prefixes, or within texts."""
    if causal:
        nodes = sorted({text[:end] for text in texts for end in range(1, len(text) + 1)})
        return torch.tensor([[key == query[: len(key)] for key in nodes] for query in nodes])
    owner_T = torch.tensor([number for number, text in enumerate(texts) for _ in text])
    return owner_T[:, None] == owner_T


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in float64, and FlexAttention on a CPU with gradients, which torch refuses."""
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon),
    )
    monkeypatch.setattr(
        Gemma2RMSNorm,
        "forward",
        lambda self, x: (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps),
    )
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("count", [3, 40, 300])
def test_block_masks_are_those_of_the_dense_rule(causal: bool, count: int) -> None:
    texts = some_texts(count, longest=7 if causal else 30)
    _, sequence = one_sequence(texts, causal=causal)
    nodes = int(sequence.starts[-1])
    tokens = -(-nodes // BLOCK) * BLOCK
    expected_TT = torch.eye(tokens, dtype=torch.bool)
    expected_TT[:nodes, :nodes] = visible(texts, causal=causal)
    mask: Any = block_mask(sequence, tokens, CPU)
    index_T = torch.arange(tokens)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, index_T[:, None], index_T), expected_TT)
    blocks_IJ = expected_TT.view(tokens // BLOCK, BLOCK, -1, BLOCK).transpose(1, 2)
    full_IJ = blocks_IJ.all(dim=(2, 3))
    partly_IJ = blocks_IJ.any(dim=(2, 3)) & ~full_IJ
    for found, counts, expected in (
        (mask.kv_indices, mask.kv_num_blocks, partly_IJ),
        (mask.full_kv_indices, mask.full_kv_num_blocks, full_IJ),
        (mask.q_indices, mask.q_num_blocks, partly_IJ.T),  # of the backward pass
        (mask.full_q_indices, mask.full_q_num_blocks, full_IJ.T),
    ):
        for row, indices, number in zip(expected, found[0, 0], counts[0, 0], strict=True):
            assert indices[: int(number)].tolist() == row.nonzero().flatten().tolist()


def test_a_long_text_has_full_blocks() -> None:
    _, sequence = build_sequence([range(3 * BLOCK), range(4 * BLOCK)], [0, 3 * BLOCK])
    mask = block_mask(sequence, 4 * BLOCK, CPU)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 3]
    assert mask.kv_num_blocks[0, 0].tolist() == [1, 1, 1, 1], "the diagonal"


@pytest.mark.parametrize("causal", [True, False])
def test_full_blocks_of_long_texts_are_fully_visible(causal: bool) -> None:
    """Texts that end inside blocks, against the rule for single tokens."""
    long, other = list(range(600)), list(range(1000, 1620))
    texts, shared = [long, long[:400] + other[:300], other], [0, 400 if causal else 0, 0]
    _, sequence = build_sequence(texts, shared, causal=causal)
    tokens = padded_length(int(sequence.starts[-1]))
    mask: Any = block_mask(sequence, tokens, CPU)
    index_T = torch.arange(tokens)
    full_IJ = mask.mask_mod(None, None, index_T[:, None], index_T).view(tokens // BLOCK, BLOCK, -1, BLOCK).all(3).all(1)
    assert int(full_IJ.sum()) > 5
    for row, indices, number in zip(full_IJ, mask.full_kv_indices[0, 0], mask.full_kv_num_blocks[0, 0], strict=True):
        assert indices[: int(number)].tolist() == row.nonzero().flatten().tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "bert", "roberta"])
@pytest.mark.usefixtures("_exact")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # inside torch
def test_flex_attention_equals_gathered_keys_in_value_and_gradient(kind: str) -> None:
    causal = kind not in ("bert", "roberta")
    backbone = tiny_backbone(kind, torch.float64, **({"window": POSITIONS} if kind == "gemma2" else {}))
    ids_1T, sequence = one_sequence(some_texts(120), causal=causal)
    found = []
    made = replace(sequence, mask=mask_blocks(sequence, padded_length(int(sequence.starts[-1]))))
    for kernel, blocks in (("gathered", sequence), ("flex", sequence), ("flex", made)):
        states_1TD = sequence_output(backbone, ids_1T, blocks, kernel).last_hidden_state
        assert states_1TD.shape[1] == (
            ids_1T.shape[1] if kernel == "gathered" else -(-ids_1T.shape[1] // BLOCK) * BLOCK
        )
        states_1TD[:, : ids_1T.shape[1]].sin().sum().backward()
        gradients = {name: one.grad.clone() for name, one in backbone.named_parameters() if one.grad is not None}
        found.append((states_1TD[:, : ids_1T.shape[1]].detach(), gradients))
        backbone.zero_grad()
    (states, gradients), *others = found
    for flex_states, flex_gradients in others:
        assert gradients.keys() == flex_gradients.keys()
        # Sums of float64 terms in another order, relative to the largest gradient (that of a key's bias is 0).
        torch.testing.assert_close(flex_states, states, rtol=1e-12, atol=1e-12)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert float((flex_gradients[name] - gradient).abs().max()) < 1e-13 * largest, name


@pytest.mark.usefixtures("_exact")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # by the comparison
@one_in(3, "softcap, with_gradients", [None, 30.0], [False, True])
def test_flex_attention_is_compiled_at_most_twice_for_all_lengths(softcap: float | None, with_gradients: bool) -> None:
    """The shipped call in one graph, up to the code generation of a GPU: new lengths and masks need no new graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if with_gradients else "eager")
    compiled = compiled_flex(counter)
    cap = None if softcap is None else torch.tensor(softcap)
    draw, lengths = random.Random(0), set()
    for count in (32, 64, 96, 160, 32):
        texts = sorted({tuple(draw.randrange(50) for _ in range(8)) for _ in range(count)})
        ids_1T, sequence = one_sequence(texts, causal=True)
        tokens = max(2, -(-ids_1T.shape[1] // BLOCK)) * BLOCK
        lengths.add(tokens)
        query, key, value = (torch.randn(1, heads, tokens, 8, requires_grad=with_gradients) for heads in (6, 3, 3))
        mask = block_mask(sequence, tokens, CPU)
        output = compiled(query, key, value, mask, cap, 0.3, True)
    assert len(lengths) == 4
    assert counter.frame_count <= 2
    # float32 sums in another order
    torch.testing.assert_close(output, flex_call(query, key, value, mask, cap, 0.3, True), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_exact")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it of views
def test_training_steps_need_few_graphs() -> None:
    """Views as in LLaMA, keys without gradients, recomputed layers, and a backward pass with other numbers of threads."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compiled_flex(counter)
    threads, counts = torch.get_num_threads(), []
    for blocks in (3, 5, 7, 9):
        ids = [[0] * 40 + [number] * 90 for number in range((blocks * BLOCK - 40) // 90)]
        _, sequence = build_sequence(ids, shared_prefixes(ids))
        mask = block_mask(sequence, blocks * BLOCK, CPU)
        for trained in (1, 3):  # query alone, or query, key and value
            heads = [torch.randn(1, blocks * BLOCK, count, 8) for count in (6, 3, 3)]
            for one in heads[:trained]:
                one.requires_grad_()
            views = [one.transpose(1, 2) for one in heads]
            call = partial(compiled, mask=mask, softcap=None, scaling=0.3, shared_heads=True)
            found = []
            for recomputed in (False, True):
                output = checkpoint(call, *views, use_reentrant=False) if recomputed else call(*views)
                torch.set_num_threads(1 + recomputed)
                found.append(torch.autograd.grad(output.sin().sum(), heads[:trained]))
                torch.set_num_threads(threads)
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1], "no new graph after the second length"
    # Two graphs for a fixed and a dynamic length, of forward or backward, by gradients and by number of threads (dynamo
    # guards it: layers that are recomputed on a thread with another number compile again).
    assert counts[-1] <= 12
    torch._dynamo.reset()


TRIAL = AttentionShape(4, 2, 16, None, 0.25, causal=True, shares=True)
FLOAT32 = torch.float32, "highest", CPU


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Any, cap: Any, scale: float, shared: bool) -> Tensor:
    """FlexAttention with gradients, which the CPU does not have: plain attention with its mask."""
    node_T = torch.arange(query.shape[2])
    visible_TT = mask.mask_mod(node_T, node_T, node_T[:, None], node_T)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, visible_TT, scale=scale, enable_gqa=shared
    )


def wrong(part: str) -> Callable[..., Tensor]:
    """Kernels with a fault."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        if part == "gradient of the keys":
            key = key.detach() + 0 * key
        elif part == "long sequences" and query.shape[2] > 3 * BLOCK:
            value = value.roll(1, 2)
        elif part == "views":
            value = value.as_strided(value.shape, torch.empty(value.shape).stride())
        elif part == "no compiler":
            raise RuntimeError("no compiler")
        elif part == "NaN":
            return masked(query, key, value, *rest) * torch.nan
        return masked(query, key, value, *rest)

    return attend


@pytest.fixture
def _new_trials() -> Iterator[None]:
    flex_problem.cache_clear()
    yield
    flex_problem.cache_clear()


@pytest.mark.usefixtures("_new_trials")
@pytest.mark.parametrize(("causal", "shares"), [(True, True), (True, False), (False, False)])
def test_a_trial_finds_kernels_with_other_results(monkeypatch: pytest.MonkeyPatch, causal: bool, shares: bool) -> None:
    monkeypatch.setattr(our_flex, "compiled_flex", lambda: masked)
    trial = TRIAL._replace(causal=causal, shares=shares)
    assert flex_problem(trial, *FLOAT32) is None
    for part, reason in {
        "gradient of the keys": "differ",
        "long sequences": "differ",
        "views": "differ",
        "NaN": "differ",
        "no compiler": "no compiler",
    }.items():
        flex_problem.cache_clear()
        monkeypatch.setattr(our_flex, "compiled_flex", partial(wrong, part))
        assert reason in str(flex_problem(trial, *FLOAT32)), part


@pytest.mark.usefixtures("_new_trials")
def test_a_trial_is_not_run_where_flex_attention_would_compute_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_flex, "compiled_flex", lambda: masked)
    assert "float64" in str(flex_problem(TRIAL, torch.float64, "highest", CPU))
    with torch._dynamo.config.patch(disable=True):  # TORCHDYNAMO_DISABLE=1
        assert "torch.compile is disabled" in str(flex_problem(TRIAL, *FLOAT32))


def test_the_lengths_of_a_trial_differ_from_other_sizes() -> None:
    """torch would compile again for the next length."""
    smollm2, llama, other, wide = (9, 3, 64), (32, 8, 128), (5, 3, 128), (8, 4, 384)
    for shape, lengths in {smollm2: [5, 7], llama: [3, 5], other: [7, 9], wide: [5, 7]}.items():
        assert our_flex._trial_lengths(AttentionShape(*shape, *TRIAL[3:])) == lengths


@pytest.mark.usefixtures("_new_trials")
def test_a_trial_out_of_memory_is_not_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(our_flex, "compiled_flex", lambda: full)
    with pytest.raises(torch.OutOfMemoryError):
        flex_problem(TRIAL, *FLOAT32)
    monkeypatch.setattr(our_flex, "compiled_flex", lambda: masked)
    assert flex_problem(TRIAL, *FLOAT32) is None


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_without_gradients_passes_the_trial(
    monkeypatch: pytest.MonkeyPatch, causal: bool, softcap: float | None
) -> None:
    """Not compiled; on a CPU it has no backward pass."""
    monkeypatch.setattr(our_flex, "compiled_flex", lambda: flex_call)
    for blocks in (3, 5):
        # float32 sums in another order
        shape = TRIAL._replace(softcap=softcap, causal=causal, shares=causal)
        assert our_flex._difference(shape, torch.float32, CPU, blocks, 0) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize(
    ("problem", "dropout", "capability"),
    [(None, 0.0, 9), ("no compiler", 0.0, 9), (None, 0.1, 9), ("a GPU with bfloat16", 0.0, 7)],
)
def test_texts_are_padded_on_a_gpu_without_flex_attention(
    kind: str,
    problem: str | None,
    dropout: float,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A backbone whose parameters are said to be on a GPU; its states are compared on the CPU."""
    wide = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    dropouts = {"attention_dropout": dropout} if kind == "llama" else {"attention_probs_dropout_prob": dropout}
    config = (LlamaConfig if kind == "llama" else BertConfig)(**wide, num_attention_heads=4, **dropouts)
    backbone = AutoModel.from_config(config).eval()
    asked = []
    monkeypatch.setattr(
        "angle_llm.model.layout.support.flex_problem", lambda *given, **_: asked.append(given) or problem
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 5))
    monkeypatch.setattr("angle_llm.model.layout.support._probe", lambda *_, **__: None)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    monkeypatch.setattr(backbone, "parameters", lambda: iter([on_gpu]))
    causal = kind == "llama"
    pooling = "last" if causal else "mean"
    layouts = probe_layouts(backbone, pooling, causal=causal, autocasts=True, trains=True)
    encodes = probe_layouts(backbone, pooling, causal=causal)
    assert encodes.layout == ("padded" if problem else "trie" if causal else "packed"), "without dropout"
    asked = asked[: -2 if problem is None else -1]  # of training
    if problem or dropout:
        assert layouts.layout == "padded"
        assert (problem or "attention dropout") in layouts.reason
        assert bool(asked) == (problem == "no compiler"), "a trial of the kernel"
    else:
        assert (layouts.layout, layouts.max_tokens) == ("trie" if causal else "packed", 1024)
        computed = (torch.float32, "highest"), (torch.float32, "high"), (torch.bfloat16, "highest")
        shape = AttentionShape(4, 4, 16, None, 0.25, causal=causal, shares=causal)
        tried = [(shape, *each, on_gpu.device) for each in computed]
        assert layouts.uses_flex
        assert sorted(asked, key=str) == sorted(tried, key=str)
    assert ("warning: texts are padded" in capsys.readouterr().out) == (problem == "no compiler")


@pytest.mark.parametrize("by", ["number", "length"])
@pytest.mark.parametrize(("separated", "strength"), [(True, 0.1), (False, 0.1), (False, 1.0)])
def test_kernels_that_round_by_the_number_of_tokens_do_not_hide_a_layout(
    separated: bool, strength: float, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bitsandbytes for NF4: padded batches differ from single texts as much, on a GPU if they have as many tokens, and
    on a CPU if texts are padded.
    """

    def attend(*given: Any) -> Tensor:
        return masked(*given) if separated else given[0]

    def rounded(_: Any, __: Any, states: Tensor) -> Tensor:
        is_other = states[..., 0].numel() > 100 if by == "number" else states.shape[1] > 5
        return states * (1 + strength * torch.arange(states.shape[-1]).cos()) if is_other else states

    monkeypatch.setattr("angle_llm.model.layout.attention.is_gpu", lambda _: True)
    monkeypatch.setattr("angle_llm.model.layout.attention.compiled_flex", lambda: attend)
    backbone = tiny_backbone("llama")
    for layer in backbone.layers:
        layer.mlp.register_forward_hook(rounded)
    layouts = probe_layouts(backbone, "last", causal=True)
    assert layouts.layout == ("trie" if separated else "padded")
    if not separated:
        difference, rounding = map(float, re.findall(r"\d\.\de[+-]\d+", layouts.reason))
        assert difference > rounding > 1e-3


def test_the_layout_of_a_gpu_is_planned_without_one() -> None:
    """For `plan --device cuda`, and for weights that DeepSpeed moves to the GPU later."""
    llama, bert = (
        SentenceEncoder(AutoModel.from_config(config), TOKENIZERS["llama2"]())
        for config in (
            LlamaConfig(
                vocab_size=400, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
            ),
            BertConfig(
                vocab_size=400, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
            ),
        )
    )
    assert (llama.layouts.max_tokens, bert.layouts.layout) == (1024, "packed")
    cuda = torch.device("cuda")
    layouts = probe_layouts(llama.model.backbone, "last", causal=True, device=cuda)
    assert (layouts.max_tokens, layouts.layout) == (1024, "trie")
    layouts = probe_layouts(bert.model.backbone, "mean", causal=False, device=cuda, trains=True)
    assert layouts.layout == "padded"
    assert "attention dropout" in layouts.reason
    assert probe_layouts(bert.model.backbone, "mean", causal=False, device=cuda).layout == "packed", "to encode texts"


def test_layers_with_different_heads_are_padded_on_a_gpu() -> None:
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("needs Gemma-4")
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 400}
    config = transformers.Gemma4TextConfig(**sizes, num_attention_heads=4, head_dim=8)
    layouts = probe_layouts(AutoModel.from_config(config).eval(), "last", causal=True, device=torch.device("cuda"))
    assert (layouts.layout, layouts.reason) == ("padded", "its layers have different attention heads")


@pytest.mark.usefixtures("_exact")
def test_with_dropout_flex_attention_gathers_keys() -> None:
    ids_1T, sequence = one_sequence(some_texts(60), causal=False)
    backbone = tiny_backbone("bert", torch.float64).train()
    states = []
    for kernel in ("gathered", "flex"):
        torch.manual_seed(0)
        for layer in backbone.encoder.layer:  # hidden dropout would draw for filling too
            layer.attention.output.dropout.p = layer.output.dropout.p = 0.0
        backbone.embeddings.dropout.p = 0.0
        states.append(sequence_output(backbone, ids_1T, sequence, kernel).last_hidden_state[:, : ids_1T.shape[1]])
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)  # float64 sums in another order


def modern_bert(**changes: Any) -> Any:
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
    torch.manual_seed(0)
    return AutoModel.from_config(ModernBertConfig(**sizes, local_attention=16, **changes)).eval().double()


@one_in(3, "kind, pooling", ["bert", "roberta", "modernbert", "llama", "llama-bidirectional", "opt"], POOLINGS)
@pytest.mark.usefixtures("_exact")
def test_packed_texts_equal_single_ones_in_value_and_gradient(kind: str, pooling: str) -> None:
    causal = kind in ("llama", "opt")
    if (causal and pooling in ("cls", "last")) or (kind == "opt" and pooling == "first-last-avg"):
        pytest.skip("a trie, or not possible")
    backbone = modern_bert() if kind == "modernbert" else tiny_backbone(kind.partition("-")[0], torch.float64)
    if kind == "llama-bidirectional":
        backbone.config.is_causal = False
    assert probes_as_causal(backbone) == causal
    layouts = probe_layouts(backbone, pooling, causal=causal)
    assert layouts.layout == "packed"
    assert layouts.max_tokens == (8 if kind == "modernbert" else 1024)
    model = EmbeddingModel(backbone, EmbeddingOptions(pooling, causal))
    ids = [list(text) for text in some_texts(30, longest=8, vocabulary=300)]
    plan = plan_micro_batches(ids, 60, layouts)
    assert plan.layout == "packed"
    assert plan.computed_tokens == sum(map(len, ids))
    found = []
    for micro_batches in (
        [(micro.rows, micro.inputs(CPU)) for micro in micro_batches_of(plan)],
        [
            ([row], {"ids_BT": torch.tensor([text]), "mask_BT": torch.ones(1, len(text)).long()})
            for row, text in enumerate(ids)
        ],
    ):
        rows_UD = torch.zeros(plan.unique, model.width, dtype=torch.float64)
        parts = [(rows, model(**inputs)) for rows, inputs in micro_batches]
        sum(part_RD.sin().sum() for _, part_RD in parts).backward()
        for rows, part_RD in parts:
            rows_UD[rows] = part_RD.detach()
        found.append((rows_UD, {name: one.grad for name, one in backbone.named_parameters() if one.grad is not None}))
        backbone.zero_grad()
    (packed_UD, gradients), (alone_UD, expected) = found
    # Sums of some dozen float64 terms in another order.
    torch.testing.assert_close(packed_UD, alone_UD, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).abs().max()) <= 1e-12 * float(gradient.abs().max()) + 1e-12, name


def test_a_bias_by_relative_position_is_found_by_the_probe() -> None:
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    backbone = AutoModel.from_config(MPNetConfig(**sizes, num_attention_heads=4)).eval()
    layouts = probe_layouts(backbone, "mean", causal=False)
    assert layouts.layout == "padded"
    refused = "does not accept positions or attention" in layouts.reason  # MPNet of transformers 5.6
    assert refused or "differ from single texts" in layouts.reason
    assert plan_micro_batches([[1, 2], [3]], 60, layouts).layout == "padded"


def test_a_lack_of_memory_in_the_probe_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("angle_llm.model.layout.support.sequence_output", fail)
    backbone, error = tiny_backbone("llama"), torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        probe_layouts(backbone, "last", causal=True)
    error = RuntimeError("unknown argument")
    assert probe_layouts(backbone, "last", causal=True).layout == "padded"


def test_texts_too_long_to_be_packed_are_padded_beside_the_others() -> None:
    ids = [[1] * 4, [2] * 9, [3] * 2, [4] * 5]
    plan = plan_micro_batches(ids, 100, LayoutSupport("packed", "bidirectional", 8, causal=False))
    assert plan.layout == "packed"
    assert plan.reason == "bidirectional; 11 tokens packed, 15 padded; 1 texts longer than 8 tokens are padded"
    assert plan.computed_tokens == 11 + 9


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_flex_attention_under_autocast_gets_one_dtype(kind: str) -> None:
    """Rotary embeddings give float32 queries and keys beside bfloat16 values, which FlexAttention refuses."""
    encoder = SentenceEncoder(tiny_backbone(kind), TOKENIZERS["llama2"]())
    (micro,) = micro_batches_of(encoder.plan(["a b c", "a b d", "x y"], 512))
    rows = []
    for kernel in ("gathered", "flex"):
        model = encoder.model.changed(autocasts=True, attention_kernel=kernel).train()
        with torch.no_grad():
            rows.append(model(**micro.inputs(CPU)))
    torch.testing.assert_close(*rows, rtol=2e-2, atol=2e-2)  # products in bfloat16
