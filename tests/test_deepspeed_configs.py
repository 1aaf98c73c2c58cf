"""Every file of deepspeed_configs/ launches the recipe, and its run is distributed as its README documents."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tiny import save_tiny_base

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "deepspeed_configs"
STRATEGY = {
    "data_parallel": "data parallel",
    "fsdp2": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero3_offload": "ZeRO-3 with offload",
}
RUN = """
model: {path: BASE, dtype: float32, max_length: 50}
lora: {rank: 4, alpha: 8}
data: {path: "starter:nli_triples.jsonl.gz", format: triple, limit: 24}
objective: {cosine_weight: 0, angle_weight: 0, in_batch_weight: 1}
optimizer: {learning_rate: 0.01, warmup: 0}
batch_size: 8
accumulation: 1
"""


def test_every_file_is_tested_and_described() -> None:
    zero = [name for name in STRATEGY if name.startswith("zero")]
    expected = {"README.md", *(f"{name}.yaml" for name in STRATEGY), *(f"{name}.json" for name in zero)}
    assert {path.name for path in CONFIGS.iterdir()} == expected
    readme = (CONFIGS / "README.md").read_text()
    assert all(f"{name}.yaml" in readme for name in STRATEGY)
    for name in zero:
        launcher = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        assert (ROOT / launcher["deepspeed_config"]["deepspeed_config_file"]).samefile(CONFIGS / f"{name}.json")
        stage = json.loads((CONFIGS / f"{name}.json").read_text())["zero_optimization"]["stage"]
        assert f"ZeRO-{stage}" in STRATEGY[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs("deepspeed") if "zero" in name else ()) for name in STRATEGY]
)
def test_the_recipe_runs_with_it(name: str, tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    (tmp_path / "run.yaml").write_text(RUN.replace("BASE", str(base)))
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    launch = ["launch", "--config_file", f"deepspeed_configs/{name}.yaml", "--num_processes", "2"]
    recipe = ["recipes/llama2_nli.py", "--config", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]
    command = [accelerate, *launch, "--main_process_port", "0", *recipe]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # DeepSpeed calls ninja
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"process 0 of 2 on cpu, {STRATEGY[name]}\n" in done.stdout
    assert done.stdout.count("from_pretrained(") == 1, "one process prints"
    adapter = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all(tensor.numel() for tensor in adapter.values())
    assert any("lora_B" in key and tensor.any() for key, tensor in adapter.items())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(1 <= line["imbalance"] < 1.5 for line in lines)
