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
    ("fields", "message"),
    [
        ({"group": torch.tensor([1, 2])}, r"group: expected one entry per pair, shape \(3,\)"),
        ({"group": torch.tensor([1.0, 2.0, 3.0])}, "group: expected numbers of an integer dtype"),
        ({"teacher": torch.tensor([1.0, 2.0, float("inf")])}, "teacher: expected finite numbers, or NaN"),
        ({"text": torch.zeros(5)}, "text: expected numbers of an integer dtype"),
        ({"text": torch.zeros(5, 1, dtype=torch.int64)}, r"text: expected a vector \(N,\)"),
        ({"guide": torch.zeros(5)}, "guide: expected a floating-point matrix, one row per text"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Relation(*PAIRS, **fields)


def test_fields_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="guide: expected 5 rows, as there are 5 embeddings; got 4"):
        Relation(*PAIRS, guide=torch.zeros(4, 2)).check_rows(5)
