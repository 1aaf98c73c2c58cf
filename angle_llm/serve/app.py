"""HTTP application of `angle-llm serve`: embeddings as OpenAI (`/v1/embeddings`) and TEI (`/embed`, `/`) answer them.

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
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import fastapi
import numpy as np
import prometheus_client
from fastapi import HTTPException, Request, Response
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.pipeline import Rows
from angle_llm.model.source.tokenizer import checked_texts
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.prompts import SIDES, Side
from angle_llm.settings.serve import ServeSettings


class EncodedRequest(NamedTuple):
    """The embeddings (N, D) of the texts of a request, and the number of their tokens, prompt included."""

    rows_ND: Rows
    tokens: int


Route: TypeAlias = Callable[[Request], Awaitable[Any]]
"""Answers a request with JSON content or a `Response`."""
_TEI = ("/embed", "/")
"""Paths with the API of Text Embeddings Inference (TEI); InferenceClient of huggingface_hub posts to the base URL."""
Encode: TypeAlias = Callable[[list[str], Side | None, str | None], Awaitable[EncodedRequest]]
"""Encodes the texts of a request, as a side, with an instruction."""


class EmbeddingRequest(BaseModel):
    """Body of `/v1/embeddings`, `/embed` and `/` (`inputs`, `prompt_name`); other fields are ignored."""

    texts: str | list[str] = Field(validation_alias=AliasChoices("input", "inputs"))
    model: str | None = None
    """The name of the served model, or NAME:query or NAME:document."""
    side: Side | None = Field(None, validation_alias=AliasChoices("side", "prompt_name"))
    instruction: str | None = None
    """Instruction for a prompt with `{instruction}`; None or blank: the default of the prompt."""
    prompt: object = None  # refused
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None  # as in TEI: only false keeps the length; `/v1/embeddings` does not use it
    truncate: bool | None = None
    truncation_direction: str | None = None
    dimensions: int | None = None


class _Job(NamedTuple):
    """A request that waits for the `Batcher`: texts, side and instruction, and the future result."""

    texts: list[str]
    side: Side | None
    instruction: str | None
    result: asyncio.Future[EncodedRequest]


class Batcher:
    """Computes requests that arrive within a window together, in one thread. Later requests wait for the thread."""

    def __init__(self, encoder: SentenceEncoder, settings: ServeSettings, sizes: prometheus_client.Histogram) -> None:
        self.encoder, self.settings, self.sizes = encoder, settings, sizes
        self.thread = ThreadPoolExecutor(1, "encode")
        self.jobs: deque[_Job] = deque()
        self.task: asyncio.Task[None] | None = None
        """The task that computes the waiting jobs; None before the first job."""

    async def encode(self, texts: list[str], side: Side | None, instruction: str | None = None) -> EncodedRequest:
        """Return the embeddings and their tokens. Raises `ValueError` for a text without a token."""
        job = _Job(texts, side, instruction, asyncio.get_running_loop().create_future())
        self.jobs.append(job)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())
        try:
            return await job.result
        except asyncio.CancelledError:  # the client closed the connection
            with suppress(ValueError):  # it is being computed
                self.jobs.remove(job)
            raise

    async def _run(self) -> None:
        """Compute jobs until none waits; an unexpected error fails only the requests of its batch."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.settings.window)
        while self.jobs:
            # Jobs of a batch.
            jobs: list[_Job] = []
            count = 0
            while self.jobs and count < self.settings.max_batch_texts:
                job = self.jobs.popleft()
                if not job.result.done():  # not cancelled
                    jobs.append(job)
                    count += len(job.texts)
            if not jobs:
                break
            self.sizes.observe(count)
            # Their results.
            requests = [(job.texts, job.side, job.instruction) for job in jobs]
            results: list[EncodedRequest | Exception]
            try:
                results = await loop.run_in_executor(self.thread, encode_requests, self.encoder, requests)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # such as a panic of a library in Rust
                results = [RuntimeError(f"a batch of requests could not be computed: {error}")] * len(jobs)
            for job, result in zip(jobs, results, strict=True):
                if job.result.done():  # cancelled
                    continue
                if isinstance(result, Exception):
                    job.result.set_exception(result)
                else:
                    job.result.set_result(result)


