"""HTTP application of `angle-llm serve`: embeddings as OpenAI (`/v1/embeddings`) and TEI (`/embed`) answer them.

    requests ──► checks ──► queue ──► one thread: texts of a window, one `encode` for each side ──► answers

Imports fastapi, which is optional.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import fastapi
import numpy as np
import prometheus_client
from fastapi.responses import JSONResponse, Response
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from pydantic_core import to_json

from angle_llm.model.encoder import Rows, SentenceEncoder
from angle_llm.model.tokenizer import check_texts
from angle_llm.prompts import SIDES, Side
from angle_llm.settings.serve import ServeSettings

Encode: TypeAlias = Callable[[list[str], Side | None], Awaitable[Rows]]
"""Returns the embeddings (N, D) of the texts of a request."""


class Refusal(Exception):  # noqa: N818
    """A request that is refused, with an HTTP status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)  # both, so that it can be pickled
        self.status, self.reason = status, reason


class EmbeddingRequest(BaseModel):
    """Body of `/v1/embeddings` and of `/embed` (`inputs`, `prompt_name`); other fields are ignored."""

    texts: str | list[str] = Field(validation_alias=AliasChoices("input", "inputs"))
    model: str | None = None
    """The name of the served model, or NAME:query or NAME:document."""
    side: Side | None = Field(None, validation_alias=AliasChoices("side", "prompt_name"))
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool = True  # as in TEI; `/v1/embeddings` does not use it
    truncate: bool | None = None
    dimensions: int | None = None


class _Job(NamedTuple):
    """The texts of a request, which wait for their vectors."""

    texts: list[str]
    side: Side | None
    rows: asyncio.Future[Rows]
    arrived: float


