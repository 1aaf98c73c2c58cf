"""A virtual environment for each library, created once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    # angle-emb requires its transformers, peft and bitsandbytes.
    "angle-emb": ("angle-emb==0.6.1", "transformers==5.3.0", "peft==0.18.1", "bitsandbytes==0.49.2", TORCH),
    "sentence-transformers": ("sentence-transformers[train]==6.2.0", "transformers==5.23.0", "peft==0.21.2", TORCH),
}


def ensure_environment(name: str, workdir: Path) -> Path:
    """The Python interpreter of a library's environment; an environment with other requirements is created again.

    Raises:
        RuntimeError: if pip fails, for example without a network.
    """
    folder = workdir / "environments" / name
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    mark, wanted = folder / "installed.json", list(REQUIREMENTS[name])
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == wanted:
        return python
    print(f"installing {', '.join(wanted)} into {folder} (once; minutes)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    # torch first: the exact version takes the build of the configured index, which can be the CPU build.
    for command in ([sys.executable, "-m", "venv", str(folder)], [*install, TORCH], [*install, *wanted]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output, others = done.stderr.strip()[-1000:], " ".join(peer for peer in REQUIREMENTS if peer != name)
            raise RuntimeError(f"{' '.join(command)} failed:\n{output}\nTo compare without {name}: --peers {others}")
    mark.write_text(json.dumps(wanted), encoding="utf-8")
    return python
