"""`serve` answers as OpenAI and TEI do, with the vectors of the encoder, and refuses malformed requests with a reason."""

import asyncio
import base64
import importlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from tiny import tiny_encoder

from angle_llm import PromptTemplate, SentenceEncoder
from angle_llm.prompts import SidePrompts
from angle_llm.serve.listen import read_token, serve_main
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.serve import ServeSettings

for name in ("fastapi", "prometheus_client", "uvicorn"):
    pytest.importorskip(name)
httpx = pytest.importorskip("httpx")
app_module = importlib.import_module("angle_llm.serve.app")
make_app = app_module.make_app
served = importlib.import_module("served").served

TEXTS = ["A man is eating.", "Nobody eats.", "  Zwölf Boxkämpfer 🎉 ", "one two " * 200]
TWO = SidePrompts(PromptTemplate("ask", "Question: {text}"), PromptTemplate("answer", "Answer: {text}"))


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return tiny_encoder("llama", max_length=100)


@pytest.fixture(scope="module")
def two() -> SentenceEncoder:
    return tiny_encoder("llama", max_length=100, prompt=TWO)


def ask(served: Any, *requests: Any, token: str | None = None, **settings: Any) -> list[Any]:
    """The answers of an encoder, or an application, to requests (method, path, options) that are sent at the same time,
    without a network."""
    is_encoder = isinstance(served, SentenceEncoder)
    app = make_app(served, ServeSettings(model="runs/tiny", **settings), token) if is_encoder else served

    async def run() -> list[Any]:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as client,
        ):
            return await asyncio.gather(*(client.request(method, path, **more) for method, path, more in requests))

    return asyncio.run(run())


def post(path: str, body: Any, **headers: str) -> tuple[str, str, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return "POST", path, {"content": content, "headers": headers}


def rows_of(reply: Any) -> np.ndarray:
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    found = answer if isinstance(answer, list) else [item["embedding"] for item in answer["data"]]
    if isinstance(found[0], str):
        found = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in found]
    return np.array(found, dtype=np.float32)


def near(found: np.ndarray, due: np.ndarray) -> bool:
    """Equal up to rounding: the other texts of a computation change the order of sums."""
    return found.shape == due.shape and bool(np.allclose(found, due, rtol=1e-4, atol=1e-5))


def unit(rows_ND: np.ndarray) -> np.ndarray:
    return rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, at most 20 s."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_both_protocols_give_the_vectors_of_the_encoder(encoder: SentenceEncoder) -> None:
    due = encoder.encode(TEXTS)
    openai, base64_, one, short, tei, plain, short_tei, root = ask(
        encoder,
        post("/v1/embeddings", {"input": TEXTS, "model": "tiny", "user": "someone"}),
        post("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64", "side": "query"}),
        post("/v1/embeddings", {"input": TEXTS[0]}),
        post("/v1/embeddings", {"input": TEXTS, "dimensions": 8}),
        post("/embed", {"inputs": TEXTS, "normalize": False, "truncate": True}),
        post("/embed", {"inputs": TEXTS[1]}),
        post("/embed", {"inputs": TEXTS, "dimensions": 8}),
        post("/", {"inputs": TEXTS[1], "truncate": True}),
    )
    assert near(rows_of(openai), due)
    assert near(rows_of(base64_), due)
    assert near(rows_of(one), due[:1])
    assert near(rows_of(short), due[:, :8])
    assert near(rows_of(tei), due)
    assert near(rows_of(plain), unit(due[1:2])), "TEI normalises by default"
    assert near(rows_of(short_tei), unit(due[:, :8]))
    assert root.json() == plain.json(), "InferenceClient posts to the address itself"