class Batcher:
    """Computes requests that arrive within a window together, in one thread."""

    def __init__(self, encoder: SentenceEncoder, settings: ServeSettings, sizes: prometheus_client.Histogram) -> None:
        self.encoder, self.settings, self.sizes = encoder, settings, sizes
        self.jobs: deque[_Job] = deque()

    def start(self) -> None:
        """Start the task that computes requests, in the running event loop."""
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def rows(self, texts: list[str], side: Side | None) -> Rows:
        """Return the embeddings (N, D). Raises `Refusal` for a text without a token."""
        if self.task.done():
            raise Refusal(503, "the server stops.")
        loop = asyncio.get_running_loop()
        self.jobs.append(job := _Job(texts, side, loop.create_future(), loop.time()))
        self._arrived.set()
        return await job.rows

    async def _run(self) -> None:
        """Compute requests until the task is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "encode") as thread:
            while True:
                await self._arrived.wait()
                await asyncio.sleep(max(0.0, self.jobs[0].arrived + self.settings.window - loop.time()))
                jobs, texts = [self.jobs.popleft()], 0
                while (texts := sum(len(job.texts) for job in jobs)) < self.settings.max_batch_texts and self.jobs:
                    jobs.append(self.jobs.popleft())
                if not self.jobs:
                    self._arrived.clear()
                self.sizes.observe(texts)
                requests = [(job.texts, job.side) for job in jobs]
                found = await loop.run_in_executor(thread, encode_requests, self.encoder, requests)
                for job, rows in zip(jobs, found, strict=True):
                    if job.rows.done():  # cancelled
                        continue
                    if isinstance(rows, Exception):
                        job.rows.set_exception(rows)
                    else:
                        job.rows.set_result(rows)


def encode_requests(
    encoder: SentenceEncoder, requests: Sequence[tuple[list[str], Side | None]]
) -> list[Rows | Exception]:
    """Return the embeddings of each request (texts, side), or its error, which does not affect the other requests."""
    found: dict[int, Rows | Exception] = {}
    for side in dict.fromkeys(side for _, side in requests):
        group = [number for number, request in enumerate(requests) if request[1] == side]
        of_side = encoder if side is None else encoder.for_side(side)
        try:
            rows_ND = of_side.encode([text for number in group for text in requests[number][0]])
            ends = np.cumsum([len(requests[number][0]) for number in group])[:-1]
            found |= dict(zip(group, np.split(rows_ND, ends), strict=True))
        except Exception as error:
            if len(group) > 1:
                found |= {number: encode_requests(encoder, [requests[number]])[0] for number in group}
            else:  # a ValueError is a text without a token
                found[group[0]] = Refusal(400, str(error)) if isinstance(error, ValueError) else error
    return [found[number] for number in range(len(requests))]


def make_app(
    encoder: SentenceEncoder, settings: ServeSettings, token: str | None = None, encode: Encode | None = None
) -> fastapi.FastAPI:
    """Return the application that serves an encoder.

    Args:
        encoder: The encoder.
        settings: Names and limits of the server.
        token: The bearer token that requests must have.
        encode: Computes the embeddings of a request elsewhere; then only `prompts`, `dimensions`, `max_length` and
            `normalize` of the encoder are used. None: compute them in a thread of this process.
    """
    name = settings.name or settings.model.rstrip("/").rpartition("/")[2] or "encoder"
    sides: dict[str, Side | None] = {name: None}
    if encoder.prompts.differ:
        sides |= {f"{name}:{side}": side for side in SIDES}
    registry = prometheus_client.CollectorRegistry()
    answers = prometheus_client.Counter("angle_llm_requests", "Requests.", ["path", "status"], registry=registry)
    embedded = prometheus_client.Counter("angle_llm_texts", "Embedded texts.", registry=registry)
    seconds = prometheus_client.Histogram("angle_llm_request_seconds", "Seconds.", ["path"], registry=registry)
    counts: dict[str, Any] = {"buckets": [2**n for n in range(13)], "registry": registry}
    sizes = prometheus_client.Histogram("angle_llm_batch_texts", "Texts computed together.", **counts)
    batcher = Batcher(encoder, settings, sizes)
    encode = encode or batcher.rows
    waiting = 0
    gauge = prometheus_client.Gauge("angle_llm_waiting_texts", "Texts without an answer.", registry=registry)
    gauge.set_function(lambda: waiting)

    @asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.task.cancel()

    # No pages with the documentation: their scripts come from the network.
    app = fastapi.FastAPI(title="angle_llm", lifespan=lifespan, docs_url=None, redoc_url=None)

    async def embeddings(request: fastapi.Request) -> Any:
        nonlocal waiting
        body, tei = await _body(request, settings.max_bytes), request.url.path == "/embed"
        texts, side = [body.texts] if isinstance(body.texts, str) else body.texts, body.side
        if not tei and body.model is not None:
            if body.model not in sides:
                raise Refusal(404, f"model {body.model!r:.100} is not served; expected {' or '.join(sides)}.")
            if side and sides[body.model] not in (None, side):
                raise Refusal(400, f"model {body.model!r:.100} and side {side!r} are different sides.")
            side = side or sides[body.model]
        if encoder.prompts.differ and side is None:
            given = "prompt_name" if tei else f"model {' or '.join(list(sides)[1:])}, or side"
            raise Refusal(400, f"queries and documents have different prompts: send {given} (query or document).")
        if body.truncate is False:
            raise Refusal(
                422, f"truncate: texts are cut to {encoder.max_length} tokens as in training; omit the field."
            )
        if not 1 <= len(texts) <= settings.max_texts:
            raise Refusal(413 if texts else 400, f"expected 1 to {settings.max_texts} texts, got {len(texts)}.")
        if (longest := max(map(len, texts))) > settings.max_characters:
            raise Refusal(413, f"expected texts of at most {settings.max_characters} characters, got {longest}.")
        width = encoder.dimensions if body.dimensions is None else body.dimensions
        if not 1 <= width <= encoder.dimensions:
            raise Refusal(400, f"dimensions: expected 1 to {encoder.dimensions}, got {width}.")
        try:
            check_texts(texts)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        if waiting and waiting + len(texts) > settings.max_waiting:
            raise Refusal(429, f"overloaded: {waiting} texts wait. Repeat the request later.")
        waiting += len(texts)
        try:
            rows_ND = (await encode(texts, side))[:, :width]
        finally:
            waiting -= len(texts)
        embedded.inc(len(texts))
        if body.normalize if tei else encoder.normalize:
            norms_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
            rows_ND = rows_ND / np.maximum(norms_N1, np.finfo(np.float32).tiny)
        vectors: list[Any] = rows_ND.tolist()
        if tei:
            return vectors
        if body.encoding_format == "base64":
            vectors = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows_ND]
        data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(vectors)]
        usage = {"prompt_tokens": 0, "total_tokens": 0}  # clients need the field; tokens are not counted
        return {"object": "list", "model": body.model or name, "data": data, "usage": usage}

    async def models(_: fastapi.Request) -> Any:
        return {"object": "list", "data": [{"id": each, "object": "model", "owned_by": "angle_llm"} for each in sides]}

    async def metrics(_: fastapi.Request) -> Any:
        return prometheus_client.generate_latest(registry)

    async def health(_: fastapi.Request) -> Any:
        if batcher.task.done():
            raise Refusal(503, "the server stops.")
        return {"status": "ok", "model": name, "dimensions": encoder.dimensions, "max_length": encoder.max_length}

    def endpoint(work: Callable[[fastapi.Request], Awaitable[Any]]) -> Callable[[fastapi.Request], Awaitable[Response]]:
        """Return the function of a path: checks the token, and answers with the result of `work` or the refusal."""

        async def answer(request: fastapi.Request) -> Response:
            started, path = time.perf_counter(), request.url.path
            response: Response
            try:
                if path != "/health" and not _has_token(request, token):
                    raise Refusal(401, "expected the header Authorization: Bearer TOKEN with the token of this server.")
                content = await work(request)
                is_text = isinstance(content, bytes)
                kind = prometheus_client.CONTENT_TYPE_LATEST if is_text else "application/json"
                response = Response(content if is_text else to_json(content), media_type=kind)
            except Exception as error:
                status, reason = 500, "the server failed; its log has the reason."
                if isinstance(error, Refusal):
                    status, reason = error.status, error.reason
                else:
                    logging.getLogger("uvicorn.error").exception("%s failed", path)
                kind = "server_error" if status >= 500 else "invalid_request_error"
                openai_error = {"message": reason, "type": kind, "param": None, "code": status}
                tei_error = {"error": reason, "error_type": "Overloaded" if status == 429 else "Validation"}
                response = JSONResponse(tei_error if path == "/embed" else {"error": openai_error}, status)
            answers.labels(path, response.status_code).inc()
            seconds.labels(path).observe(time.perf_counter() - started)
            return response

        return answer

    schema = {"requestBody": {"content": {"application/json": {"schema": EmbeddingRequest.model_json_schema()}}}}
    for path in ("/v1/embeddings", "/embed"):
        app.add_api_route(path, endpoint(embeddings), methods=["POST"], openapi_extra=schema, response_model=None)
    for path, read in {"/v1/models": models, "/metrics": metrics, "/health": health}.items():
        app.add_api_route(path, endpoint(read), methods=["GET"], response_model=None)
    return app


def _has_token(request: fastapi.Request, token: str | None) -> bool:
    """Return whether a request has the bearer token, compared in constant time; True if no token is needed."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    equal = hmac.compare_digest(given.strip().encode("latin-1"), (token or "").encode())
    return token is None or (equal and scheme.lower() == "bearer")


async def _body(request: fastapi.Request, most: int) -> EmbeddingRequest:
    """Read the JSON body of a request, whatever its Content-Type is.

    Raises:
        Refusal: for a body of more than `most` bytes, or with wrong fields.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise Refusal(413, f"expected a body of at most {most} bytes.")
    try:
        return EmbeddingRequest.model_validate_json(bytes(data))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = str(found["loc"][0]) if found["loc"] else "body"
        is_texts = where.startswith("input") and found["type"] != "missing"
        raise Refusal(400, f"{where}: {'expected a text or a list of texts' if is_texts else found['msg']}.") from None
