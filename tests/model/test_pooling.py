"""Poolings: equal to loops over the real tokens, for any padding."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from angle_llm.model.pooling import POOLINGS, pooling_named

LENGTHS = [5, 1, 3]
T, D = 5, 4


def by_hand(name: str, tokens: list[list[float]]) -> list[float]:
    """One text's row: `tokens` are the states of its real tokens."""
    mean = [sum(column) / len(tokens) for column in zip(*tokens, strict=True)]
    return {
        "last": tokens[-1],
        "cls": tokens[0],
        "mean": mean,
        "max": [max(column) for column in zip(*tokens, strict=True)],
        "mean_sqrt_len": [average * len(tokens) ** 0.5 for average in mean],
        "weightedmean": [
            sum(place * value for place, value in enumerate(column, 1)) / sum(range(len(tokens) + 1))
            for column in zip(*tokens, strict=True)
        ],
        "last-avg": mean,
        "last-max": [max(column) for column in zip(*tokens, strict=True)],
        "cls-last-avg": [(first + average) / 2 for first, average in zip(tokens[0], mean, strict=True)],
        "first-last-avg": mean,  # of the states it is given: the two layers are averaged before, see test_encoder
    }[name]


def padded(side: str, filling: float) -> tuple[Tensor, Tensor]:
    """Negative states, so that a padding state of 0 would win a maximum."""
    states_BTD = -torch.rand(len(LENGTHS), T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask_BT = torch.zeros(len(LENGTHS), T, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask_BT[row, slice(length) if side == "right" else slice(T - length, T)] = 1
    return states_BTD.masked_fill(mask_BT.unsqueeze(-1) == 0, filling), mask_BT


@pytest.mark.parametrize("filling", [0.0, 1e6, -1e6])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", POOLINGS)
def test_equals_a_loop_over_the_real_tokens(name: str, side: str, filling: float) -> None:
    states_BTD, mask_BT = padded(side, filling)
    expected = [
        by_hand(name, states_TD[mask_T.bool()].tolist()) for states_TD, mask_T in zip(states_BTD, mask_BT, strict=True)
    ]
    rows_BD = pooling_named(name).function(states_BTD, mask_BT)
    assert_close(rows_BD, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", POOLINGS)
def test_padding_states_get_no_gradient(name: str) -> None:
    states_BTD, mask_BT = padded("right", 0.0)
    states_BTD.requires_grad_()
    pooling_named(name).function(states_BTD, mask_BT).sum().backward()
    assert states_BTD.grad is not None
    assert not states_BTD.grad[mask_BT == 0].any()
    assert states_BTD.grad[mask_BT == 1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_a_long_text_is_finite_in_half_precision(dtype: torch.dtype) -> None:
    """The sum passes float16's largest number, 65,504, and bfloat16 cannot represent the length."""
    states_BTD = torch.full((1, 301, 2), 256.0, dtype=dtype)
    rows_BD = pooling_named("mean").function(states_BTD, torch.ones(1, 301, dtype=torch.long))
    assert_close(rows_BD, torch.full((1, 2), 256.0), rtol=1e-6, atol=0)