def test_texts_of_a_closed_connection_are_not_computed(
    encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    free = threading.Event()
    encode_requests = app_module.encode_requests

    def wait(encoder: SentenceEncoder, requests: Any) -> Any:
        computed.extend(text for texts, *_ in requests for text in texts)
        free.wait(30)
        return encode_requests(encoder, requests)

    monkeypatch.setattr(app_module, "encode_requests", wait)
    with served(make_app(encoder, ServeSettings(model="runs/tiny"))) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, f"{url}/embed", json={"inputs": "first"}, timeout=60)
        until(lambda: computed == ["first"])
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/embed", json={"inputs": "closed"}, timeout=0.2)
        until(lambda: 'path="/embed",status="499"} 1.0' in httpx.get(f"{url}/metrics").text)
        free.set()
        assert first.result().status_code == 200
        assert httpx.post(f"{url}/embed", json={"inputs": "last"}).status_code == 200
    assert computed == ["first", "last"]


def test_a_cancelled_request_leaves_the_queue(encoder: SentenceEncoder) -> None:
    async def run() -> tuple[int, int]:
        batcher = app_module.Batcher(encoder, ServeSettings(model="runs/tiny", window=1), SimpleNamespace())
        request = asyncio.ensure_future(batcher.encode(["a"], None))
        await asyncio.sleep(0)
        before = len(batcher.jobs)
        request.cancel()
        await asyncio.wait({request})
        return before, len(batcher.jobs)

    assert asyncio.run(run()) == (1, 0)


