"""`eval/gpu_visit.py`, the script for a borrowed GPU: order, time limit, resumption, and the whole visit on a CPU."""

import json
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import gpu_pack
import gpu_visit
import pytest
from gpu_changes import CHANGES
from json_lines import read_rows
from programs import run
from tiny import save_tiny_base

EVAL = Path(__file__).parents[2] / "eval"


def write_pack(folder: Path) -> Path:
    """A pack with tokenizers that are read in milliseconds."""
    files = folder / "files"
    for kind in ("llama", "bert"):
        save_tiny_base(kind, files / kind)
        (files / kind / "model.safetensors").unlink()
    with tarfile.open(folder / gpu_pack.FILES, "w:xz") as archive:
        archive.add(files, arcname=".")
    return folder


@pytest.mark.slow
@pytest.mark.needs("bitsandbytes", "sentence_transformers")
def test_every_row_of_a_visit_runs_on_a_cpu(tmp_path: Path) -> None:
    pack, out = write_pack(tmp_path), tmp_path / "rows.jsonl"
    flags = ["run", "--size=tiny", "--steps=1", "--seconds=3000", f"--pack={pack}", f"--out={out}"]
    done = run("python", EVAL / "gpu_visit.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["row"]: row for row in read_rows(out) if "result" in row}
    assert list(rows) == [
        f"{group}/{row}" for group, names in gpu_visit.PLAN.items() for row in names if row != "start"
    ]
    failed = {name: row for name, row in rows.items() if {"error", "out_of_memory"} & row.keys()}
    assert not failed
    assert rows["peak/bf16"]["sustained_tflops"] > 0
    assert "aten::mm" in rows["train/trie"]["kernels"]
    assert rows["train/caching"]["utilisation"] == 0, "the peak of a CPU is unknown"
    # Of bfloat16 and a small batch; the gradient of an adapter that another row has trained differs by more than 0.07.
    distances = [rows["train/gradient"]["distance"], *(rows[f"train/{name}"]["distance_without"] for name in CHANGES)]
    assert max(distances) < 0.02
    assert len(rows["train/rotary"]["seconds"]) == 3
    assert rows["bidirectional/speed"]["layout"] == "packed"
    assert rows["nf4/gradient"]["layout"] == "trie"
    assert rows["recipe/stop and resume"]["holds"]
    assert rows["embed/20,000 passages"]["texts_per_second"] > 0
    assert len(rows["embed/20,000 passages"]["limits"]) == 1
    assert rows["minilm shape/sentence-transformers"]["peer_texts_per_second"] > 0


def settings_of(folder: Path, **values: Any) -> gpu_visit.VisitSettings:
    for name in ("llama", "bert"):
        (folder / "files" / name).mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / gpu_pack.FILES, "w:xz") as archive:
        archive.add(folder / "files", arcname=".")
    return gpu_visit.VisitSettings(size="tiny", pack=folder, out=folder / "rows.jsonl", **values)


def fake_groups(monkeypatch: pytest.MonkeyPatch, **rows: Any) -> None:
    """Replace the groups by one group per name, each with rows whose function is given."""

    def measure(visit: gpu_visit.Visit, works: dict[str, Any]) -> None:
        for name, work in works.items():
            visit.row(name, work)

    monkeypatch.setattr(
        gpu_visit, "PLAN", {group: {"start": 0, **dict.fromkeys(works, 10)} for group, works in rows.items()}
    )
    monkeypatch.setattr(gpu_visit, "GROUPS", {group: partial(measure, works=works) for group, works in rows.items()})


def measured(path: Path) -> list[str]:
    return [row["row"] for row in read_rows(path) if "result" in row]


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--rows: unknown trian"):
        gpu_visit.run(settings_of(tmp_path, rows=("trian",)))


