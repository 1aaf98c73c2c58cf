"""FlexAttention for texts in one sequence (the kernel `flex` of `attention`): block masks, and the compiled function.

Legend: T tokens of a sequence, I query blocks and J key blocks of `BLOCK` tokens, H heads, S dimensions of a head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from angle_llm.device import largest, matmul_precision, on_device, trial_problem
from angle_llm.model.layout.token_sequence import TokenSequence, build_sequence, shared_prefixes

BLOCK = 128
"""Number of tokens in a block of FlexAttention; sequences are padded to a multiple of it."""

TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative difference from plain attention in float32: a few rounding errors of bfloat16, TF32 and float16."""


def padded_length(tokens: int) -> int:
    """Return the length of a padded sequence: a multiple of `BLOCK`, at least two. torch compiles another graph for one."""
    return max(2, -(-tokens // BLOCK)) * BLOCK


def mask_blocks(sequence: TokenSequence, tokens: int) -> tuple[Tensor, ...]:
    """Return the blocks of the FlexAttention mask of texts in one sequence, on the CPU, as three int32 tensors.

    The first tensor, (T,), contains for each key the index after the last query that attends to it. The second, (4, I),
    contains the numbers of partly and fully visible key blocks of a query block, then of query blocks of a key block. The
    rows of the third, (4, I, J), start with the indices of these blocks.

    The sequence is padded to `tokens`, a multiple of `BLOCK`. A padding token attends only to itself. The
    blocks are computed in O(T + blocks²), without a T × T mask. For this, `TokenSequence.subtree_ends` gives for each key
    the index after the last query that attends to the key. Suppose a query block follows a key block. Some queries attend
    to some keys if the largest end is after the first query. All queries attend to all keys if the smallest end is after
    the last query.
    """
    end_T = np.arange(1, tokens + 1)  # of padding: a token attends only to itself
    nodes = int(sequence.starts[-1])
    end_T[:nodes] = sequence.subtree_ends()
    count = tokens // BLOCK
    end_JB = end_T.reshape(count, BLOCK)
    first_I = np.arange(count)[:, None] * BLOCK
    earlier_IJ = np.tri(count, k=-1, dtype=bool)  # key block J before query block I
    some_IJ = earlier_IJ & (end_JB.max(axis=1) > first_I)
    every_IJ = earlier_IJ & (end_JB.min(axis=1) >= first_I + BLOCK)
    same_IJ = np.eye(count, dtype=bool)
    if not sequence.causal:
        some_IJ |= some_IJ.T
        every_IJ |= every_IJ.T | (same_IJ & (end_JB.min(axis=1) >= first_I + BLOCK))
    some_IJ |= same_IJ
    partly_IJ = some_IJ & ~every_IJ
    block_masks = (partly_IJ, every_IJ, partly_IJ.T, every_IJ.T)
    counts = np.stack([blocks.sum(axis=1) for blocks in block_masks])
    orders = np.stack([np.argsort(~blocks, axis=1, kind="stable") for blocks in block_masks])
    return tuple(torch.as_tensor(array, dtype=torch.int32) for array in (end_T, counts, orders))


def with_mask(sequence: TokenSequence) -> TokenSequence:
    """Return a sequence with its FlexAttention mask, on the CPU."""
    return replace(sequence, mask=mask_blocks(sequence, padded_length(int(sequence.starts[-1]))))


def block_mask(sequence: TokenSequence, tokens: int, device: torch.device) -> BlockMask:
    """Return the FlexAttention mask of texts in one sequence, on a device."""
    mask = sequence.mask or mask_blocks(sequence, tokens)
    end_T, counts, orders = (on_device(tensor, device) for tensor in mask)

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    def visible_in_text(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < end_T[query]) & (query < end_T[key])

    # Counts and indices alternate. Copies, because torch would compile again for views with other offsets.
    pairs = zip(counts[:, None, None], orders[:, None, None], strict=True)
    lists: list[Any] = [tensor.clone() for pair in pairs for tensor in pair]
    mask_mod = visible if sequence.causal else visible_in_text
    return BlockMask((tokens, tokens), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)  # type: ignore[misc]


def flex_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    softcap: Tensor | None,
    scaling: float | None,
    shared_heads: bool,
) -> Any:
    """Return the attention output (1, H, T, S) of FlexAttention, for H heads with S dimensions and T tokens.

    `compiled_flex` compiles this function.

    Args:
        softcap: scores are limited to ±softcap by tanh; None: no limit. It is a tensor, because torch.compile would make a
            number dynamic, which the kernel does not support.
        shared_heads: whether several query heads share a key-value head.
    """

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    options: Any = {"IS_DIVISIBLE": True}  # sequences are whole blocks, so kernels need no bounds checks
    change = None if softcap is None else capped
    return flex_attention(
        query, key, value, change, mask, scale=scaling, enable_gqa=shared_heads, kernel_options=options
    )


@cache
def compiled_flex(backend: Any = "inductor") -> Any:
    """Return the function `flex_call`, compiled by torch.compile for all sequence lengths and masks.

    torch compiles again only for other heads, scales or dtypes, and for calls with or without gradients. Too many
    compilations, or a call that cannot be compiled, raise an error, because of `fullgraph`. Otherwise torch would run
    the call without compilation, and compute T × T scores.
    """
    allow_recompilation = torch._dynamo.config.patch(recompile_limit=64)  # no option of torch.compile in torch 2.9
    return allow_recompilation(torch.compile(flex_call, dynamic=True, fullgraph=True, backend=backend))


class AttentionShape(NamedTuple):
    """The values of a model's attention for which torch compiles another kernel, apart from the dtype."""

    heads: int
    kv_heads: int
    width: int
    """Number of dimensions of a head."""
    softcap: float | None
    scaling: float
    causal: bool
    """Whether tokens attend to earlier tokens only."""
    shares: bool
    """Whether texts are in a prefix trie; otherwise they are packed."""


@cache
def flex_problem(shape: AttentionShape, dtype: torch.dtype, precision: str, device: torch.device) -> str | None:
    """Compare FlexAttention with plain attention on a device; return why it cannot be used, or None if results are equal.

    Forward and backward passes run for two lengths: without gradients, with gradients of the query alone, and with
    gradients of query, key and value. `precision` is the precision of float32 products (see
    `torch.set_float32_matmul_precision`).
    """
    if dtype == torch.float64:
        return "it does not support float64"
    if torch._dynamo.config.disable:
        return "torch.compile is disabled, and FlexAttention would compute all scores of the sequence"
    trials = [(blocks, gradients) for gradients in (0, 1, 3) for blocks in _trial_lengths(shape)]
    with matmul_precision(device, precision):
        return trial_problem((_difference(shape, dtype, device, *trial) for trial in trials), TOLERANCE[dtype])


def _trial_lengths(shape: AttentionShape) -> list[int]:
    """Return two numbers of blocks that differ from the numbers of heads, and whose tokens differ from the width.

    torch gives equal sizes one symbol when it compiles, and would compile again for the next length.
    """
    taken = shape.heads, shape.kv_heads, shape.width / BLOCK
    return [blocks for blocks in (3, 5, 7, 9) if blocks not in taken][:2]


def _difference(shape: AttentionShape, dtype: torch.dtype, device: torch.device, blocks: int, gradients: int) -> float:
    """Return the largest relative difference of values and gradients between FlexAttention and plain attention.

    The sequence has `blocks` blocks; its texts of 130 tokens share 40 tokens in a trie. Gradients of the first `gradients` of
    query, key and value are computed.
    """
    # A sequence of texts, and random states.
    heads, kv_heads, width, softcap, scaling, causal, shares = shape
    texts = (blocks * BLOCK - 40) // 90 if shares else blocks * BLOCK // 130
    ids = [[0] * 40 + [number] * 90 for number in range(texts)]
    _, sequence = build_sequence(ids, shared_prefixes(ids) if shares else None, causal=causal)
    tokens = padded_length(int(sequence.starts[-1]))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    # Views of (1, T, H, S), as LLaMA computes them.
    states = [draw(1, tokens, count, width).transpose(1, 2) for count in (heads, kv_heads, kv_heads)]
    upstream = draw(1, heads, tokens, width)
    for state in states[:gradients]:
        state.requires_grad_()
    mask = block_mask(sequence, tokens, device)
    cap = None if softcap is None else torch.tensor(softcap, device=device)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(heads // kv_heads, dim=1).float() for tensor in (key, value))
        scores = query.float() @ key.mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        node_T = torch.arange(tokens, device=device)
        hidden_TT = ~mask.mask_mod(node_T, node_T, node_T[:, None], node_T)  # the first two are ignored
        return scores.masked_fill(hidden_TT, -torch.inf).softmax(-1) @ value

    def flexible(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = compiled_flex()(query, key, value, mask, cap, scaling, heads != kv_heads)
        return output

    # Values and gradients of both functions.
    results = []
    with torch.set_grad_enabled(gradients > 0):
        for attend in (flexible, plain):
            output = attend(*states)
            slopes = torch.autograd.grad(output, states[:gradients], upstream.to(output.dtype)) if gradients else ()
            results.append([tensor.detach().float() for tensor in (output, *slopes)])
    return largest(float((value - expected).norm() / expected.norm()) for value, expected in zip(*results, strict=True))