def test_a_bad_text_costs_few_computations(encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def encode(self: SentenceEncoder, texts: list[str], **_: Any) -> Any:
        sizes.append(len(texts))
        if "bad" in texts:
            raise ValueError("no token")
        return np.zeros((len(texts), 2)), SimpleNamespace(lengths=[1] * len(texts))

    monkeypatch.setattr(SentenceEncoder, "encode", encode)
    results = app_module.encode_requests(encoder, [(["bad" if row == 19 else "a"], None, None) for row in range(64)])
    assert [isinstance(result, ValueError) for result in results] == [row == 19 for row in range(64)]
    assert len(sizes) == 13, "all, and two halves of each part with the bad text"


def test_usage_counts_the_tokens_of_the_texts_of_a_request_with_prompt(two: SentenceEncoder) -> None:
    """Also of requests that are computed together, and of repeated and truncated texts."""
    requests = [(TEXTS, "query"), ([TEXTS[0]] * 2, "query"), (TEXTS[1:2], "document")]
    bodies = [{"input": texts, "side": side} for texts, side in requests]
    answers = ask(two, *(post("/v1/embeddings", body) for body in bodies), window=0.2)
    for (texts, side), reply in zip(requests, answers, strict=True):
        tokens = sum(map(len, two.for_side(side).tokenize(texts)))
        assert reply.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


OPTIONAL = {
    "/v1/embeddings": ("model", "encoding_format", "dimensions", "user", "side", "truncate_prompt_tokens"),
    "/embed": ("normalize", "truncate", "truncation_direction", "prompt_name", "dimensions"),
}


@pytest.mark.parametrize(("path", "texts"), [("/v1/embeddings", "input"), ("/embed", "inputs")])
def test_null_in_an_optional_field_is_its_default(path: str, texts: str, encoder: SentenceEncoder) -> None:
    body = {texts: TEXTS}
    default, *answers = ask(encoder, post(path, body), *(post(path, body | {key: None}) for key in OPTIONAL[path]))
    for key, reply in zip(OPTIONAL[path], answers, strict=True):
        assert near(rows_of(reply), rows_of(default)), key


def test_a_side_is_chosen_by_model_name_or_field_and_is_needed_with_two_prompts(two: SentenceEncoder) -> None:
    queries, documents = two.encode_query(TEXTS), two.encode_document(TEXTS)
    assert not near(queries, documents)
    answers = ask(
        two,
        post("/v1/embeddings", {"input": TEXTS, "model": "tiny:query"}),
        post("/v1/embeddings", {"input": TEXTS, "model": "tiny", "side": "query"}),
        post("/embed", {"inputs": TEXTS, "prompt_name": "query", "normalize": False}),
        post("/v1/embeddings", {"input": TEXTS, "model": "tiny:document"}),
        post("/v1/embeddings", {"input": TEXTS, "side": "document"}),
        post("/embed", {"inputs": TEXTS, "prompt_name": "document", "normalize": False}),
        post("/v1/embeddings", {"input": TEXTS, "model": "tiny"}),
        post("/embed", {"inputs": TEXTS}),
        post("/v1/embeddings", {"input": TEXTS, "model": "tiny:query", "side": "document"}),
        ("GET", "/v1/models", {}),
    )
    assert all(near(rows_of(reply), queries) for reply in answers[:3])
    assert all(near(rows_of(reply), documents) for reply in answers[3:6])
    assert [reply.status_code for reply in answers[6:9]] == [400] * 3
    assert "tiny:query" in answers[6].json()["error"]["message"]
    assert [model["id"] for model in answers[9].json()["data"]] == ["tiny", "tiny:query", "tiny:document"]


def test_a_text_without_a_token_is_refused_and_the_requests_beside_it_are_answered() -> None:
    encoder = tiny_encoder("bert")
    requests = [post("/v1/embeddings", {"input": [f"text {number}", f"number {number}"]}) for number in range(40)]
    bad = post("/v1/embeddings", {"input": ["\u0001"]})
    *good, refused = ask(encoder, *requests, bad, window=0.2)
    for number, reply in enumerate(good):
        assert near(rows_of(reply), encoder.encode([f"text {number}", f"number {number}"]))
    assert refused.status_code == 400
    assert "adds no token" in refused.json()["error"]["message"]


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    encoder = tiny_encoder("bert")
    (row,) = encoder.encode(["spoilt"])

    def spoil(_: Any, __: Any, rows: torch.Tensor) -> None:
        rows[(rows - torch.from_numpy(row)).abs().amax(dim=1) < 1e-5] = torch.inf

    encoder.model.register_forward_hook(spoil)
    bodies = [{"input": ["spoilt"], "encoding_format": form} for form in ("base64", "float")]
    requests = [post("/v1/embeddings", body) for body in (*bodies, {"input": ["fine"]})]
    *bad, good = ask(encoder, *requests, post("/embed", {"inputs": "fine"}), window=0.2)[:3]
    assert [answer.status_code for answer in bad] == [500, 500]
    assert "not finite" in bad[0].json()["error"]["message"]
    assert near(rows_of(good), encoder.encode(["fine"]))


class Panic(BaseException):
    """As `PanicException` of libraries in Rust, such as tokenizers."""


def test_a_panic_fails_its_request_only(encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoder.encode

    def panic(texts: list[str], **options: Any) -> Any:
        if "bad" in texts:
            raise Panic("not reachable")
        return encode(texts, **options)

    monkeypatch.setattr(encoder, "encode", panic)
    answered, failed = app_module.encode_requests(encoder, [(["good"], None, None), (["bad"], None, None)])
    assert near(answered.rows_ND, encode(["good"]))
    assert isinstance(failed, RuntimeError)
    assert str(failed) == "not reachable"


@pytest.mark.parametrize("error", [MemoryError, Panic])
def test_an_unexpected_error_fails_the_requests_of_its_batch_only(
    error: type[BaseException], encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [app_module.encode_requests(encoder, [(["text"], None, None)]), None]

    def fail_once(*_: Any) -> Any:
        result = results.pop()
        if result is None:
            raise error
        return result

    monkeypatch.setattr(app_module, "encode_requests", fail_once)
    app = make_app(encoder, ServeSettings(model="runs/tiny", window=0.0))

    async def run() -> list[int]:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client,
        ):
            send = (client.post("/embed", json={"inputs": ["text"]}) for _ in range(2))
            return [(await asyncio.wait_for(reply, 20)).status_code for reply in send]

    assert asyncio.run(run()) == [500, 200]


def test_texts_computed_together_are_counted(encoder: SentenceEncoder) -> None:
    app = make_app(encoder, ServeSettings(model="runs/tiny", window=0.1, max_batch_texts=16))

    async def run() -> str:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as client,
        ):
            await asyncio.gather(*(client.post("/embed", json={"inputs": [f"text {n}"]}) for n in range(20)))
            return str((await client.get("/metrics")).text)

    lines = asyncio.run(run()).splitlines()
    assert "angle_llm_batch_texts_count 2.0" in lines
    assert "angle_llm_batch_texts_sum 20.0" in lines
    assert 'angle_llm_requests_total{path="/embed",status="200"} 20.0' in lines
    assert "angle_llm_waiting_texts 0.0" in lines


def test_another_process_can_compute_the_embeddings() -> None:
    """Of the encoder, the application then needs four properties only."""
    asked = []

    async def encode(texts: list[str], side: str | None, _: str | None) -> Any:
        asked.append((texts, side))
        if texts == ["refused"]:
            raise ValueError("adds no token.")
        return app_module.EncodedRequest(np.full((len(texts), 4), 0.5, np.float32), 7)

    properties = SimpleNamespace(prompts=TWO, dimensions=4, max_length=9, normalize=False)
    app = make_app(properties, ServeSettings(model="runs/tiny"), encode=encode)
    answered, refused, health = ask(
        app,
        post("/embed", {"inputs": ["a", "b"], "prompt_name": "query"}),
        post("/embed", {"inputs": ["refused"], "prompt_name": "query"}),
        ("GET", "/health", {}),
    )
    assert rows_of(answered).tolist() == [[0.5] * 4] * 2
    assert (refused.status_code, refused.json()["error"]) == (400, "adds no token.")
    assert health.json()["dimensions"] == 4
    assert asked[0] == (["a", "b"], "query")


LIMITS = {"max_texts": 3, "max_characters": 50, "max_bytes": 400}
REFUSED: list[tuple[Any, int, str]] = [
    ({"input": []}, 400, "1 to 3 texts"),
    ({"input": ["a"] * 4}, 413, "1 to 3 texts, got 4"),
    ({"input": "a" * 51}, 413, "50 characters"),
    ({"input": "a", "instruction": "b" * 51}, 413, "50 characters"),
    ({"input": "a" * 500}, 413, "400 bytes"),
    ({"input": ""}, 400, "text 0 is empty"),
    ({"input": ["a", " \n"]}, 400, "text 1 is empty"),
    ({"input": [1, 2]}, 400, "a text or a list of texts, not token ids (LangChain: check_embedding_ctx_length=False)"),
    ({"input": [[1, 2]]}, 400, "not token ids (LangChain: check_embedding_ctx_length=False)"),
    ({"input": None}, 400, "a text or a list of texts"),
    ({"model": "tiny"}, 400, "input: Field required"),
    ({"input": "a", "model": "other"}, 404, "tiny"),
    ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
    ({"input": "a", "side": "left"}, 400, "side"),
    ({"input": "a", "dimensions": 0}, 400, "1 to 32"),
    ({"input": "a", "dimensions": 33}, 400, "1 to 32"),
    (b'{"input": "\\ud800"}', 400, "body"),
    (b"\xff\xfe{}", 400, "body"),
    (b"", 400, "body"),
    (b"[" * 300, 400, "body"),
    (b"[]", 400, "body"),
]


def test_a_refused_request_gets_the_status_and_the_reason(encoder: SentenceEncoder) -> None:
    answers = ask(encoder, *(post("/v1/embeddings", body) for body, _, _ in REFUSED), **LIMITS)
    for (body, status, reason), reply in zip(REFUSED, answers, strict=True):
        assert reply.status_code == status, (body, reply.text)
        assert reason in reply.json()["error"]["message"], body
    answers = ask(
        encoder,
        post("/embed", {"inputs": "a", "truncate": False}),
        post("/embed", {"inputs": "a", "prompt_name": "other"}),
        post("/embed", {"inputs": "a", "truncation_direction": "Left"}),
        ("GET", "/embed", {}),
        ("GET", "/other", {}),
    )
    assert [reply.status_code for reply in answers] == [422, 400, 422, 405, 404]
    assert "100 tokens" in answers[0].json()["error"]
    assert "truncation_direction" in answers[2].json()["error"]


def test_more_waiting_texts_than_allowed_are_refused_with_429(encoder: SentenceEncoder) -> None:
    requests = [post("/v1/embeddings", {"input": ["a", "b"]}) for _ in range(10)]
    statuses = [reply.status_code for reply in ask(encoder, *requests, max_waiting=8, window=0.2)]
    assert statuses == [200] * 4 + [429] * 6


def test_a_token_is_needed_except_for_health(encoder: SentenceEncoder) -> None:
    body = {"input": "a"}
    answers = ask(
        encoder,
        post("/v1/embeddings", body),
        post("/v1/embeddings", body, authorization="Bearer wrong"),
        post("/v1/embeddings", body, authorization="Basic secret"),
        post("/v1/embeddings", body, authorization="Bearer secret"),
        ("GET", "/metrics", {}),
        ("GET", "/health", {}),
        ("HEAD", "/health", {}),
        token="secret",
    )
    assert [reply.status_code for reply in answers] == [401, 401, 401, 200, 401, 200, 200]


def test_the_header_host_does_not_change_the_path(encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.datastructures import URL
    from starlette.requests import Request

    monkeypatch.setattr(
        Request, "url", URL("http://x/health?/v1/embeddings")
    )  # as older Starlette reads Host: x/health?
    (reply,) = ask(encoder, post("/v1/embeddings", {"input": "a"}), token="secret")
    assert reply.status_code == 401


def test_white_space_around_a_token_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANGLE_LLM_SERVER_TOKEN", "secret\n")  # from a file, such as a secret of Kubernetes
    assert read_token("0.0.0.0") == "secret"


@pytest.mark.needs("openai")
def test_the_client_of_openai_reads_the_vectors(encoder: SentenceEncoder) -> None:
    import openai

    app = make_app(encoder, ServeSettings(model="runs/tiny"), "secret")
    with served(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        found = client.embeddings.create(model="tiny", input=TEXTS)
        assert near(np.array([item.embedding for item in found.data]), encoder.encode(TEXTS))
        with pytest.raises(openai.BadRequestError, match="text 0 is empty"):
            client.embeddings.create(model="tiny", input=[""])


def malformed(generator: random.Random) -> bytes:
    """A body that is cut, changed or has other types."""
    values = [
        None,
        True,
        -1,
        1e309,
        "",
        "a",
        "\ud800",
        [],
        ["a", None],
        [["a"]],
        {"a": 1},
        "x" * 3000,
        ["a"] * 5,
        10**400,
    ]
    keys = ["input", "inputs", "model", "side", "prompt_name", "dimensions", "encoding_format", "normalize", "truncate",
            "truncation_direction"]  # fmt: skip
    body = {key: generator.choice(values) for key in generator.sample(keys, generator.randint(0, 2))}
    body |= {key: generator.choice([*values, "a text", ["a", "b"]]) for key in ("input", "inputs")}
    content = bytearray(json.dumps(body).encode())
    for _ in range(generator.choice([0, 0, 1, 5])):
        content[generator.randrange(len(content))] = generator.randrange(256)
    return bytes(content[: generator.choice([len(content), generator.randrange(len(content) + 1)])])


@pytest.mark.parametrize("number", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_malformed_requests_never_give_5xx(number: int, encoder: SentenceEncoder) -> None:
    generator = random.Random(0)
    requests = [post(generator.choice(["/v1/embeddings", "/embed"]), malformed(generator)) for _ in range(number)]
    *answers, last = ask(encoder, *requests, post("/embed", {"inputs": "a"}), max_texts=4, max_characters=2000)
    assert last.status_code == 200
    statuses = {reply.status_code for reply in answers}
    assert statuses <= {200, 400, 404, 413, 422, 429}, statuses
    assert statuses >= {400, 413}
    assert all("error" in reply.json() for reply in answers if reply.status_code != 200)


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_connections_are_refused_until_the_model_is_loaded(
    host: str, encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address `::` is for IPv4 too."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as unused:
        try:
            unused.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} is not available")
        port = unused.getsockname()[1]
    steps = []

    def load(*_: Any, **__: Any) -> SentenceEncoder:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        steps.append("loaded")
        return encoder

    def serve(*_: Any, **__: Any) -> None:
        socket.create_connection(("127.0.0.1", port)).close()
        steps.append("served")

    monkeypatch.setattr(SentenceEncoder, "from_pretrained", load)
    monkeypatch.setattr("uvicorn.Server.run", serve)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    serve_main(ServeSettings(model="runs/tiny", host=host, port=port))
    assert steps == ["loaded", "served"]


def test_an_address_that_another_server_takes_during_the_load_is_refused(
    encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]

        def load(*_: Any, **__: Any) -> SentenceEncoder:
            other.listen()
            return encoder

        monkeypatch.setattr(SentenceEncoder, "from_pretrained", load)
        monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: pytest.fail("served"))
        with pytest.raises(SettingsError, match=rf"--port {port}: .*Choose another port"):
            serve_main(ServeSettings(model="runs/tiny", port=port))


Start: TypeAlias = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts `angle-llm serve` in a process, and returns the process and its URL; all end with the test."""
    processes = []

    def begin(folder: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
        words = ["-m", "angle_llm.cli", "serve", str(folder), "--port", str(port), "--device", "cpu"]
        processes.append(process := subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving "), line
        return process, line.split()[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_server_answers_requests_in_progress_and_ends_with_code_0(
    encoder: SentenceEncoder, tmp_path: Path, start: Start
) -> None:
    encoder.save_pretrained(tmp_path / "tiny")
    process, url = start(tmp_path / "tiny")
    connection = HTTPConnection(url.removeprefix("http://"))
    for unused in (6, 0):  # the server keeps a connection longer than the 5 s of clients such as httpx
        connection.request("GET", "/health")
        assert connection.getresponse().read() is not None
        time.sleep(unused)
    connection.close()

    async def run() -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            work = [
                asyncio.create_task(client.post("/embed", json={"inputs": [f"text {n} " * 50] * 64})) for n in range(8)
            ]
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*work)

    assert {reply.status_code for reply in asyncio.run(run())} == {200}
    shown, _ = process.communicate(timeout=30)
    assert (shown, process.returncode) == ("stopped\n", 0)


@pytest.mark.slow
def test_32_clients_get_every_answer_and_continue_after_a_kill(
    encoder: SentenceEncoder, tmp_path: Path, start: Start
) -> None:
    """32 clients for 60 s; then the server is killed and restarted, and the clients repeat what was not answered."""
    encoder.save_pretrained(tmp_path / "tiny")
    texts = [f"text {number} of {number % 7} words" for number in range(1000)]
    due = unit(encoder.encode(texts))
    process, url = start(tmp_path / "tiny")
    seconds: list[float] = []
    errors: list[str] = []
    repeated = 0
    killed: float | None = None

    async def client_of(number: int, client: Any, end: float) -> None:
        nonlocal repeated
        generator = random.Random(number)
        while time.monotonic() < end:
            chosen = [generator.randrange(len(texts)) for _ in range(generator.choice([1, 1, 1, 8]))]
            started = time.monotonic()
            while True:
                try:
                    reply = await client.post("/embed", json={"inputs": [texts[place] for place in chosen]})
                    break
                except httpx.TransportError as error:
                    if killed is None:
                        errors.append(repr(error))
                    repeated += 1
                    await asyncio.sleep(0.1)
            seconds.append(time.monotonic() - started)
            if reply.status_code != 200 or not near(np.array(reply.json()), due[chosen]):
                errors.append(reply.text[:200])

    async def run(duration: float, kill: bool) -> None:
        nonlocal killed, process
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            end = time.monotonic() + duration
            work = [asyncio.create_task(client_of(number, client, end)) for number in range(32)]
            if kill:
                await asyncio.sleep(2)
                killed = time.monotonic()
                process.kill()
                process.communicate()
                process, _ = await asyncio.to_thread(start, tmp_path / "tiny", int(url.rpartition(":")[2]))
            await asyncio.gather(*work)

    asyncio.run(run(60, False))
    assert errors == []
    answers = len(seconds)
    assert answers > 1000
    p50, p95 = np.percentile(seconds, [50, 95])
    print(f"{answers} answers, p50 {1000 * p50:.0f} ms, p95 {1000 * p95:.0f} ms")
    assert p95 < 5  # a stalled client would wait for the end
    asyncio.run(run(30, True))
    assert errors == []
    assert repeated >= 1, "the kill hit requests in progress"
    assert len(seconds) > answers + 32
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0
