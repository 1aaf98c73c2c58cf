"""Open damaged folders in a monitored process; print one JSON line for each.

    python open_damaged.py KIND,KIND… FIRST COUNT WORK

Audit events report writes outside WORK, programs, connections, code compiled or run from a file in WORK, and pickles. inotify
reports files that any library opens in WORK/outside.
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
from typing import Any

import numpy as np
from damages import MARKER, canary, code, damage
from peft import LoraConfig, TaskType, get_peft_model
from tiny import save_tiny_base, tiny_encoder, train_a_little

from angle_llm.config import LoraSettings
from angle_llm.data.corpus import Corpus
from angle_llm.embed import embed_corpus
from angle_llm.model.backbone import load_backbone, locate
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.search import search_folder, source_texts
from angle_llm.vectors import ShardOptions, VectorForm, read_index

TEXTS = ["A man is eating.", 'Someone says "no" to the dogs.', "Where is it? 3, 5 & 7 Ü"]
SECONDS = 20
"""For one folder; an undamaged one takes a tenth of a second."""
EXTRA_BYTES = 1_500_000_000
"""Memory limit above the use before the first damage."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn")
CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "urllib.Request")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "shutil.rmtree")  # fmt: skip

results = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # output of libraries goes to stderr
kinds, first, count = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
work = Path(sys.argv[4]).resolve()
seen: list[str] = []
watching = False
encoder = tiny_encoder("bert")
queries = encoder.encode(TEXTS)


def make(kind: str, folder: Path) -> None:
    """Write an undamaged folder of a kind."""
    if kind == "whole":
        tiny_encoder("llama").save_pretrained(folder)
    elif kind == "base":
        shutil.copytree(work / "base", folder)
    elif kind == "adapter":
        adapted = SentenceEncoder.from_pretrained(work / "base", device="cpu")
        adapted.add_lora(LoraSettings(rank=2))
        train_a_little(adapted.model)
        adapted.save_pretrained(folder)
    elif kind == "angle-emb":  # as its trainer writes it: an adapter of peft, a tokenizer, settings, a pickle
        config = LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=2, lora_alpha=6, target_modules=["q_proj"])
        peft_model = get_peft_model(load_backbone(locate(str(work / "base"))), config)
        train_a_little(peft_model)
        peft_model.save_pretrained(folder)
        shutil.copy(work / "base" / "tokenizer.json", folder)
        (folder / "angle_config.json").write_text(json.dumps({"max_length": 64, "pooling_strategy": "last"}))
        (folder / "training_args.bin").write_bytes(canary(folder))
    else:
        texts = folder.with_suffix(".txt")
        texts.write_text("".join(f"{text} {number}\n" for number in range(4) for text in TEXTS), encoding="utf-8")
        corpus = Corpus.open(texts, id_column=None)
        form = VectorForm(encoder.dimensions, encoder.dimensions, precision="int8" if kind == "parquet" else "float32")
        options = ShardOptions(kind, 5, store_text=kind == "parquet")  # type: ignore[arg-type]
        embed_corpus(corpus, corpus.survey(skip_bad=False), encoder, "tiny", form, options, folder)


def open_folder(kind: str, folder: Path) -> Any:
    """Open a folder as a user does, and return numbers that depend on it."""
    if kind == "angle-emb":
        opened = SentenceEncoder.from_pretrained(work / "base", adapter=folder, prompt="plain", device="cpu")
        return opened.encode(TEXTS)
    if kind not in ("parquet", "npy"):
        return SentenceEncoder.from_pretrained(folder, device="cpu").encode(TEXTS)
    index = read_index(folder)
    hits = search_folder(folder, index, queries, 3)
    source_texts(index, {hit.row for found in hits for hit in found})
    return np.array([[hit.cosine for hit in found] for found in hits])


