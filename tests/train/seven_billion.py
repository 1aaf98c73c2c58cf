"""One training step of LLaMA-2-7B with random weights, through the programs of the project.

    python tests/train/seven_billion.py FOLDER base     write the base, 12.6 GiB in bfloat16, to FOLDER/base
    python tests/train/seven_billion.py FOLDER train    one step of LoRA on it; the adapter is in FOLDER/run/model
    python tests/train/seven_billion.py FOLDER merge    merge it into FOLDER/merged

Each prints one JSON line, with the peak memory of the process in bytes.
"""

import json
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tiny_tokenizers import TOKENIZERS
from transformers import LlamaConfig

from angle_llm.config import DataSettings, LoraSettings, ModelSettings, OptimizerSettings, TrainSettings
from angle_llm.export.merge import merge
from angle_llm.model.backbone import empty_backbone
from angle_llm.run import fine_tune

CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SHARD_BYTES = 2 * 10**9


def settings(folder: Path) -> TrainSettings:
    return TrainSettings(
        run_dir=str(folder / "run"),
        model=ModelSettings(path=str(folder / "base"), dtype="bfloat16", max_length=64),
        lora=LoraSettings(rank=32, alpha=32),
        data=DataSettings(limit=2),
        optimizer=OptimizerSettings(learning_rate=1e-4),
        batch_size=2,
        max_steps=1,
        micro_batch_tokens=2048,
        graph_tokens=4096,
    )


def write_base(folder: Path) -> dict[str, Any]:
    """Every weight is a part of one random block: drawing 6.6 G numbers would take minutes."""
    config = LlamaConfig(**CONFIG)
    with torch.device("meta"):
        shapes = empty_backbone(config, torch.bfloat16).state_dict()
    block = (torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_BYTES)
    folder.mkdir(parents=True)
    number = 0
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            shape, number = shapes[name].shape, number + 1
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                count = shape.numel()
                some = block.roll(number * 7919)
                tensors[name] = some.repeat(-(-count // len(some)))[:count].view(shape).contiguous()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.dtype, config.architectures = "bfloat16", ["LlamaModel"]
    config.save_pretrained(folder)
    TOKENIZERS["llama2"]().save_pretrained(folder)
    return {"weights": sum(one.numel() for one in shapes.values())}


def train(folder: Path) -> dict[str, Any]:
    model = fine_tune(settings(folder))
    (line,) = (json.loads(one) for one in (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {
        "model": str(model),
        "loss": line["loss"],
        "computed_tokens": line["computed_tokens"],
        "step": line["seconds"],
    }


def merge_adapter(folder: Path) -> dict[str, Any]:
    """Without verification, which needs the model in float32."""
    merge(folder / "run" / "model", folder / "merged", dtype="bfloat16", shard_bytes=SHARD_BYTES, check=False)
    return {"files": {path.name: path.stat().st_size for path in (folder / "merged").iterdir()}}


def status(name: str) -> int:
    """Return a size of this process in bytes: VmHWM (peak, with pages of files) or RssAnon (now, without)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


class AnonymousPeak(Thread):
    """Samples the anonymous memory of the process ten times a second; pages of files are not counted."""

    peak = 0

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, status("RssAnon"))
            time.sleep(0.1)


if __name__ == "__main__":
    place, command = Path(sys.argv[1]), sys.argv[2]
    started, anonymous = time.monotonic(), AnonymousPeak(daemon=True)
    anonymous.start()
    work = {
        "base": lambda: write_base(place / "base"),
        "train": lambda: train(place),
        "merge": lambda: merge_adapter(place),
    }
    result = work[command]()
    peaks = {"peak": status("VmHWM"), "anonymous": anonymous.peak}
    print(json.dumps({**result, **peaks, "seconds": round(time.monotonic() - started, 1)}), flush=True)
