"""The relation of a batch: its optional fields."""

import pytest
import torch
from torch.testing import assert_close

from angle_llm.losses import Relation

PAIRS = torch.tensor([0, 0, 4]), torch.tensor([1, 2, 3]), torch.tensor([1.0, 0.0, 1.0])


def test_a_subset_and_a_widened_relation_keep_the_optional_fields() -> None:
    whole = Relation(
        *PAIRS,
        group=torch.tensor([7, 7, 9], dtype=torch.int32),
        teacher=torch.tensor([0.5, float("nan"), 0.25], dtype=torch.float16),
        text=torch.tensor([3, 4, 5, 6, 3]),
        guide=torch.arange(10, dtype=torch.float16).reshape(5, 2),
        teacher_vectors=torch.arange(5, dtype=torch.float16)[:, None],
    )
    rows, part = whole.subset(torch.tensor([2]))
    assert rows.tolist() == [3, 4]
    assert (part.left.tolist(), part.right.tolist()) == ([1], [0])
    expected = Relation(
        part.left, part.right, part.score, torch.tensor([9]), torch.tensor([0.25]), torch.tensor([6, 3]),
        torch.tensor([[6.0, 7.0], [8.0, 9.0]]), torch.tensor([[3.0], [4.0]]),
    )  # fmt: skip
    assert_close(vars(part.widened()), vars(expected))
    assert_close(whole.widened().teacher, torch.tensor([0.5, float("nan"), 0.25]), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group", torch.tensor([1, 2])),
        ("group", torch.tensor([1.0, 2.0, 3.0])),
        ("teacher", torch.tensor([1.0, 2.0, float("inf")])),
        ("text", torch.zeros(5)),
        ("text", torch.zeros(5, 1, dtype=torch.int64)),
        ("guide", torch.zeros(5)),
        ("guide", torch.zeros(4, 2)),
    ],
)
def test_fields_that_do_not_fit_are_refused(name: str, value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=name):
        Relation(*PAIRS, **{name: value}).check_rows(5)
