"""`fine_tune` with objects of a program in one and two processes.

As a program, `python tests/train/test_python_processes.py FOLDER` makes the runs, because a test process cannot fork.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from programs import run
from test_own_term import Alignment, uniformity

from angle_llm import AngleObjective, EarlyStopping, FunctionTerm, SentenceEncoder, fine_tune

PAIRS = [{"query": f"Dog {n} runs.", "answer": f"Animal {n} moves."} for n in range(16)]


def test_objects_of_a_program_on_two_processes(tmp_path: Path) -> None:
    done = run("python", Path(__file__), str(tmp_path), seconds=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.splitlines()[-1] == "all equal"


def main(folder: Path) -> None:
    """Train in one and two processes, with kept and with recomputed graphs, and compare; then with unequal data."""
    import forked
    from runs import ending, largest_difference, loss_difference
    from tiny import save_tiny_base

    base = str(save_tiny_base("llama", folder / "base"))

    def train(rank: int, world: int, name: str, graph_tokens: int, data: Any) -> None:
        values = iter([1.0, 0.5, 0.4, 0.3])

        def own(encoder: SentenceEncoder) -> float:
            encoder.encode(["A dog."])
            return next(values)

        result = fine_tune(
            model={"path": base, "dtype": "float32", "max_length": 100},
            lora={"rank": 4},
            data=data,
            evaluation={"tasks": {"own": own}, "every_steps": 1},
            loss=[AngleObjective(), FunctionTerm("uniformity", uniformity, 0.5), Alignment(0.3)],
            callbacks=[EarlyStopping(3)],
            optimizer={"learning_rate": 1e-2},
            batch_size=8,
            epochs=4,
            graph_tokens=graph_tokens,
            micro_batch_tokens=100,
            run_dir=str(folder / name),
        )
        assert (result.steps, result.best) == (3, {"own/score": 0.5})
        assert torch.distributed.get_world_size() == world

    for world, graph_tokens in ((1, 10**6), (2, 0)):
        name = f"{world} processes, {graph_tokens} tokens kept"
        forked.run(world, lambda rank, w=world, n=name, g=graph_tokens: train(rank, w, n, g, PAIRS), folder / "log")
        first, metrics = ending(folder / f"1 processes, {10**6} tokens kept")
        adapter, of_run = ending(folder / name)
        # Rounding of float32; the best model is that of step 1.
        assert largest_difference(first, adapter) < 1e-4, name
        assert loss_difference(metrics, of_run) < 1e-4, name
        steps = [line for line in of_run if "loss" in line]
        assert all({"loss/uniformity", "loss/alignment"} < line.keys() for line in steps)
        assert max(float(tensor.abs().max()) for key, tensor in adapter.items() if "lora_B" in key) > 1e-3

    import kills

    unequal = [PAIRS, [*PAIRS[:-1], {"query": "A cat sits.", "answer": "It sits."}]]
    processes = forked.start(2, lambda rank: train(rank, 2, "unequal", 0, unequal[rank]), folder / "unequal.log")
    assert 0 not in [kills.wait(process) for process in processes]
    logs = "".join(Path(f"{folder / 'unequal.log'}.{rank}").read_text() for rank in range(2))
    assert logs.count("RemoteRankError: rank 0 and rank 1 (now) have different settings or data: data.path") == 2, logs[
        -3000:
    ]
    print("all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
