"""Run in the environment of a reader: open exported folders with its program, write ids and vectors of texts.

    python open_folder.py JOB.json OUT

JOB: `program` (sentence-transformers or vllm), `texts`, and `folders`: name → `path`, `prompts` (name → text). OUT/NAME.npz
gets `rows` of each prompt, `ids` as JSON, or `error`. Needs nothing of angle_llm.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # two processes a folder take ten times as long

import numpy as np


def ids_of(path, texts):
    """Return the ids of `AutoTokenizer` and of `tokenizers`."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    automatic, raw = AutoTokenizer.from_pretrained(path), Tokenizer.from_file(f"{path}/tokenizer.json")
    return [automatic(text, truncation=True)["input_ids"] for text in texts], [raw.encode(text).ids for text in texts]


def with_sentence_transformers(path, prompts, texts):
    """Return the rows of each prompt name, and of `encode` alone if there is one prompt."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(path, device="cpu")
    names = prompts or [None]
    return np.stack([model.encode(texts, prompt_name=name, show_progress_bar=False) for name in names])


def with_vllm(path, prompts, texts):
    """Return the rows of each prompt, sent as part of the text."""
    from vllm import LLM

    # On a CPU, the rotation of vLLM 0.32 is wrong for LFM2, whose queries have three dimensions: use the rotation of torch.
    is_lfm2 = json.loads(Path(path, "config.json").read_text())["model_type"] == "lfm2"
    operations = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if is_lfm2 else {}
    model = LLM(path, runner="pooling", dtype="float32", enforce_eager=True, disable_log_stats=True, **operations)
    worded = [head + text for head in (prompts.values() or [""]) for text in texts]
    outputs = model.embed(worded, tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
    rows = np.array([output.outputs.embedding for output in outputs], dtype=np.float32)
    return rows.reshape(-1, len(texts), rows.shape[1])


def main(job_path, out):
    job, out = json.loads(Path(job_path).read_text(encoding="utf-8")), Path(out)
    encode = {"sentence-transformers": with_sentence_transformers, "vllm": with_vllm}[job["program"]]
    for name, folder in job["folders"].items():
        found = {}
        try:
            found["rows"] = encode(folder["path"], folder["prompts"], job["texts"])
            heads = folder["prompts"].values() or [""]
            found["ids"] = json.dumps(
                [ids_of(folder["path"], [head + text for text in job["texts"]]) for head in heads]
            )
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        np.savez(out / f"{name}.npz", **found)
        print(name, found.get("error", "opened"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # all results are written, and vLLM sometimes aborts while it shuts down