def encode_requests(
    encoder: SentenceEncoder, requests: Sequence[tuple[list[str], Side | None, str | None]]
) -> list[EncodedRequest | Exception]:
    """Encode each request (texts, side, instruction), or return its error, which does not affect any other request."""
    results: dict[int, EncodedRequest | Exception] = {}
    for side in dict.fromkeys(side for _, side, _ in requests):
        group = [number for number, (_, side_of_request, _) in enumerate(requests) if side_of_request == side]
        side_encoder = encoder if side is None else encoder.for_side(side)
        try:
            texts = [text for number in group for text in requests[number][0]]
            instructions = [requests[number][2] for number in group for _ in requests[number][0]]
            rows_ND, stats = side_encoder.encode(texts, return_stats=True, instruction=instructions)
            ends = np.cumsum([len(requests[number][0]) for number in group])[:-1]
            lengths = np.split(np.array(stats.lengths), ends)
            for number, rows_MD, length_M in zip(group, np.split(rows_ND, ends), lengths, strict=True):
                results[number] = EncodedRequest(rows_MD, int(length_M.sum()))
        except BaseException as error:  # such as a panic of a library in Rust
            if len(group) == 1:
                results[group[0]] = error if isinstance(error, Exception) else RuntimeError(str(error))
            else:  # compute halves, to find the bad one
                for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                    of_half = encode_requests(encoder, [requests[number] for number in half])
                    results |= zip(half, of_half, strict=True)
    return [results[number] for number in range(len(requests))]


def make_app(
    encoder: SentenceEncoder, settings: ServeSettings, token: str | None = None, encode: Encode | None = None
) -> fastapi.FastAPI:
    """Return the application that serves an encoder.

    Args:
        encoder: The encoder.
        settings: Names and limits of the server.
        token: The bearer token that requests must have.
        encode: Encodes the texts of a request elsewhere; then only `prompts`, `dimensions`, `max_length` and
            `normalize` of the encoder are used. None: compute them in a thread of this process.
    """
    server = _Server(encoder, settings, token, encode)
    # No documentation of the API: the scripts of its pages come from the network.
    app = fastapi.FastAPI(openapi_url=None)
    posts: dict[str, Route] = {"/v1/embeddings": server.openai_embeddings} | dict.fromkeys(_TEI, server.tei_embeddings)
    gets: dict[str, Route] = {"/v1/models": server.models, "/metrics": server.metrics, "/health": server.health}
    for methods, routes in ((["POST"], posts), (["GET", "HEAD"], gets)):
        for path, route in routes.items():
            app.add_api_route(path, server.endpoint(route), methods=methods, response_model=None)
    return app


