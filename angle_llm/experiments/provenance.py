"""What a result says of where it came from: command, machine, versions; nothing of a machine's paths."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from angle_llm.experiments.grid import DATA

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "scipy")


def grid_command(name: str) -> str:
    """Runs what of a grid is missing; DATA stands for the data directory."""
    return f"python recipes/ablation.py --grid recipes/grids/{name}.yaml --data-dir DATA"


def portable(value: Any, data_dir: Path) -> Any:
    """Paths below the data directory as DATA/…, so that a result tells nothing of a machine."""
    if isinstance(value, dict):
        return {key: portable(item, data_dir) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item, data_dir) for item in value]
    if isinstance(value, str):  # a list of sets, a:2,b, has several
        there = f"{data_dir}/"
        parts = value.split(",")
        return ",".join(DATA + one.removeprefix(there) if one.startswith(there) else one for one in parts)
    return value


def machine() -> str:
    """What it ran on, in words."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{torch.get_num_threads()} CPU thread(s), {_processor()}"


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of this package, with the commit if it is run from a checkout of git, and of those its figures hang on."""
    told = {name: version(name) for name in ("angle_llm", *_PACKAGES)}
    commit = commit_of(Path(__file__).parents[2])
    return told | {"angle_llm": told["angle_llm"] + (f" at {commit}" if commit else "")}


def commit_of(checkout: Path) -> str:
    """The checkout's commit, with + if its code or its grids are not those of the commit; nothing without git."""
    if not (checkout / ".git").exists():
        return ""
    try:
        git = ["git", "-C", str(checkout)]
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        what = ["status", "--porcelain", "--", "angle_llm", "recipes", "prompts"]
        changed = subprocess.run([*git, *what], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
