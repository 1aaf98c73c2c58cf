"""`recipes/serve_ray.py` on a local Ray cluster of two encoders, one of which is killed under load."""

import asyncio
import json
import os
import random
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from tiny import save_tiny_adapter, save_tiny_base

from angle_llm import SentenceEncoder, cli
from angle_llm.serve.client import TOKEN_VARIABLE
from angle_llm.settings.parsing import SettingsError

ROOT = Path(__file__).parents[2]
(COMMAND,) = re.findall(r"^python (recipes/serve_ray\.py .*)$", (ROOT / "docs/serving.md").read_text(), re.MULTILINE)
TEXTS = [f"text {number} of {number % 7} words" for number in range(200)]
TOKEN = "secret"
CLIENTS = 16
SECONDS = 12


class Running(NamedTuple):
    """The program in a process, with Ray."""

    process: subprocess.Popen[str]
    url: str
    model: Path

    def replicas(self, kind: str) -> set[int]:
        """The ids of the processes of a kind, Encoder or Server."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {one.pid for one in found if " ".join(one.cmdline()).startswith(f"ray::ServeReplica:angle_llm:{kind}")}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The command of the guide on a tiny model and a free port."""
    folder = tmp_path_factory.mktemp("ray")
    model = save_tiny_adapter(save_tiny_base("llama", folder / "base"), folder / "run/model", max_length=100)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = shlex.split(COMMAND.replace("runs/nli/model", str(model)).replace("8000", str(port)))
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        shown = ""
        for line in process.stdout:  # Ray prints, too
            shown += line
            if line.startswith("Serving "):
                break
        assert "Serving " in shown, shown + (folder / "log").read_text()
        yield Running(process, f"http://127.0.0.1:{port}", model)
    finally:
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=120)
    assert "stopped" in shown.splitlines()
    assert process.returncode == 0


def test_the_settings_of_the_program_reach_the_replicas() -> None:
    """Ray pickles the classes of the program itself with their functions."""
    cloudpickle = pytest.importorskip("cloudpickle", reason="optional: pip install 'angle_llm[ray]'")
    program = runpy.run_path(str(ROOT / "recipes/serve_ray.py"), run_name="program")
    kept = cloudpickle.loads(
        cloudpickle.dumps([program["RayServeSettings"]("m", replicas=3), program["Server"], program["Encoder"]])
    )
    assert kept[0].replicas == 3


def test_a_config_file_of_ray_serve_has_the_settings_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas run in another folder, so the path of the model becomes absolute."""
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    program = runpy.run_path(str(ROOT / "recipes/serve_ray.py"), run_name="program")
    shown: list[Any] = []
    program["build"].__globals__["application"] = lambda settings: shown.append(settings)
    program["build"]({"model": "tiny", "replicas": "2"})
    assert (shown[0].model, shown[0].replicas) == (str(tmp_path / "tiny"), 2)
    with pytest.raises(SettingsError, match=r"serve_ray:build.*replica"):
        program["build"]({"model": "tiny", "replica": 2})


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_the_vectors_are_those_of_the_encoder(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(SystemExit) as ended:
        cli.run(["verify", str(running.model), "--server", running.url])
    assert ended.value.code == 0


@pytest.mark.slow
@pytest.mark.needs("ray")
@pytest.mark.parametrize(("kind", "repeats"), [("Encoder", False), ("Server", True)])
def test_no_answer_is_lost_if_a_replica_is_killed(kind: str, repeats: bool, running: Running) -> None:
    """Clients send each request once if an encoder is killed; if a server is, they repeat what gets status 500."""
    httpx = pytest.importorskip("httpx")
    encoder = SentenceEncoder.from_pretrained(running.model, device="cpu")
    due = encoder.encode(TEXTS)
    due /= np.linalg.norm(due, axis=1, keepdims=True)
    before = running.replicas(kind)
    assert len(before) == 2
    seconds: list[float] = []
    at_kill = repeated = 0

    async def client_of(number: int, client: Any, end: float) -> None:
        nonlocal repeated
        generator = random.Random(number)
        while time.monotonic() < end:
            chosen = [generator.randrange(len(TEXTS)) for _ in range(generator.choice([1, 1, 8]))]
            started = time.monotonic()
            body = {"inputs": [TEXTS[place] for place in chosen]}
            while (reply := await client.post("/embed", json=body)).status_code == 500 and repeats:
                repeated += 1
            assert reply.status_code == 200, reply.text
            np.testing.assert_allclose(np.array(reply.json()), due[chosen], rtol=1e-4, atol=1e-5)
            seconds.append(time.monotonic() - started)

    async def run() -> None:
        nonlocal at_kill
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=running.url, timeout=120, headers=headers) as client:
            end = time.monotonic() + SECONDS
            work = [asyncio.create_task(client_of(number, client, end)) for number in range(CLIENTS)]
            await asyncio.sleep(SECONDS / 3)
            at_kill = len(seconds)
            os.kill(min(before), signal.SIGKILL)
            await asyncio.gather(*work)

    asyncio.run(run())
    p50, p95 = np.percentile(seconds, (50, 95))
    print(f"{len(seconds)} requests, {repeated} repeated, p50 {p50:.2f} s, p95 {p95:.2f} s")
    assert repeated <= CLIENTS
    assert 0 < at_kill < len(seconds) - CLIENTS
    end = time.monotonic() + 120
    while len(after := running.replicas(kind)) < 2 and time.monotonic() < end:
        time.sleep(0.5)
    assert len(after) == 2, "Ray starts the replica again"
    assert min(before) not in after


BODY = json.dumps({"input": ["A man eats.", "Zwölf Boxkämpfer 🎉"], "model": "model", "dimensions": 8}).encode()
MALFORMED = [
    *(BODY[:length] for length in range(len(BODY))),
    *(json.dumps({"input": value}).encode() for value in (None, 1, "", [], [1], ["a", " "], [["a"]], {"a": "b"})),
    *(json.dumps({"input": "a", key: -1}).encode() for key in ("model", "side", "dimensions", "encoding_format")),
    b'{"input": "\\ud800"}',
    b"\xff\xfe{}",
    json.dumps({"input": ["a"] * 2049}).encode(),
    json.dumps({"input": "a" * 200_001}).encode(),
    b" " * (16 * 2**20 + 1),
]


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_malformed_requests_get_4xx(running: Running) -> None:
    httpx = pytest.importorskip("httpx")
    with httpx.Client(base_url=running.url, timeout=120, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        statuses = [client.post("/v1/embeddings", content=body).status_code for body in MALFORMED]
        assert {*statuses} == {400, 413}, statuses
        assert statuses[-3:] == [413] * 3
        assert client.post("/v1/embeddings", content=BODY).status_code == 200
        assert client.post("/other").status_code == 404
        assert client.get("/embed").status_code == 405
        assert client.post("/v1/embeddings", content=BODY, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/health", headers={"Authorization": ""}).status_code == 200
