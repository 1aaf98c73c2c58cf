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
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import fastapi
import numpy as np
import prometheus_client
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from angle_llm.model.encoder import Rows, SentenceEncoder
from angle_llm.model.tokenizer import check_texts
from angle_llm.prompts import SIDES, Side
from angle_llm.settings.serve import ServeSettings

Body = TypeVar("Body", bound=BaseModel)


class Refusal(Exception):  # noqa: N818
    """A request that is refused with an HTTP status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class OpenAIRequest(BaseModel):
    """Body of `/v1/embeddings`; other fields are ignored."""

    input: str | list[str]
    model: str | None = None
    """The name of the served model, or NAME:query or NAME:document."""
    side: Side | None = None
    """Another way to choose the prompt."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class TeiRequest(BaseModel):
    """Body of `/embed`; other fields are ignored."""

    inputs: str | list[str]
    prompt_name: Side | None = None
    normalize: bool = True
    truncate: bool | None = None
    dimensions: int | None = None


@dataclass
class Job:
    """The texts of a request, which wait for their vectors."""

    texts: list[str]
    side: Side | None
    rows: asyncio.Future[Rows]
    arrived: float


class Batcher:
    """Computes requests that arrive within a window together, in one thread."""

    def __init__(self, encoder: SentenceEncoder, settings: ServeSettings, sizes: prometheus_client.Histogram) -> None:
        self.encoder, self.settings, self.sizes = encoder, settings, sizes
        self.jobs: deque[Job] = deque()
        self.waiting = 0
        """Number of texts that wait or are computed."""
        self.task: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()

    async def rows(self, texts: list[str], side: Side | None) -> Rows:
        """Return the embeddings (N, D) of texts. Raises `Refusal` if too many texts wait, or for texts without a token."""
        if self.waiting and self.waiting + len(texts) > self.settings.max_waiting:
            raise Refusal(429, f"overloaded: {self.waiting} texts wait. Repeat the request later.")
        loop = asyncio.get_running_loop()
        job = Job(texts, side, loop.create_future(), loop.time())
        self.waiting += len(texts)
        self.jobs.append(job)
        self._arrived.set()
        try:
            return await job.rows
        finally:
            self.waiting -= len(texts)

    async def run(self) -> None:
        """Compute requests until the task is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "encode") as thread:
            while True:
                await self._arrived.wait()
                await asyncio.sleep(max(0.0, self.jobs[0].arrived + self.settings.window - loop.time()))
                jobs = [self.jobs.popleft()]
                texts = len(jobs[0].texts)
                while self.jobs and texts + len(self.jobs[0].texts) <= self.settings.max_batch_texts:
                    jobs.append(self.jobs.popleft())
                    texts += len(jobs[-1].texts)
                if not self.jobs:
                    self._arrived.clear()
                self.sizes.observe(texts)
                for job, rows in zip(jobs, await loop.run_in_executor(thread, self._encode, jobs), strict=True):
                    if job.rows.done():  # cancelled
                        continue
                    if isinstance(rows, Exception):
                        job.rows.set_exception(rows)
                    else:
                        job.rows.set_result(rows)

    def _encode(self, jobs: Sequence[Job]) -> list[Rows | Exception]:
        """Return the embeddings of each request, or its error. An error of one request does not affect the others."""
        found: dict[int, Rows | Exception] = {}
        for side in dict.fromkeys(job.side for job in jobs):
            group = [job for job in jobs if job.side == side]
            encoder = self.encoder if side is None else self.encoder.for_side(side)
            try:
                rows_ND = encoder.encode([text for job in group for text in job.texts])
                ends = np.cumsum([len(job.texts) for job in group])[:-1]
                found |= {id(job): rows for job, rows in zip(group, np.split(rows_ND, ends), strict=True)}
            except Exception as error:
                if len(group) > 1:
                    found |= {id(job): self._encode([job])[0] for job in group}
                else:
                    refused = isinstance(error, (ValueError, TypeError))  # a text without a token
                    found[id(group[0])] = Refusal(400, str(error)) if refused else error
        return [found[id(job)] for job in jobs]


def make_app(encoder: SentenceEncoder, settings: ServeSettings, token: str | None = None) -> fastapi.FastAPI:
    """Return the application that serves an encoder; `token` is the bearer token that requests must have."""
    name = settings.name or settings.model.rstrip("/").rpartition("/")[2] or "encoder"
    two = encoder.prompts.differ
    names = [name, *(f"{name}:{side}" for side in SIDES)] if two else [name]
    registry = prometheus_client.CollectorRegistry()
    answers = prometheus_client.Counter("angle_llm_requests", "Requests.", ["path", "status"], registry=registry)
    embedded = prometheus_client.Counter("angle_llm_texts", "Embedded texts.", registry=registry)
    seconds = prometheus_client.Histogram("angle_llm_request_seconds", "Seconds of a request.", registry=registry)
    sizes = prometheus_client.Histogram(
        "angle_llm_batch_texts", "Texts computed together.", buckets=[2**n for n in range(13)], registry=registry
    )
    batcher = Batcher(encoder, settings, sizes)
    prometheus_client.Gauge("angle_llm_waiting_texts", "Texts not yet answered.", registry=registry).set_function(
        lambda: batcher.waiting
    )

    @asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        batcher.task = asyncio.create_task(batcher.run())
        yield
        batcher.task.cancel()

    # No pages with the documentation: their scripts come from the network.
    app = fastapi.FastAPI(title="angle_llm", lifespan=lifespan, docs_url=None, redoc_url=None)

    async def embed(texts: str | list[str], side: Side | None, dimensions: int | None) -> Rows:
        given = [texts] if isinstance(texts, str) else texts
        if not 1 <= len(given) <= settings.max_texts:
            status = 400 if not given else 413
            raise Refusal(status, f"expected 1 to {settings.max_texts} texts, got {len(given)}.")
        longest = max(map(len, given))
        if longest > settings.max_characters:
            raise Refusal(413, f"expected texts of at most {settings.max_characters} characters, got {longest}.")
        try:
            check_texts(given)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        if two and side is None:
            raise Refusal(400, f"queries and documents have different prompts: send {names[1]} or {names[2]} as model, or "
                               'side (/embed: prompt_name) "query" or "document".')  # fmt: skip
        if dimensions is not None and not 1 <= dimensions <= encoder.dimensions:
            raise Refusal(400, f"dimensions: expected 1 to {encoder.dimensions}, got {dimensions}.")
        rows_ND = await batcher.rows(given, side)
        embedded.inc(len(given))
        if dimensions not in (None, encoder.dimensions):
            rows_ND = rows_ND[:, :dimensions]
            rows_ND = _unit(rows_ND) if encoder.normalize else rows_ND
        return rows_ND

    async def openai(request: fastapi.Request) -> Any:
        body = await _body(request, OpenAIRequest, settings.max_bytes)
        if body.model not in (None, *names):
            raise Refusal(404, f"model {body.model!r:.100} is not served; expected {' or '.join(names)}.")
        named = (body.model or "")[len(name) + 1 :]
        if named and body.side not in (None, named):
            raise Refusal(400, f"model {body.model!r:.100} and side {body.side!r} are different sides.")
        rows_ND = await embed(
            body.input, body.side or next((side for side in SIDES if side == named), None), body.dimensions
        )
        vectors: list[Any] = rows_ND.tolist()
        if body.encoding_format == "base64":
            vectors = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows_ND]
        data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(vectors)]
        # Clients need the field; tokens are not counted.
        return {
            "object": "list",
            "model": body.model or name,
            "data": data,
            "usage": {"prompt_tokens": 0, "total_tokens": 0},
        }

    async def tei(request: fastapi.Request) -> Any:
        body = await _body(request, TeiRequest, settings.max_bytes)
        if body.truncate is False:
            raise Refusal(
                422, f"truncate: false is not possible: texts are cut to {encoder.max_length} tokens as in training."
            )
        rows_ND = await embed(body.inputs, body.prompt_name, body.dimensions)
        return (_unit(rows_ND) if body.normalize else rows_ND).tolist()

    async def models(_: fastapi.Request) -> Any:
        return {"object": "list", "data": [{"id": each, "object": "model", "owned_by": "angle_llm"} for each in names]}

    async def metrics(_: fastapi.Request) -> Any:
        return prometheus_client.generate_latest(registry)

    async def health(_: fastapi.Request) -> Any:
        if batcher.task is None or batcher.task.done():
            raise Refusal(503, "the encoder is not running.")
        return {"status": "ok", "model": name, "dimensions": encoder.dimensions, "max_length": encoder.max_length}

    async def answer(request: fastapi.Request, work: Callable[[fastapi.Request], Awaitable[Any]]) -> Response:
        """Return the answer of `work`, or the reason of a refusal; count it."""
        started, path = time.perf_counter(), request.url.path
        headers: dict[str, str] = {}
        try:
            if path != "/health" and not _has_token(request, token):
                headers = {"WWW-Authenticate": "Bearer"}
                raise Refusal(401, "expected the header Authorization: Bearer TOKEN with the token of this server.")
            content = await work(request)
            if isinstance(content, bytes):
                response = Response(content, media_type=prometheus_client.CONTENT_TYPE_LATEST)
            else:
                response = Response(to_json(content), media_type="application/json")
        except Refusal as refusal:
            reason, status = str(refusal), refusal.status
            error = {"message": reason, "type": "invalid_request_error", "param": None, "code": status}
            tei_error = {"error": reason, "error_type": "Overloaded" if status == 429 else "Validation"}
            response = JSONResponse(tei_error if path == "/embed" else {"error": error}, status, headers)
        except Exception:
            logging.getLogger("uvicorn.error").exception("%s failed", path)
            response = JSONResponse({"error": {"message": "the server failed; its log has the reason."}}, 500)
        answers.labels(path, response.status_code).inc()
        if path != "/metrics":
            seconds.observe(time.perf_counter() - started)
        return response

    for path, work, kind in (("/v1/embeddings", openai, OpenAIRequest), ("/embed", tei, TeiRequest)):
        schema = {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
        app.add_api_route(path, _endpoint(answer, work), methods=["POST"], openapi_extra=schema, name=path)
    for path, read in {"/v1/models": models, "/metrics": metrics, "/health": health}.items():
        app.add_api_route(path, _endpoint(answer, read), methods=["GET"], name=path)
    return app


def _endpoint(
    answer: Callable[[fastapi.Request, Callable[[fastapi.Request], Awaitable[Any]]], Awaitable[Response]],
    work: Callable[[fastapi.Request], Awaitable[Any]],
) -> Callable[[fastapi.Request], Awaitable[Response]]:
    """Return the function of a path; its only parameter is the request."""

    async def endpoint(request: fastapi.Request) -> Response:
        return await answer(request, work)

    return endpoint


def _has_token(request: fastapi.Request, token: str | None) -> bool:
    """Return whether a request has the bearer token, compared in constant time; True if no token is needed."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return token is None or (
        hmac.compare_digest(given.strip().encode("latin-1"), token.encode()) and scheme.lower() == "bearer"
    )


async def _body(request: fastapi.Request, kind: type[Body], most: int) -> Body:
    """Read the JSON body of a request, whatever its Content-Type is.

    Raises:
        Refusal: for a body of more than `most` bytes, or that is not a valid `kind`.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise Refusal(413, f"expected a body of at most {most} bytes.")
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = str(found["loc"][0]) if found["loc"] else "body"
        reason = (
            "expected a text or a list of texts"
            if where in ("input", "inputs") and found["type"] != "missing"
            else None
        )
        raise Refusal(400, f"{where}: {reason or found['msg']}.") from None


def _unit(rows_ND: Rows) -> Rows:
    """Return rows of length 1."""
    unit_ND: Rows = rows_ND / np.maximum(np.linalg.norm(rows_ND, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return unit_ND
