"""A table of experiments, one row after another: trains, measures, and keeps what came out.

    python recipes/ablation.py --grid recipes/grids/ablation.yaml --data-dir DATA
    python recipes/ablation.py --grid recipes/grids/nli.yaml --data-dir DATA --rows in-batch --seeds 42
    python recipes/ablation.py --grid recipes/grids/ablation.yaml --data-dir DATA --list

Rows of a grid share everything but what they name. Killed, the same command goes on. `make report` makes tables of
what is in docs/results.
"""

import tyro

from angle_llm.cli import guarded
from angle_llm.experiments import RunnerSettings, run_grid

if __name__ == "__main__":
    guarded(lambda: run_grid(tyro.cli(RunnerSettings, description=__doc__)))
