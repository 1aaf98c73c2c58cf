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
model: {path: BASE, dtype: bfloat16, max_length: 50}
lora: {alpha: 8}
data: {path: "starter:nli_triples.jsonl.gz", format: triple, limit: 24}
objective: {cosine_weight: 0, angle_weight: 0, in_batch_weight: 1}
optimizer: {learning_rate: 0.001, warmup: 0}
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


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param(name, rank, marks=pytest.mark.needs("deepspeed") if "zero" in name else ())
        for name, rank in [*((name, 4) for name in STRATEGY), ("zero2", 0), ("zero3", 0)]
    ],
)
def test_the_recipe_runs_with_it(name: str, rank: int, tmp_path: Path) -> None:
    """In bfloat16: the losses of one process, up to the rounding of products (8 bits) in other micro-batches."""
    base = save_tiny_base("llama", tmp_path / "base")
    (tmp_path / "run.yaml").write_text(RUN.replace("BASE", str(base)))
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    launch = ["launch", "--config_file", f"deepspeed_configs/{name}.yaml", "--num_processes", "2"]
    recipe = ["recipes/llama2_nli.py", "--config", str(tmp_path / "run.yaml"), "--lora.rank", str(rank)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # DeepSpeed calls ninja
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PATH": path}
    for folder, launcher in (("one", [sys.executable]), ("run", [accelerate, *launch, "--main_process_port", "0"])):
        done = subprocess.run(
            [*launcher, *recipe, "--run-dir", str(tmp_path / folder)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"process 0 of 2 on cpu, {STRATEGY[name]}\n" in done.stdout
    assert done.stdout.count("from_pretrained(") == 1, "one process prints"
    weights = load_file(next((tmp_path / "run" / "model").glob("*model.safetensors")))
    assert all(tensor.numel() and tensor.isfinite().all() for tensor in weights.values())
    start = load_file(base / "model.safetensors")
    assert any(
        tensor.any() if "lora_B" in key else tensor.ne(start.get(key, tensor)).any() for key, tensor in weights.items()
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(1 <= line["imbalance"] < 1.5 for line in lines)
