"""Polite HTTP for the rooms that speak to a server: JSON in, JSON out, asked again when a server is busy, and no secret told.

Nothing here runs unless a verb that names a server is run.
"""

from __future__ import annotations

import json
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
import urllib3

LONG_WAIT = 5.0
"""Seconds; a longer wait is told before it begins."""
LONGEST_WAIT = 2 * 3600.0
"""Seconds; a server that asks for more is given up."""
LARGEST = 1 << 27
"""Bytes of an answer, unpacked; the largest that are asked for here take a tenth of it."""
SLOWEST = 10
"""Times `timeout` within which an answer must be whole, from its first byte on."""
_PIECE = 1 << 16  # bytes read at once, at most
_HERE = ("localhost", "127.0.0.1", "::1")
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
_CERTIFICATE = (
    "Check the address; for a certificate of your own, name its file in the environment variable REQUESTS_CA_BUNDLE."
)


@dataclass(frozen=True)
class Answer:
    """What a server said: `headers` answer to any case, `body` is the JSON, or None where there is none."""

    status: int
    headers: Mapping[str, str]
    body: Any


class WebError(OSError):
    """A server that could not be asked, or refused; `status` is 0 when nothing whole came back."""

    def __init__(self, status: int, url: str, words: str, advice: str = "") -> None:
        usual = "Try again later." if status == 0 or status >= 500 else "Check address and settings."
        advice = advice or _ADVICE.get(status, usual)
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
        return max(0.0, (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp() - time.time())
    except (ValueError, OverflowError):  # no date, or one of a year that no calendar has
        return None


class Web:
    """Asks servers for JSON, from any number of threads.

    Asked again, up to `retries` times: after 429, 5xx, a lost connection, nothing heard for `timeout` seconds, an answer that is
    not whole within ten times that, and one that is cut or no JSON. Between, a random time up to `backoff` × 2ⁿ seconds, 60 at
    most ("full jitter"), and no less than `wait` says if the server says how long (by default Retry-After). An answer of another
    status is asked again if `wait` gives a time for it. `per_minute` spaces the requests of all threads. `tell` is called before
    waits of more than 5 seconds. An answer of more than `LARGEST` bytes, and a server whose certificate is not trusted, are given
    up at once. Servers on this machine are asked without the proxy that the environment may name.

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
                    method,
                    url,
                    headers=given,
                    timeout=self._timeout,
                    allow_redirects=method == "GET",
                    stream=True,
                    **what,
                )
                answer = Answer(response.status_code, response.headers, _json(response))
                if answer.status < 300 or answer.status == 304:
                    return answer
                pause = self._wait(answer)
                error = WebError(answer.status, url, _words(response, given))
                if pause is None and answer.status != 429 and answer.status < 500:
                    raise error
            except _TooLargeError:
                raise WebError(0, url, f"the answer has more than {LARGEST:,} bytes", "Check the address.") from None
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as lost:
                if "CERTIFICATE_VERIFY_FAILED" in str(lost):
                    raise WebError(0, url, "its certificate is not trusted", _CERTIFICATE) from None
                error = WebError(0, url, _lost(lost, self._timeout))
            except requests.exceptions.ContentDecodingError:
                error = WebError(0, url, "the answer cannot be unpacked")
            except _NoJSONError:
                error = WebError(0, url, "the answer is no JSON, or not whole")
            except (requests.RequestException, ValueError) as wrong:  # a malformed address, too many redirects
                raise WebError(0, url, f"it cannot be asked ({type(wrong).__name__})", "Check the address.") from None
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
        seconds = max(pause or 0.0, random.uniform(0.0, min(60.0, self._backoff * 2**attempt)))
        if seconds > LONG_WAIT:
            until = datetime.fromtimestamp(time.time() + seconds)
            self._tell(f"waiting {seconds:.0f} s, until {until:%H:%M:%S}, as {error}")
        time.sleep(seconds)

    @property
    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):  # a session is not made for several threads
            self._local.session = _Session(self._timeout * SLOWEST)
        session: requests.Session = self._local.session
        return session


class _Session(requests.Session):
    """Keeps secrets with the server they are for, and reads answers with bounds: `longest` seconds, `LARGEST` bytes."""

    def __init__(self, longest: float) -> None:
        super().__init__()
        self.auth = lambda request: request  # else a password in ~/.netrc would replace the header given here
        self.hooks["response"].append(lambda response, **_: _read_whole(response, longest))  # of redirects too

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        merged = super().merge_environment_settings(url, proxies, stream, verify, cert)
        return {**merged, "proxies": {}} if _is_here(url) else merged

    def rebuild_proxies(self, prepared_request: Any, proxies: Any) -> Any:
        return {} if _is_here(prepared_request.url) else super().rebuild_proxies(prepared_request, proxies)

    def rebuild_auth(self, prepared_request: Any, response: Any) -> None:
        if self.should_strip_auth(response.request.url, prepared_request.url):
            for name in [name for name in prepared_request.headers if _SECRET_HEADER.search(name)]:
                del prepared_request.headers[name]


class _TooLargeError(Exception):
    """An answer of more bytes than are taken."""


class _NoJSONError(Exception):
    """An answer that should be JSON and is none."""


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in _HERE


def _read_whole(response: requests.Response, longest: float) -> None:
    """Reads the body, so that the library finds it read. Each read takes what is there: a server that drips is noticed."""
    deadline, pieces, size = time.monotonic() + longest, list[bytes](), 0
    try:
        while piece := response.raw.read1(_PIECE, decode_content=True):
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST:
                raise _TooLargeError
            if time.monotonic() > deadline:
                raise _SlowError(f"not whole within {longest:g} s")
    except urllib3.exceptions.ReadTimeoutError as error:
        raise requests.ReadTimeout(error) from error
    except urllib3.exceptions.DecodeError as error:
        raise requests.exceptions.ContentDecodingError(error) from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.exceptions.ChunkedEncodingError(error) from error
    finally:
        response.close()
    response._content, response._content_consumed = b"".join(pieces), True


class _SlowError(requests.Timeout):
    """An answer that comes, and does not come to an end."""


def _lost(error: requests.RequestException, timeout: float) -> str:
    if isinstance(error, _SlowError):
        return f"the answer was {error}"
    if isinstance(error, requests.Timeout):
        return f"no answer in {timeout:g} s"
    secure = isinstance(error, requests.exceptions.SSLError)
    return "no secure connection" if secure else "no connection, or it broke off"


def _json(response: requests.Response) -> Any:
    """The JSON of an answer; a refusal may come without, an answer may not."""
    if response.status_code in (204, 304):
        return None
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):  # ValueError also for a number of thousands of digits
        if response.status_code < 300:
            raise _NoJSONError from None
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
    """The address, which may be none, without user, password, query and fragment."""
    return re.sub(r"//[^/]*@", "//", re.split(r"[?#]", url, maxsplit=1)[0])
