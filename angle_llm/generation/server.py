"""A server that speaks OpenAI's chat completions: theirs, vLLM, llama.cpp, `transformers serve`, Ollama …

The key to it is taken from an environment variable, goes into one header, and is replaced wherever a server repeats it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from angle_llm.config import SettingsError
from angle_llm.generation.generators import Answer, Failure, Request, Sampling
from angle_llm.web import Web, WebError

_NO_OTHER_WILL = (401, 403, 404)
"""Statuses that say that address, model or key are wrong."""
_CHARACTERS_PER_TOKEN = 4
_HERE = ("localhost", "127.0.0.1", "::1")
_CUT = ("length", "content_filter")
"""Reasons to stop that are not the answer's end."""
_SHORTEST_SECRET = 8
"""Characters of a key; a shorter one is a word like EMPTY for a server that wants any, and stands in sentences."""


class ChatServer:
    """A model on a server, named `URL#MODEL`, such as http://127.0.0.1:8000/v1#SmolLM2.

    `body` holds further fields of the request as the server wants them; None takes one out.

    Raises:
        SettingsError: for a name that is none.
    """

    batch_size = 1

    def __init__(
        self,
        name: str,
        sampling: Sampling,
        web: Web,
        *,
        key: str | None = None,
        workers: int = 1,
        tokens_per_minute: int | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        url, _, self.model = name.partition("#")
        parts = urlsplit(url)
        if not self.model or not parts.hostname or parts.scheme not in ("http", "https"):
            raise SettingsError(
                f"--generator {name.rpartition('@')[2]} is no server: write its address and the model's name there, as in "
                "http://127.0.0.1:8000/v1#MODEL. A model on this machine is local:MODEL."
            )
        if "@" in parts.netloc or parts.query:
            raise SettingsError(
                "--generator: an address with a password or a query in it would be written beside every pair. Put the key into "
                "an environment variable, and name that with --api-key-variable."
            )
        self.name = name
        self.url = url.rstrip("/") + "/chat/completions"
        self.workers = workers
        self.sends_key = key is not None and (parts.scheme == "https" or parts.hostname in _HERE)
        """A key is not sent in the clear over a network."""
        self.decides: dict[str, Any] = {**vars(sampling), "body": dict(body or {})}
        self._sampling = sampling
        self._secret = key if key is not None and len(key) >= _SHORTEST_SECRET else None
        self._headers = {"Authorization": f"Bearer {key}"} if self.sends_key else {}
        self._web = web
        self._rate = TokenRate(tokens_per_minute)

    def answer(self, requests: Sequence[Request]) -> list[Answer | Failure]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer | Failure:
        wanted = {
            "model": self.model,
            "messages": [{"role": "user", "content": request.message}],
            "max_tokens": self._sampling.max_new_tokens,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "seed": request.seed,
            **self.decides["body"],
        }
        body = {name: value for name, value in wanted.items() if value is not None}
        self._rate.take(_estimate(request.message) + self._sampling.max_new_tokens)
        try:
            came = self._web.post(self.url, body, self._headers).body
        except WebError as error:
            return Failure(self._safe(str(error)), "settings" if error.status in _NO_OTHER_WILL else "generator")
        return self._read(came, request)

    def _read(self, came: Any, request: Request) -> Answer | Failure:
        try:
            choice = came["choices"][0]
            text = choice["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"the answer's content is {type(text).__name__}")
            finished = choice.get("finish_reason") not in _CUT
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            told = f"{self.url} answered something else than a chat completion ({type(error).__name__})"
            return Failure(told, "generator", *_used(came, 0, 0))  # paid for all the same
        used = _used(came, _estimate(request.message), _estimate(text))
        return Answer(self._safe(text.encode(errors="replace").decode()), finished, *used)

    def _safe(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


class TokenRate:
    """So many tokens in any minute, over all threads; None: as many as come."""

    def __init__(self, per_minute: int | None, *, window: float = 60.0) -> None:
        self._per_minute = per_minute
        self._window = window
        self._taken: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def take(self, tokens: int) -> None:
        """Waits until there is room; more than a minute's worth waits for an empty minute."""
        if self._per_minute is None:
            return
        with self._lock:  # the others wait behind this one, in their turn
            while True:
                now = time.monotonic()
                while self._taken and self._taken[0][0] <= now - self._window:
                    self._taken.popleft()
                if not self._taken or sum(count for _, count in self._taken) + tokens <= self._per_minute:
                    self._taken.append((now, tokens))
                    return
                time.sleep(self._taken[0][0] + self._window - now)


def _used(came: Any, read: int, new: int) -> tuple[int, int]:
    """Tokens of message and answer as the server counted them, or the estimates where it does not."""
    usage = came.get("usage") if isinstance(came, dict) else None
    told = usage if isinstance(usage, dict) else {}

    def count(name: str, estimate: int) -> int:
        value = told.get(name)
        return value if isinstance(value, int) and value >= 0 else estimate

    return count("prompt_tokens", read), count("completion_tokens", new)


def _estimate(text: str) -> int:
    return len(text) // _CHARACTERS_PER_TOKEN + 1