def is_below_work(place: object) -> bool:
    try:
        return Path(os.path.realpath(os.fsdecode(place))).is_relative_to(work)  # type: ignore[arg-type]
    except (OSError, ValueError, TypeError):
        return False


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, mode, flags = os.fsdecode(arguments[0]), arguments[1], arguments[2] or 0
        writes = (isinstance(mode, str) and bool(set(mode) & set("wax+"))) or flags & (os.O_WRONLY | os.O_RDWR)
        if (writes and path != os.devnull and not is_below_work(path)) or (
            path.endswith(PICKLES) and is_below_work(path)
        ):
            seen.append(f"opened {path!r} {mode!r} {flags}")
    elif event in CONNECTIONS:
        seen.append(f"{event} {arguments!r}")
        raise ConnectionError("no network in this test")
    elif (
        event in PROGRAMS
        or event == "pickle.find_class"
        or (event in CHANGES and not is_below_work(arguments[0]))
        or (event == "compile" and is_below_work(arguments[1]))
        or (event == "exec" and is_below_work(getattr(arguments[0], "co_filename", None)))
        or (event == "import" and (arguments[0] == "evil" or is_below_work(arguments[1])))
    ):
        seen.append(f"{event} {arguments[:2]!r}")


class OpenedFiles:
    """Names of files opened in a folder since the last call, by inotify."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(0o4000)  # non-blocking
        if self.descriptor < 0 or libc.inotify_add_watch(self.descriptor, os.fsencode(folder), 0x20) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def __call__(self) -> list[str]:
        found: set[str] = set()
        try:
            content = os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            content = b""
        while content:
            length = struct.unpack_from("iIII", content)[3]
            found.add(content[16 : 16 + length].rstrip(b"\0").decode())
            content = content[16 + length :]
        return sorted(found - {""})


class HangError(BaseException):
    """Opening a folder exceeded its time limit."""


def stop(*_: object) -> None:
    raise HangError


def outcome_of(error: BaseException) -> str:
    """refused: an error of this package, or one that it raised itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            return "memory"
        cause = cause.__cause__ or cause.__context__
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    raised_here = place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("angle_llm.")
    own = type(error).__module__.startswith("angle_llm.")
    plain = raised_here and type(error) in (ValueError, FileNotFoundError, TypeError)
    return "hangs" if isinstance(error, HangError) else "refused" if own or plain else "raw error"


def open_copy(kind: str, change: Callable[[Path], str]) -> dict[str, Any]:
    """Damage a copy of a folder, open it, and report the outcome."""
    global watching
    shutil.rmtree(work / "case", ignore_errors=True)
    folder = work / "case" / kind
    shutil.copytree(work / "sound" / kind, folder)
    line = {"kind": kind, "damage": change(folder), "outcome": "loaded"}
    opened_files()
    seen.clear()
    signal.alarm(SECONDS)
    watching = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not np.isfinite(open_folder(kind, folder)).all():
                line["outcome"] = "not finite"
    except BaseException as error:
        line |= {"outcome": outcome_of(error), "message": f"{type(error).__name__}: {str(error)[:400]}"}
    finally:
        watching = False
        signal.alarm(0)
    # Links in the folder of a backbone are followed: weights are often on another disk. So is that of an index, a JSON file.
    followed = kind == "base" or (kind == "whole" and not (folder / "angle_llm.json").is_file())
    if not ((followed and "replace_file" in line["damage"]) or "replace_file embeddings.json" in line["damage"]):
        seen.extend(f"read outside/{name}" for name in opened_files())
    if (work / MARKER).exists():
        seen.append("ran code of the folder")
        (work / MARKER).unlink()
    return line | {"seen": list(seen)}


save_tiny_base("llama", work / "base")
outside = save_tiny_base("llama", work / "outside", seed=1)
for name in ("adapter_model.safetensors", "secret.json"):
    shutil.copy(outside / ("config.json" if name.endswith("json") else "model.safetensors"), outside / name)
(outside / "evil.py").write_text(code(outside / "any"))
opened_files = OpenedFiles(outside)
signal.signal(signal.SIGALRM, stop)
for kind in kinds:
    (work / "sound").mkdir(exist_ok=True)
    make(kind, work / "sound" / kind)
    assert open_copy(kind, lambda _: "nothing")["outcome"] == "loaded"  # also triggers late imports
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
status = Path("/proc/self/status").read_text()
data = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData")))
resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + EXTRA_BYTES, resource.RLIM_INFINITY))
sys.addaudithook(hook)
for kind in kinds:
    for number in range(first, first + count):
        draw = random.Random(f"{kind} {number}")
        print(json.dumps(open_copy(kind, lambda folder: damage(folder, draw))), file=results)  # noqa: B023
print(json.dumps({"grown_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}), file=results)
