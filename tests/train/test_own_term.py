"""Loss terms that are no part of the package, one from a function and one from a class, in training runs.

As a program, `python tests/train/test_own_term.py FOLDER` makes the runs, because a test process cannot fork.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from programs import run
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, FunctionTerm, Relation, SumOfTerms, blocks
from angle_llm.losses.terms import BatchPairs, BatchTerm, Term


def uniformity(embeddings: Tensor, relation: Relation) -> Tensor:
    """Of all texts (Wang and Isola 2020)."""
    return torch.pdist(normalize(embeddings)).square().mul(-2).exp().mean().log()


def distance(left: Tensor, right: Tensor) -> Tensor:
    return (normalize(left) - normalize(right)).square().sum(dim=1)


@dataclass(frozen=True)
class Alignment(Term):
    """Mean squared distance of the pairs weighted by their scores, from a vector that is computed in blocks."""

    weight: float
    name: str = "alignment"

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        score_P = pairs.relation.score
        return BatchTerm((pairs.similarities(distance),), lambda distance_P: (score_P * distance_P).mean())


LOSS = SumOfTerms(*AngleObjective().terms, FunctionTerm("uniformity", uniformity, weight=0.5), Alignment(0.3))


@pytest.mark.parametrize("elements", [48, blocks.BLOCK_ELEMENTS])
def test_a_sum_with_own_terms_equals_plain_autograd(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(12, 6, dtype=torch.float64, generator=generator).requires_grad_()
    left, right = torch.arange(12).chunk(2)
    relation = Relation(left, right, torch.rand(6, dtype=torch.float64, generator=generator))
    value, in_batch = LOSS(x_ND, relation), AngleObjective()(x_ND, relation)
    alignment = (relation.score * distance(x_ND[left], x_ND[right])).mean()
    expected = in_batch.loss + 0.5 * uniformity(x_ND, relation) + 0.3 * alignment
    assert_close(value.loss, expected)
    assert_close(torch.autograd.grad(value.loss, x_ND), torch.autograd.grad(expected, x_ND))
    assert list(value.parts) == ["in_batch", "uniformity", "alignment"]
    assert not LOSS.needs_pairs, "uniformity changes without pairs"


def test_updates_do_not_depend_on_processes_or_kept_graphs(tmp_path: Path) -> None:
    done = run("python", Path(__file__), str(tmp_path), seconds=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("adapters by") == 4


def main(folder: Path) -> None:
    """Train in one and two processes, with kept and with recomputed graphs, and compare the adapters."""
    import distributed_runs
    import forked
    from runs import ending, use_float64_norm
    from tiny import save_tiny_base

    use_float64_norm()
    save_tiny_base("llama", folder / "base")
    examples = distributed_runs.ragged(12)
    for graph_tokens in (10**6, 0):
        for world in (1, 2):
            name = f"{world} processes, {graph_tokens} tokens kept"
            settings = distributed_runs.settings(folder, name, max_steps=2, graph_tokens=graph_tokens)

            def work(_: int, settings=settings, world=world) -> None:  # type: ignore[no-untyped-def]
                distributed_runs.train(settings, world, examples, dtype=torch.float64, loss=LOSS)

            forked.run(world, work, folder / "log")
            one = folder / f"1 processes, {10**6} tokens kept"
            distributed_runs.check_close(name, one, settings.run_path, losses=1e-9, weights=1e-9)
            adapter, metrics = ending(settings.run_path)
            assert {"loss/uniformity", "loss/alignment"} < metrics[-1].keys()
            assert max(float(tensor.abs().max()) for key, tensor in adapter.items() if "lora_B" in key) > 1e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