def test_a_second_run_measures_what_is_missing_and_failed_rows_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> dict[str, Any]:
        raise KeyError("x")

    fake_groups(monkeypatch, first={"bad": fails, "good": dict}, second={"late": dict})
    gpu_visit.run(settings_of(tmp_path, rows=("first",)))
    assert measured(tmp_path / "rows.jsonl") == ["first/bad", "first/good"]
    earlier = (tmp_path / "rows.jsonl").rename(tmp_path / "earlier.jsonl")
    gpu_visit.run(settings_of(tmp_path, earlier=(earlier, tmp_path / "absent.jsonl")))
    assert measured(tmp_path / "rows.jsonl") == ["second/late", "first/bad"]


def test_a_row_that_does_not_fit_is_skipped_and_a_later_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_groups(monkeypatch, group={"long": dict, "short": dict}, other={"long": dict})
    gpu_visit.PLAN["group"]["long"] = gpu_visit.PLAN["other"]["long"] = (
        10_000  # a tenth of it is expected of a tiny size
    )
    gpu_visit.run(settings_of(tmp_path, seconds=60))
    assert measured(tmp_path / "rows.jsonl") == ["group/short"]
    printed = [json.loads(line) for line in capfd.readouterr().out.splitlines() if "skipped" in line]
    assert [row.get("row") or row["group"] for row in printed] == ["group/long", "other"]
    assert printed[1]["skipped"].startswith("needs 1000 s, ")


def test_a_group_that_ends_its_process_or_hangs_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import time

    fake_groups(
        monkeypatch, dies={"row": lambda: os._exit(3)}, good={"row": dict}, hangs={"row": lambda: time.sleep(99)}
    )
    started = time.monotonic()
    gpu_visit.run(settings_of(tmp_path, seconds=5))
    assert time.monotonic() - started < 30
    problems = [(row["group"], row["error"]) for row in read_rows(tmp_path / "rows.jsonl") if "group" in row]
    assert problems == [("dies", "the process ended with code 3"), ("hangs", "stopped at the end of the time")]
    assert measured(tmp_path / "rows.jsonl") == ["good/row"]
    # Both were started, so a second run measures them last.
    tried = {row["row"] for row in gpu_visit.read_rows(tmp_path / "rows.jsonl") if "result" not in row}
    assert tried == {"dies/row", "good/row", "hangs/row"}


def write_wheel(path: Path) -> None:
    names = [
        "bitsandbytes/__init__.py",
        *(f"bitsandbytes/libbitsandbytes_{kind}.so" for kind in ("cpu", "cuda118", "cuda130")),
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 1000)
        archive.writestr("bitsandbytes-1.dist-info/RECORD", "".join(f"{name},,\n" for name in names))


def test_a_pack_has_one_gpu_library_and_says_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_pack, "download", lambda folder, python: write_wheel(folder / "bitsandbytes-1-any.whl"))
    monkeypatch.setattr(gpu_pack, "TOKENIZERS", {"llama": str(save_tiny_base("llama", tmp_path / "base"))})
    size = gpu_pack.pack(gpu_pack.PackSettings(to=tmp_path / "pack"))
    printed = capsys.readouterr().out
    assert f"each call: {size:.1f} of 64 MiB; carry {tmp_path}/pack/wheels" in printed
    with zipfile.ZipFile(tmp_path / "pack/wheels/bitsandbytes-1-any.whl") as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".so")] == [
            "bitsandbytes/libbitsandbytes_cpu.so", "bitsandbytes/libbitsandbytes_cuda130.so",
        ]  # fmt: skip
        assert b"cuda118" not in wheel.read("bitsandbytes-1.dist-info/RECORD")
    with tarfile.open(tmp_path / "pack" / gpu_pack.FILES) as archive:
        assert json.loads(archive.extractfile("./llama/config.json").read()) == {"model_type": "llama"}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"MiB, more than 0\.1 MiB"):
        gpu_pack.pack(gpu_pack.PackSettings(to=tmp_path / "pack", limit_mib=0.1))
    with pytest.raises(ValueError, match=r"expected a library \*cuda999\.so"):
        gpu_pack.pack(gpu_pack.PackSettings(to=tmp_path / "pack", cuda="999"))
