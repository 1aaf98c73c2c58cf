"""All 32 layers of a LLaMA-2-7B shape: one training step on this CPU. Needs 19 GiB of free memory and 30 GB of disk."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import seven_billion
from safetensors import safe_open

from angle_llm.forecast import forecast
from angle_llm.plan import PlanSettings
from angle_llm.settings_io import settings_from_dict, settings_to_dict

GIB = 2**30


def free_memory() -> int:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 0)


def program(folder: Path, command: str) -> dict[str, Any]:
    """A process of its own, for its peak memory."""
    words = [sys.executable, str(Path(seven_billion.__file__)), str(folder), command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(command, result)
    return result


@pytest.mark.slow
@pytest.mark.skipif(free_memory() < 19 * GIB, reason="needs 19 GiB of free memory")
def test_a_step_of_7b_needs_the_forecast_memory_and_its_adapter_merges(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 30 * 10**9:
        pytest.skip("needs 30 GB of disk")
    try:
        assert program(tmp_path, "base")["weights"] == 6_607_343_616
        values = settings_to_dict(seven_billion.settings(tmp_path)) | {"device": "cpu"}
        expected = forecast(settings_from_dict(PlanSettings, values, where="test")).expected
        print({part: round(size / GIB, 3) for part, size in asdict(expected).items()})

        trained = program(tmp_path, "train")
        assert math.isfinite(trained["loss"])
        with safe_open(tmp_path / "run" / "model" / "adapter_model.safetensors", framework="pt") as adapter:
            names = [name for name in adapter.keys() if "lora_B" in name]  # noqa: SIM118  # no mapping
            assert len(names) == 32 * 7
            assert all(adapter.get_tensor(name).any() for name in names)
        ratio = trained["peak"] / expected.total
        assert abs(ratio - 1) <= 0.05, f"peak {trained['peak'] / GIB:.2f} GiB is {ratio:.3f} of the forecast"

        merged = program(tmp_path, "merge")
        shards = [size for name, size in merged["files"].items() if name.endswith(".safetensors")]
        assert len(shards) >= 7
        assert max(shards) <= seven_billion.SHARD_BYTES * 1.01
        assert sum(shards) == pytest.approx(2 * 6_607_343_616, rel=0.01)
        # The tensors of a shard, the adapter, a weight in float32, libraries.
        assert merged["anonymous"] < seven_billion.SHARD_BYTES + 3 * GIB
    finally:
        for name in ("base", "merged"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
