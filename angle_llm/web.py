"""Polite HTTP for the rooms that speak to a server: JSON in, JSON out, asked again when a server is busy, and no secret told.

Nothing here runs unless a verb that names a server is run.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import requests

LONG_WAIT = 5.0
"""Seconds; a longer wait is told before it begins."""
LONGEST_WAIT = 2 * 3600.0
"""Seconds; a server that asks for more is given up."""
_SECRET_HEADER = re.compile(r"auth|key|token|cookie|secret", re.IGNORECASE)
_ADVICE = {
    400: "The request was not understood; check its settings.",
    401: "The server does not know this key or token; check the environment variable it is taken from.",
    403: "The server knows who asks and refuses; check what the key or token may do.",
    404: "There is nothing at this address, or nothing that this key or token may see; check the name.",
    410: "It was there and is gone.",
    429: "The server wants fewer requests; wait, or ask for fewer a minute.",
    451: "It is withheld for legal reasons.",
}


@dataclass(frozen=True)
class Answer:
    """What a server said: `headers` answer to any case, `body` is the JSON, or None where there is none."""

    status: int
    headers: Mapping[str, str]
    body: Any


class WebError(OSError):
    """A server that could not be asked, or refused; `status` is 0 when nothing whole came back."""

    def __init__(self, status: int, url: str, words: str) -> None:
        advice = _ADVICE.get(
            status, "Try again later." if status == 0 or status >= 500 else "Check address and settings."
        )
        told = f"status {status}: {words}" if status else words
        super().__init__(f"{_without_secrets(url)}: {told.rstrip('.')}. {advice}")
        self.status = status


def usual_wait(answer: Answer) -> float | None:
    """Seconds a server asks to be left alone for, by Retry-After (seconds or a date); None if it does not say."""
    value = answer.headers.get("Retry-After", "").strip()
    if answer.status < 400 or not value:
        return None
    if value.isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp() - time.time())


class Web:
    """Asks servers for JSON, from any number of threads.

    Asked again, up to `retries` times: after 429, 5xx, a lost connection, no answer within `timeout` seconds, and an answer
    that is cut or no JSON. Between, `wait` seconds if the server says how long (by default Retry-After), else a random time
    up to `backoff` × 2ⁿ seconds, 60 at most ("full jitter"). An answer of another status is asked again if `wait` gives a
    time for it. `per_minute` spaces the requests of all threads. `tell` is called before waits of more than 5 seconds.

    `headers` go with every request. Those that hold secrets, by their name, are never told, and not sent on to another
    server by a redirect.
    """

    def __init__(
        self,
        retries: int = 5,
        timeout: float = 60.0,
        per_minute: float | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        backoff: float = 1.0,
        wait: Callable[[Answer], float | None] = usual_wait,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.requests = 0
        """Requests sent so far, repeated ones included."""
        self._retries, self._timeout, self._backoff = retries, timeout, backoff
        self._headers, self._wait, self._tell = dict(headers or {}), wait, tell
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()
        self._local = threading.local()

    def get(
        self, url: str, params: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Asks for an address; redirects are followed. Raises `WebError` for any status of 400 and more."""
        return self._ask("GET", url, headers, params=params)

    def post(self, url: str, json: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Sends JSON. A redirect is an error: what was sent must not go elsewhere. Raises `WebError` as `get` does."""
        return self._ask("POST", url, headers, json=json)

    def _ask(self, method: str, url: str, headers: Mapping[str, str] | None, **what: Any) -> Answer:
        given = {**self._headers, **(headers or {})}
        for attempt in range(self._retries + 1):
            self._take_turn()
            pause = None
            try:
                response = self._session.request(
                    method, url, headers=given, timeout=self._timeout, allow_redirects=method == "GET", **what
                )
                answer = Answer(response.status_code, response.headers, _json(response))
                if answer.status < 300 or answer.status == 304:
                    return answer
                pause = self._wait(answer)
                error = WebError(answer.status, url, _words(response, given))
                if pause is None and answer.status != 429 and answer.status < 500:
                    raise error
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as lost:
                slow = isinstance(lost, requests.Timeout)
                error = WebError(
                    0, url, f"no answer in {self._timeout:g} s" if slow else "no connection, or it broke off"
                )
            except requests.exceptions.ContentDecodingError:
                error = WebError(0, url, "the answer cannot be unpacked")
            except (requests.JSONDecodeError, RecursionError):
                error = WebError(0, url, "the answer is no JSON, or not whole")
            except requests.RequestException as wrong:  # a malformed address, too many redirects
                raise WebError(0, url, f"it cannot be asked ({type(wrong).__name__})") from None
            if attempt == self._retries or (pause or 0.0) > LONGEST_WAIT:
                raise error from None  # the library's own words hold the address with its query
            self._sleep(pause, attempt, error)
        raise AssertionError("a loop of at least one turn")

    def _take_turn(self) -> None:
        with self._lock:
            self.requests += 1
            start = max(time.monotonic(), self._next)
            self._next = start + self._interval
        time.sleep(max(0.0, start - time.monotonic()))

    def _sleep(self, pause: float | None, attempt: int, error: WebError) -> None:
        seconds = pause if pause is not None else random.uniform(0.0, min(60.0, self._backoff * 2**attempt))
        if seconds > LONG_WAIT:
            until = datetime.fromtimestamp(time.time() + seconds)
            self._tell(f"waiting {seconds:.0f} s, until {until:%H:%M:%S}, as {error}")
        time.sleep(seconds)

    @property
    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):  # a session is not made for several threads
            self._local.session = _Session()
        session: requests.Session = self._local.session
        return session


class _Session(requests.Session):
    """Keeps secrets with the server they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request  # else a password in ~/.netrc would replace the header given here

    def rebuild_auth(self, prepared_request: Any, response: Any) -> None:
        if self.should_strip_auth(response.request.url, prepared_request.url):
            for name in [name for name in prepared_request.headers if _SECRET_HEADER.search(name)]:
                del prepared_request.headers[name]


def _json(response: requests.Response) -> Any:
    """The JSON of an answer; a refusal may come without, an answer may not."""
    if response.status_code in (204, 304):
        return None
    try:
        return response.json()
    except (requests.JSONDecodeError, RecursionError):
        if response.status_code < 300:
            raise
        return None


def _words(response: requests.Response, headers: Mapping[str, str]) -> str:
    """What the server says of a refusal, shortened, without what the headers hold."""
    words = " ".join((response.text or response.reason or "").split())
    for name, value in headers.items():
        if _SECRET_HEADER.search(name):
            for secret in sorted({value, *value.split()}, key=len, reverse=True):
                words = words.replace(secret, "***") if len(secret) > 7 else words
    return words if len(words) < 300 else words[:300] + "…"


def _without_secrets(url: str) -> str:
    """The address without user, password, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
