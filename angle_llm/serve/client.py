"""Client of an embedding server that speaks OpenAI's `/v1/embeddings` or `/embed` of Text Embeddings Inference (TEI)."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from angle_llm.prompts import Side, SidePrompts
from angle_llm.settings.parsing import SettingsError

TOKEN_VARIABLE = "ANGLE_LLM_SERVER_TOKEN"
"""Environment variable with the bearer token of the server, for `serve` and for `verify --server`."""
TRUNCATION: dict[str, dict[str, Any]] = {"openai": {"truncate_prompt_tokens": -1}, "tei": {"truncate": True}}
"""Protocol → fields that make servers truncate long texts (vLLM, TEI) instead of refusing them."""
Rows = np.ndarray[Any, np.dtype[np.float32]]


class ServerError(ValueError):
    """Error for a server that cannot be reached, refuses a request, or answers with something else than embeddings."""


def is_server(path: str | Path) -> bool:
    """Return whether the name of a form is the URL of a server."""
    return str(path).startswith(("http://", "https://"))


class ServerModel:
    """An embedding server with the interface of `SentenceEncoder`, for comparison with other encoders."""

    bits = None
    dtype = "float32"  # unknown: the tolerance of float32 applies

    def __init__(
        self,
        url: str,
        *,
        prompt: SidePrompts,
        pooling: str,
        max_length: int,
        normalize: bool = False,
        send_prompt: bool = False,
        model: str | None = None,
    ) -> None:
        """Find the protocol and the model name of a server, and encode a text.

        Args:
            url: address of the server, or of its `/v1/embeddings` or `/embed`.
            prompt, pooling, max_length: expected values, because a server does not report them.
            normalize: whether normalised vectors are requested from TEI, which normalises by default.
            send_prompt: send texts with their prompt, for servers that add none.
            model: model name in requests; None: the first name in `/v1/models`.

        Raises:
            SettingsError: for a malformed URL.
            ServerError: if the server does not answer with an embedding.
        """
        self.prompts, self.pooling, self.max_length = prompt, pooling, max_length
        self.send_prompt = send_prompt
        self.side: Side | None = None
        self.notes: list[str] = []
        """What a client of this server must send, for the report."""
        address = url.rstrip("/")
        try:
            is_loopback = httpx.URL(address).host in ("127.0.0.1", "localhost", "::1")
        except httpx.InvalidURL as error:
            raise SettingsError(f"--server: expected a URL, got {url!r} ({error}).") from None
        # Redirects are errors: they would send texts and token to an address that the user did not give.
        limits = httpx.Limits(max_keepalive_connections=0)  # nothing has to be closed
        self._client = httpx.Client(timeout=600, trust_env=not is_loopback, limits=limits)
        if token := os.environ.get(TOKEN_VARIABLE, "").strip():
            self._client.headers["Authorization"] = f"Bearer {token}"
        base = address.removesuffix("/embed").removesuffix("/embeddings").removesuffix("/v1")
        self._models = [] if address.endswith("/embed") else self._model_names(base)
        is_openai = bool(self._models) or address.endswith("/embeddings")
        self._protocol = "openai" if is_openai else "tei"
        self.url = f"{base}/v1/embeddings" if is_openai else f"{base}/embed"
        self._fields: dict[str, Any] = {"normalize": normalize}
        if is_openai:
            self._fields = {"model": model or (self._models or ["default"])[0]}
        has_sides = prompt.differ or f"{self._fields.get('model')}:query" in self._models
        probe_ND = self.for_side("query" if has_sides else None).encode(["A man is eating."])
        self.normalize = bool(abs(np.linalg.norm(probe_ND[0]) - 1) < 1e-3)  # rounding in bfloat16

    def _model_names(self, base: str) -> list[str]:
        """Return the names in `/v1/models`; an empty list if the server lists no names there."""
        reply = self._send(f"{base}/v1/models")
        try:
            return [] if reply.status_code in (404, 405) else [str(model["id"]) for model in _content(reply)["data"]]
        except (KeyError, TypeError):  # another protocol
            return []

    def for_side(self, side: Side | None) -> ServerModel:
        """Return a client that requests the vectors of queries or of documents, if the server has sides."""
        sided = copy.copy(self)
        sided.side = side
        if side is not None and not self.send_prompt:
            if self._protocol == "tei":
                sided._fields = self._fields | {"prompt_name": side}
            elif (named := f"{self._fields['model']}:{side}") in self._models:
                sided._fields = self._fields | {"model": named}
        return sided

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return no token ids, because a server does not report them."""
        return []

    def encode(self, texts: Sequence[str], **_: Any) -> Rows:
        """Return the embeddings (N, D) in float32. Options of `SentenceEncoder.encode` have no effect.

        Raises:
            ServerError: if the server refuses a request, or does not answer with a finite vector for each text.
        """
        if self.send_prompt:
            texts = [self.prompts.of(self.side or "query").format(text) for text in texts]
        size = 16  # the default limit of TEI is 32
        return np.concatenate([self._rows(texts[start : start + size]) for start in range(0, len(texts), size)])

    def _rows(self, texts: Sequence[str]) -> Rows:
        """Return the embeddings of the texts of a request; repeat it with `TRUNCATION` if the server refuses it."""
        texts_field = "input" if self._protocol == "openai" else "inputs"
        body = self._fields | {texts_field: list(texts)}
        reply = self._send(self.url, body)
        if reply.status_code in (400, 413, 422):
            truncation = TRUNCATION[self._protocol]
            reply = self._send(self.url, body | truncation)
            note = f"the server refuses long texts, unless a request has {json.dumps(truncation)}"
            if note not in self.notes:
                self.notes.append(note)
        answer = _content(reply)
        try:
            if self._protocol == "openai":
                items = sorted(answer["data"], key=lambda item: item["index"])
                if [item["index"] for item in items] != list(range(len(items))):
                    raise ValueError("an index that is missing or repeated")
                answer = [item["embedding"] for item in items]
            rows_ND: Rows = np.array(answer, dtype=np.float32)
            if rows_ND.ndim != 2 or len(rows_ND) != len(texts) or not np.isfinite(rows_ND).all():
                raise ValueError(f"an array of shape {rows_ND.shape}, or values that are not finite")
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{self.url}: expected {len(texts)} finite vectors, got {error!s:.200}.") from None
        return rows_ND

    def _send(self, url: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """Return the answer to a request: POST of `body` as JSON, or GET without a body."""
        try:
            return self._client.get(url) if body is None else self._client.post(url, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{url}: no answer ({error}). Is the server running?") from None


def _content(reply: httpx.Response) -> Any:
    """Return the JSON content of an answer. Raises `ServerError` for a refusal, and for other content."""
    reason = " ".join(reply.text.split())
    if reply.status_code != 200:
        raise ServerError(f"{reply.url} answered {reply.status_code}: {reason:.300}")
    try:
        return reply.json()
    except ValueError:
        raise ServerError(f"{reply.url}: expected JSON, got {reason:.300}") from None
