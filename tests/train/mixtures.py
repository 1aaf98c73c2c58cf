"""One run on several sets, kept on disk, in 1, 2 and 3 processes: the same batches and the same weights.

python tests/train/mixtures.py FOLDER CONFIG
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import forked
import torch
import torch.utils.tensorboard
from spreads import ending, largest_difference, loss_difference

from angle_llm.config import TrainSettings, load_settings
from angle_llm.data import store
from angle_llm.run import fine_tune


def main(folder: Path, config: Path) -> None:
    store.MEMORY_LIMIT = 0  # whatever the size
    settings = load_settings(TrainSettings, config)
    ends = {}
    for world in (1, 2, 3):
        mine = replace(settings, run_dir=str(folder / f"world{world}"))
        environment = {"ANGLE_LLM_CACHE": str(folder / f"cache{world}"), "ACCELERATE_USE_CPU": "true"}
        forked.run(world, lambda _, mine=mine: fine_tune(mine), folder / f"world{world}.log", environment)
        told = (folder / f"world{world}.log.0").read_text()
        assert f"process 0 of {world} on cpu" in told, told
        assert len(list((folder / f"cache{world}" / "examples").iterdir())) == 2, "one index a set, whoever was first"
        ends[world] = ending(mine.run_path)
    adapter, metrics = ends[1]
    counts = [{name: line[name] for name in line if name.startswith("examples/")} for line in metrics if "loss" in line]
    for world in (2, 3):
        other, lines = ends[world]
        assert counts == [
            {name: line[name] for name in line if name.startswith("examples/")} for line in lines if "loss" in line
        ]
        losses, weights = loss_difference(metrics, lines), largest_difference(adapter, other)
        print(f"{world} processes: losses differ by {losses:.1e}, adapters by {weights:.1e}")
        assert losses < 1e-5
        # float32 sums in other orders; Adam divides each by its own size, so small gradients differ most.
        assert weights < 1e-3


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
