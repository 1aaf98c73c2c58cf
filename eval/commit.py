"""The commit of the code that measures."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path


def commit() -> str:
    """Return the git commit of this repository, with + for uncommitted changes; an empty string without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        changes = git("status", "--porcelain", "--", "angle_llm", "eval", "prompts")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changes else "")
    return ""
