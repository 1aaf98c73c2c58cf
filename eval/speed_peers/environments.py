"""A virtual environment for each library compared with, made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    # The first three pins are angle-emb's own.
    "angle-emb": ("angle-emb==0.6.1", "transformers==5.3.0", "peft==0.18.1", "bitsandbytes==0.49.2", TORCH),
    "sentence-transformers": ("sentence-transformers[train]==6.2.0", "transformers==5.23.0", "peft==0.21.2", TORCH),
}
_MARK = "installed.json"


class InstallationError(RuntimeError):
    """An environment could not be made; the message says what failed and what to do."""


def ensure_environment(name: str, workdir: Path) -> Path:
    """The interpreter of a library's environment, which is made where it is not there with these requirements.

    Raises:
        InstallationError: if pip fails, as it does without a network.
    """
    folder = workdir / "environments" / name
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    mark, wanted = folder / _MARK, list(REQUIREMENTS[name])
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == wanted:
        return python
    print(f"installing {', '.join(wanted)} into {folder} (once; minutes)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], name)
    # torch by itself first: an exact version takes what the machine's index has, be it the CPU build.
    for requirements in ([TORCH], wanted):
        _run([str(python), "-m", "pip", "install", "--quiet", *requirements], name)
    mark.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        rest = " ".join(peer for peer in REQUIREMENTS if peer != name)
        raise InstallationError(
            f"the environment of {name} could not be made; this step needs pip's network:\n{said}\n"
            f"The command was: {' '.join(command)}\nTo compare without it: --peers {rest}"
        )