class _Server:
    """Answers to requests: each route is a method."""

    def __init__(
        self, encoder: SentenceEncoder, settings: ServeSettings, token: str | None, encode: Encode | None
    ) -> None:
        self._encoder, self._settings, self._token = encoder, settings, token
        self._name = settings.name or settings.model.rstrip("/").rpartition("/")[2] or "encoder"
        self._sides: dict[str, Side | None] = {self._name: None}
        """Side of texts by served model name."""
        if encoder.prompts.differ:
            self._sides |= {f"{self._name}:{side}": side for side in SIDES}
        self._waiting = 0
        """Number of texts without an answer."""
        # Metrics, by their names in Prometheus.
        registry = self._registry = prometheus_client.CollectorRegistry()
        buckets = [2**n for n in range(13)]
        sizes = prometheus_client.Histogram(
            "angle_llm_batch_texts", "Texts computed together.", buckets=buckets, registry=registry
        )
        gauge = prometheus_client.Gauge("angle_llm_waiting_texts", "Texts without an answer.", registry=registry)
        gauge.set_function(lambda: self._waiting)
        labels = ["path", "status"]
        self._requests = prometheus_client.Counter("angle_llm_requests", "Requests.", labels, registry=registry)
        seconds = prometheus_client.Histogram("angle_llm_request_seconds", "Seconds.", ["path"], registry=registry)
        self._seconds = seconds
        self._encode = encode or Batcher(encoder, settings, sizes).encode

    def endpoint(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        """Return the function of a path: checks the token, answers with the result of `route` or the refusal, counts."""

        async def answer(request: Request) -> Response:
            started = time.perf_counter()
            path: str = request.scope["path"]  # `url` also depends on the header Host
            status = 200
            try:
                if path != "/health" and not _has_token(request, self._token):
                    raise HTTPException(
                        401, "expected the header Authorization: Bearer TOKEN with the token of this server."
                    )
                content = await route(request)
            except HTTPException as error:
                status = error.status_code
                content = _error_content(path, status, error.detail)
            except ClientDisconnect:
                status = 499  # as nginx counts it
                content = _error_content(path, status, "the client closed the connection.")
            except Exception:
                logging.getLogger("uvicorn.error").exception("%s failed", path)
                status = 500
                content = _error_content(path, status, "the server failed; its log has the reason.")
            self._requests.labels(path, status).inc()
            self._seconds.labels(path).observe(time.perf_counter() - started)
            if isinstance(content, Response):
                return content
            return Response(to_json(content), status, media_type="application/json")

        return answer

    async def openai_embeddings(self, request: Request) -> Any:
        """Answer a request for embeddings, in the form of OpenAI."""
        body = await _body(request, self._settings.max_bytes)
        field = f"model {self._name}:query or {self._name}:document, or side"
        side = self._side(body.side, body.model, field)
        rows_ND, tokens = await self._encode_body(request, body, side, normalize=self._encoder.normalize)
        vectors: list[Any]
        if body.encoding_format == "base64":
            vectors = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows_ND]
        else:
            vectors = rows_ND.tolist()
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": body.model or self._name, "data": data, "usage": usage}

    async def tei_embeddings(self, request: Request) -> Any:
        """Answer a request for embeddings, in the form of TEI (`/embed`, `/`)."""
        body = await _body(request, self._settings.max_bytes)
        side = self._side(body.side, None, "prompt_name")
        rows_ND, _ = await self._encode_body(request, body, side, normalize=body.normalize is not False)
        return rows_ND.tolist()

    async def _encode_body(
        self, request: Request, body: EmbeddingRequest, side: Side | None, *, normalize: bool
    ) -> EncodedRequest:
        """Encode the texts of a request, and cut and normalize their vectors. Raises `HTTPException`.

        If the client closes the connection, texts that are not computed yet leave the queue.
        """
        texts = [body.texts] if isinstance(body.texts, str) else body.texts
        self._check_limits(body, texts)
        if self._waiting and self._waiting + len(texts) > self._settings.max_waiting:
            raise HTTPException(429, f"overloaded: {self._waiting} texts wait. Repeat the request later.")
        self._waiting += len(texts)
        try:
            checked_texts(texts)
            encoding = asyncio.ensure_future(self._encode(texts, side, body.instruction))
            # The body is read, so only the end of the connection follows.
            closed = asyncio.ensure_future(request.receive())
            try:
                await asyncio.wait({encoding, closed}, return_when=asyncio.FIRST_COMPLETED)
                if not encoding.done():
                    raise ClientDisconnect
            finally:
                encoding.cancel()  # no effect on a result
                closed.cancel()
            rows_ND, tokens = encoding.result()
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except FloatingPointError as error:
            raise HTTPException(500, str(error)) from None
        finally:
            self._waiting -= len(texts)
        rows_ND = rows_ND[:, : body.dimensions]
        if normalize:
            rows_ND = unit_rows(rows_ND, np.float32)
        return EncodedRequest(rows_ND, tokens)

    def _side(self, side: Side | None, model: str | None, field: str) -> Side | None:
        """Return the side of the texts of a request: its `side`, or the side of its `model`.

        `field` is the field that can name the side, for messages.

        Raises:
            HTTPException: for another model, if model and side are different sides, or if the side is missing.
        """
        if model is not None and model not in self._sides:
            raise HTTPException(404, f"model {model!r:.100} is not served; expected {' or '.join(self._sides)}.")
        side_of_model = None if model is None else self._sides[model]
        if side_of_model and side not in (None, side_of_model):
            raise HTTPException(400, f"model {model!r} and side {side!r} are different sides.")
        side = side or side_of_model
        if self._encoder.prompts.differ and side is None:
            raise HTTPException(400, f"queries and documents have different prompts: send {field} (query or document).")
        return side

    def _check_limits(self, body: EmbeddingRequest, texts: Sequence[str]) -> None:
        """Raise `HTTPException` for a request that the server does not compute: truncation, sizes, dimensions."""
        encoder, settings = self._encoder, self._settings
        from_left = (body.truncation_direction or "").lower() == "left"
        if from_left or body.truncate is False:
            field = "truncation_direction" if from_left else "truncate"
            raise HTTPException(
                422, f"{field}: texts are cut at the end, to {encoder.max_length} tokens, as in training; omit it."
            )
        if body.prompt is not None:
            raise HTTPException(422, "prompt: the encoder adds its prompt; send prompt_name, or an instruction for it.")
        if not 1 <= len(texts) <= settings.max_texts:
            raise HTTPException(413 if texts else 400, f"expected 1 to {settings.max_texts} texts, got {len(texts)}.")
        if (longest := max(map(len, [*texts, body.instruction or ""]))) > settings.max_characters:
            raise HTTPException(
                413,
                f"expected texts and an instruction of at most {settings.max_characters} characters, got {longest}.",
            )
        if body.dimensions is not None and not 1 <= body.dimensions <= encoder.dimensions:
            raise HTTPException(400, f"dimensions: expected 1 to {encoder.dimensions}, got {body.dimensions}.")

    async def models(self, _: Request) -> Any:
        """List the names of the served models, as OpenAI does."""
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "angle_llm"} for name in self._sides]
        return {"object": "list", "data": models}

    async def metrics(self, _: Request) -> Any:
        """Return the metrics in the text format of Prometheus."""
        content = prometheus_client.generate_latest(self._registry)
        return Response(content, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def health(self, _: Request) -> Any:
        """Return name, dimensions and maximum length of the encoder."""
        encoder = self._encoder
        return {
            "status": "ok", "model": self._name, "dimensions": encoder.dimensions, "max_length": encoder.max_length
        }  # fmt: skip


def _error_content(path: str, status: int, reason: str) -> dict[str, Any]:
    """Return the content of a refusal, in the form of TEI for its paths and of OpenAI for other paths."""
    if path in _TEI:
        return {"error": reason, "error_type": "Overloaded" if status == 429 else "Validation"}
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": reason, "type": error_type, "param": None, "code": status}}


def _has_token(request: Request, token: str | None) -> bool:
    """Return whether a request has the bearer token, compared in constant time; True if no token is needed."""
    scheme, _, received = request.headers.get("authorization", "").partition(" ")
    equal = hmac.compare_digest(received.strip().encode("latin-1"), (token or "").encode())
    return token is None or (equal and scheme.lower() == "bearer")


async def _body(request: Request, max_bytes: int) -> EmbeddingRequest:
    """Read the JSON body of a request, whatever its Content-Type is.

    Raises:
        HTTPException: for a body of more than `max_bytes` bytes, or with wrong fields.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise HTTPException(413, f"expected a body of at most {max_bytes} bytes.")
    try:
        return EmbeddingRequest.model_validate_json(bytes(data))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = str(problem["loc"][0]) if problem["loc"] else "body"
        is_texts = where.startswith("input") and problem["type"] != "missing"
        expected = "expected a text or a list of texts, not token ids (LangChain: check_embedding_ctx_length=False)"
        raise HTTPException(400, f"{where}: {expected if is_texts else problem['msg']}.") from None
