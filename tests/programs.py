"""Run this project's programs in forks of a process with this and the heavy packages imported, which saves seconds.

    done = run("angle-llm", "embed", "--model", …)       # a console script of this environment, without a new interpreter
    done = run("python", "eval/sts.py", "--model", …)    # or a file

A process of its own with its own arguments, folder, environment and output; what `subprocess.run` would give comes back.
Variables that a package reads when it is imported are those of the tests.
"""

import atexit
import gc
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import angle_llm

TESTS = Path(__file__).parent
HEAVY = [
    "torch", "transformers", "accelerate", "peft", "datasets", "scipy.stats", "tyro", "sklearn.linear_model",
    "torch.utils.tensorboard", "transformers.optimization", "transformers.models.llama.modeling_llama",
]  # fmt: skip
OWN = [each.name for each in pkgutil.walk_packages(angle_llm.__path__, "angle_llm.")]
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([*HEAVY, *OWN])


class Program:
    """A started program: its process id, `wait` for its end, `process` to signal it."""

    def __init__(
        self, words: list[str], cwd: Path, environment: Mapping[str, str], stdin: bytes, pipe: Path | None
    ) -> None:
        self.words = words
        self._folder = tempfile.TemporaryDirectory()
        self._place = Path(self._folder.name)
        (self._place / "stdin").write_bytes(stdin)
        if pipe is not None:
            for stream in ("stdout", "stderr"):
                (self._place / stream).symlink_to(pipe)
        self.process = _forks.Process(target=_work, args=(words, str(cwd), dict(environment), self._place))
        self.process.start()

    def wait(self, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
        """Exit code and output; ends the program and raises subprocess.TimeoutExpired after `seconds`."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            self._folder.cleanup()
            raise subprocess.TimeoutExpired(self.words, seconds or 0)
        shown, errors = (
            "" if path.is_symlink() else path.read_text(encoding="utf-8", errors="replace")
            for path in (self._place / "stdout", self._place / "stderr")
        )
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.words, self.process.exitcode, shown, errors)


def start(
    *arguments: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str | bytes = b"",
    pipe: Path | None = None,
) -> Program:
    """Starts a console script, or `python FILE`; all output goes to the named pipe `pipe`, if there is one."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    return Program([str(word) for word in arguments], cwd or Path.cwd(), environment or os.environ, given, pipe)


def run(
    *arguments: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str | bytes = b"",
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a console script, or `python FILE`, to its end; raises subprocess.TimeoutExpired after `seconds`."""
    return start(*arguments, cwd=cwd, environment=environment, stdin=stdin).wait(seconds)


def _work(words: list[str], cwd: str, environment: dict[str, str], place: Path) -> None:
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    gc.freeze()  # a full garbage collection would go through all modules
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # those of torch take as long as a small program
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        descriptor = os.open(place / stream, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a job that a shell started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = [entry for entry in sys.path if not Path(entry).is_relative_to(TESTS)]
    try:
        if words[0] == "python":
            sys.argv = words[1:]
            sys.path.insert(0, str(Path(words[1]).parent))
            runpy.run_path(words[1], run_name="__main__")
        else:
            (script,) = entry_points(group="console_scripts", name=words[0])
            sys.argv = [str(Path(sys.executable).parent / words[0]), *words[1:]]
            sys.exit(script.load()())
    finally:
        atexit._run_exitfuncs()  # a forked process would leave without
        sys.stdout.flush()
        sys.stderr.flush()
