"""Tables of experiments: a grid file in, one result file for each row and seed out. See `grid` and `runner`."""

from angle_llm.experiments.grid import Experiment, Grid, GridError, Row, load_grid
from angle_llm.experiments.results import Result, load_results
from angle_llm.experiments.runner import RunnerSettings, run_grid

__all__ = [
    "Experiment",
    "Grid",
    "GridError",
    "Result",
    "Row",
    "RunnerSettings",
    "load_grid",
    "load_results",
    "run_grid",
]
