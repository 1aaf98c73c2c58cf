"""Opens damaged folders in a process of its own, under watch; prints a line of JSON for each.

    python open_damaged.py KIND,KIND… FIRST COUNT WORK

Watched: writes outside WORK, programs started, connections, code compiled or run from a file under WORK, pickles opened or
loaded (audit events), files opened in WORK/outside (the kernel's inotify, which also sees libraries not written in
Python), time, and memory.
"""

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

SECONDS = 20
"""For one folder, of which a sound one takes a tenth of one."""
EXTRA_BYTES = 1_500_000_000
"""What the process may take above what it takes before the first damage."""

BARE = ("base",)
WITH_CARD = ("whole", "merged")
"""A backbone's folder is whoever's who names it: links in it are followed, for weights often lie on another disk."""

kinds, first, count = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
work = Path(sys.argv[4]).resolve()
seen: list[str] = []
watching = False
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PROGRAMS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.fork",
    "pty.spawn",
)
CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "urllib.Request")
CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
)


def _below_work(place: object) -> bool:
    if not isinstance(place, str | bytes | os.PathLike):
        return False
    try:
        return Path(os.path.realpath(os.fsdecode(place))).is_relative_to(work)
    except (OSError, ValueError):
        return False


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(mode, str) and bool(set(mode) & set("wax+"))) or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        named = isinstance(path, str | bytes | os.PathLike)
        if named and writes and os.fsdecode(path) != os.devnull and not _below_work(path):
            seen.append(f"wrote to {path!r}")
        if named and os.fsdecode(path).endswith(PICKLES) and _below_work(path):
            seen.append(f"opened the pickle {path!r}")
    elif event in PROGRAMS:
        seen.append(f"started a program: {event} {arguments[:1]!r}")
    elif event in CONNECTIONS:
        seen.append(f"reached for the network: {event} {arguments!r}")
        raise ConnectionError("no network in this test")
    elif event in CHANGES and not _below_work(arguments[0]):
        seen.append(f"{event} {arguments[0]!r}")
    elif event == "compile" and _below_work(arguments[1]):
        seen.append(f"compiled {arguments[1]!r}")
    elif event == "exec" and _below_work(getattr(arguments[0], "co_filename", None)):
        seen.append(f"ran {arguments[0].co_filename!r}")
    elif event == "import" and (arguments[0] == "evil" or _below_work(arguments[1])):
        seen.append(f"imported {arguments[0]!r}")
    elif event == "pickle.find_class":
        seen.append(f"loaded a pickle with {arguments!r}")


class Opened:
    """Files opened in a folder, as the kernel tells."""

    _IN_OPEN, _IN_NONBLOCK = 0x20, 0o4000

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(self._IN_NONBLOCK)
        if self.descriptor < 0 or libc.inotify_add_watch(self.descriptor, os.fsencode(folder), self._IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def names(self) -> set[str]:
        found: set[str] = set()
        try:
            content = os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            return found
        while content:
            length = struct.unpack_from("iIII", content)[3]
            found.add(content[16 : 16 + length].rstrip(b"\0").decode())
            content = content[16 + length :]
        return found


class HangError(BaseException):
    pass


def stop(*_: object) -> None:
    raise HangError


def is_ours(error: BaseException) -> bool:
    """One of the project's own errors, or one that the project itself raised with a message of its own."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    raised_here = place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("angle_llm.")
    own_kind = type(error).__module__.startswith("angle_llm.")
    return own_kind or (raised_here and type(error) in (ValueError, FileNotFoundError, TypeError))


def is_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> None:
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes with the errors
    import folder_kinds

    base = folder_kinds.make_base(work / "base")
    folder_kinds.make_outside(work / "outside")
    opened = Opened(work / "outside")
    for kind in kinds:
        folder_kinds.KINDS[kind].make(work / "sound" / kind, base)
        rows = _open_a_copy(kind, lambda _: "nothing")  # imports what is imported late
        assert rows is None or np.isfinite(rows).all()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()
    data = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData")))
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + EXTRA_BYTES, resource.RLIM_INFINITY))
    sys.addaudithook(hook)
    signal.signal(signal.SIGALRM, stop)
    for kind in kinds:
        for number in range(first, first + count):
            _watch(kind, number, opened, results)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"grown_bytes": grown * 1024}), file=results)


def _open_a_copy(kind: str, spoil: Callable[[Path], str]) -> np.ndarray | None:
    """What comes of opening a spoilt copy of a sound folder."""
    global watching
    import folder_kinds

    shutil.rmtree(work / "case", ignore_errors=True)
    place = work / "case" / kind
    shutil.copytree(work / "sound" / kind, place)
    spoil(place)
    signal.alarm(SECONDS)
    watching = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return folder_kinds.KINDS[kind].open(place, work / "base")
    finally:
        watching = False
        signal.alarm(0)


def _watch(kind: str, number: int, opened: Opened, results: TextIO) -> None:
    import damages
    import folder_kinds

    told = ""

    def spoil(place: Path) -> str:
        nonlocal told
        told = damages.damage(place, random.Random(f"{kind} {number}"))
        print(json.dumps({"kind": kind, "number": number, "damage": told}), file=results)
        opened.names()
        seen.clear()
        return told

    outcome, message = "loaded", ""
    try:
        rows = _open_a_copy(kind, spoil)
        if rows is not None and not np.isfinite(rows).all():
            outcome = "not finite"
    except HangError:
        outcome = "hangs"
    except BaseException as error:
        outcome = "memory" if is_memory(error) else "refused" if is_ours(error) else "raw error"
        message = f"{type(error).__name__}: {str(error)[:400]}"
    elsewhere = sorted(opened.names() - {""})
    without_card = kind in BARE or (kind in WITH_CARD and not (work / "case" / kind / "angle_llm.json").is_file())
    if not (without_card and "_link" in told):
        seen.extend(f"read outside/{name}" for name in elsewhere)
    if (work / folder_kinds.MARKER).exists():
        seen.append("ran the canary")
        (work / folder_kinds.MARKER).unlink()
    line = {"kind": kind, "number": number, "outcome": outcome, "message": message, "seen": list(seen)}
    print(json.dumps(line), file=results)


if __name__ == "__main__":
    main()
