"""A real server of another's making answers the command: `transformers serve`, with a tiny model of random weights."""

import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from test_local_generator import TEMPLATE
from tiny import tiny_causal_lm
from tiny_tokenizers import TOKENIZERS

from angle_llm.generation.command import GenerateSettings, generate_main
from angle_llm.generation.generators import Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")),
        reason="`transformers serve` cannot start: pip install 'transformers[serving]'",
    ),
]
SECONDS = 240


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Address and model of the server while the test runs."""
    folder = tmp_path / "model"
    tokenizer = copy.deepcopy(TOKENIZERS["smollm2"]())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_causal_lm("llama-tied").save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "from transformers.cli.transformers import app; app()"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        until = time.monotonic() + SECONDS
        while True:
            try:
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                    break
            except requests.ConnectionError:
                pass
            assert process.poll() is None, (tmp_path / "log.txt").read_text()
            assert time.monotonic() < until, (tmp_path / "log.txt").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1#{folder}"
    finally:
        process.terminate()
        process.wait()


def test_a_real_server_answers_and_counts(served: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("A man is eating.\nTwo dogs run over the grass.\n")
    (tmp_path / "short.yaml").write_text("{name: short, synonym: 'same {size}: {text}', antonym: 'not {size}: {text}'}")
    settings = GenerateSettings(
        sentences=tmp_path / "texts.txt",
        generator=(served,),
        out=tmp_path / "pairs.jsonl",
        prompt=str(tmp_path / "short.yaml"),
        sampling=Sampling(max_new_tokens=9, temperature=1.0, top_p=1.0),
        retries=1,
    )
    assert generate_main(settings)
    report = json.loads(settings.beside(".report.json").read_text())
    assert report["requests"] == {"total": 4, "answered": 4, "failed": 0, "unasked": 0}
    answers = [json.loads(line) for line in settings.beside(".journal.jsonl").read_text().splitlines()]
    assert all(0 < answer["new_tokens"] <= 9 and answer["read_tokens"] > 20 for answer in answers)
    assert any(not answer["finished"] for answer in answers)  # random weights hardly find the end
