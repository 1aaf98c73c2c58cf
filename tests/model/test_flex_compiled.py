"""FlexAttention compiled by inductor for a CPU: values equal dense attention, with one graph for all lengths.

The CPU kernel is another template than the Triton kernel of a GPU, but it reads the same block masks and captured tensors.
It has no backward pass.
"""

import random
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config

from angle_llm.model.layout.flex import BLOCK, block_mask, compiled_flex
from angle_llm.model.layout.token_sequence import build_sequence, shared_prefixes

pytestmark = [
    pytest.mark.slow,  # the compiler takes ten seconds a kernel
    pytest.mark.skipif(
        not any(compiler and shutil.which(compiler) for compiler in config.cpp.cxx), reason="needs a C++ compiler"
    ),
    # torch imports a module of its own that still uses torch.jit
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH, SCALE = 6, 3, 16, 0.3
QUICK_COMPILATION = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
"""No test programs for vector instructions, and no precompiled headers: half the time of the C++ compiler."""


def texts_of(blocks: int) -> list[tuple[int, ...]]:
    """A text of almost `blocks` blocks, and four short continuations of its first half."""
    draw = random.Random(blocks)
    long, *tails = ([draw.randrange(1000) for _ in range(count)] for count in (blocks * BLOCK - 100, 20, 20, 20, 20))
    return sorted(map(tuple, [long, *(long[: len(long) // 2] + tail for tail in tails)]))


def packed_texts(blocks: int) -> list[tuple[int, ...]]:
    """A text of almost `blocks` blocks, and four short texts."""
    return [tuple(range(count)) for count in (20, 20, blocks * BLOCK - 100, 20, 20)]


def visible(texts: list[tuple[int, ...]], tokens: int, *, causal: bool) -> Tensor:
    """Which token attends to which, (T, T), from the texts alone; padding attends to itself."""
    visible_TT = torch.eye(tokens, dtype=torch.bool)
    if causal:
        node_of = {
            path: node
            for node, path in enumerate(sorted({text[:end] for text in texts for end in range(1, len(text) + 1)}))
        }
        for text in texts:
            path = torch.tensor([node_of[text[: end + 1]] for end in range(len(text))])
            visible_TT[path[:, None], path] |= torch.ones(len(path), len(path), dtype=torch.bool).tril()
    else:
        first = 0
        for text in texts:
            visible_TT[first : first + len(text), first : first + len(text)] = True
            first += len(text)
    return visible_TT


def dense(query: Tensor, key: Tensor, value: Tensor, visible_TT: Tensor, softcap: float | None) -> Tensor:
    """Attention in float64 with all scores."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.double().repeat_interleave(repeats, 1) for states in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~visible_TT, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "softcap", "causal"),
    [
        (torch.float32, KV_HEADS, 30.0, True),
        (torch.float32, KV_HEADS, None, False),
        (torch.bfloat16, HEADS, None, True),
        (torch.bfloat16, KV_HEADS, 30.0, False),
        (torch.float16, HEADS, None, True),
    ],
)
def test_the_compiled_kernel_equals_dense_attention(
    dtype: torch.dtype, kv_heads: int, softcap: float | None, causal: bool
) -> None:
    torch._dynamo.reset()
    graphs_before = counters["stats"]["unique_graphs"]
    cap = None if softcap is None else torch.tensor(softcap)
    full_blocks = 0
    for blocks in (2, 3, 5, 9, 4):
        texts = texts_of(blocks) if causal else packed_texts(blocks)
        _, sequence = build_sequence(texts, shared_prefixes(texts) if causal else None, causal=causal)
        tokens = blocks * BLOCK
        assert tokens - BLOCK < int(sequence.starts[-1]) <= tokens
        mask: Any = block_mask(sequence, tokens, CPU)
        full_blocks += int(mask.full_kv_num_blocks.sum())
        # As in LLaMA: heads are a view of the states of a token.
        query, key, value = (
            torch.randn(1, tokens, heads, WIDTH).to(dtype).transpose(1, 2) for heads in (HEADS, kv_heads, kv_heads)
        )
        with torch.no_grad(), config.patch(QUICK_COMPILATION):
            output = compiled_flex()(query, key, value, mask, cap, SCALE, kv_heads != HEADS)
        expected = dense(query, key, value, visible(texts, tokens, causal=causal), softcap)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # rounding of sums; of weights and outputs
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    assert full_blocks > 10
    assert counters["stats"]["unique_graphs"] == graphs_before + 1
    torch._dynamo.reset()
