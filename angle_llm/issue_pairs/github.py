"""GitHub's REST API, page by page, each page kept on disk: what is there is not asked for again.

A page lies in a file of its own, written whole or not at all, with its ETag and the addresses in its Link header. With
`refresh` a kept page is asked for with If-None-Match, and an answer of 304 costs none of the hourly requests. Kept are the
fields that are used here, no more: `KEPT`; pages that were kept with other fields are asked for anew.

The primary limit (X-RateLimit-Remaining, -Reset) and the secondary ones (403 or 429 with Retry-After, or words alone) are
waited for, as the API's documentation asks; requests go one at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from angle_llm import __version__
from angle_llm.issue_pairs.records import IssueError
from angle_llm.model.checks import ArtifactError, read_json
from angle_llm.web import LONGEST_WAIT, Answer, Web, WebError, usual_wait

PER_PAGE = 100
"""The most the API gives."""
GONE = (404, 410, 451)
"""Statuses of what is not there, or no more, or withheld."""
KEPT = (
    "number", "title", "body", "state", "state_reason", "created_at", "closed_at", "labels", "user", "repository_url",
    "pull_request", "issue_url", "author_association", "event",
)  # fmt: skip
_KEPT_WITHIN = ("name", "login", "type")
_FIELDS = hashlib.sha256(repr((KEPT, _KEPT_WITHIN)).encode()).hexdigest()[:12]
_ABANDONED = 3600.0  # seconds; a temporary file that nobody has touched for so long is of a run that was killed
_TEMPORARY = ".page."
_SECONDARY_PAUSE = 60.0  # "wait for at least one minute", where no header says how long


@dataclass(frozen=True)
class Page:
    """An answer as it is kept; `body` is None for what is not there, `fields` tells which fields were kept of it."""

    url: str
    status: int
    etag: str | None
    next: str | None
    last: str | None
    body: Any
    fields: str = ""


class GitHub:
    """Asks `api` for pages, keeps them in `folder`, and counts what it does.

    Raises from all of its methods:
        WebError: for what the server refuses (with its words), or when it cannot be reached.
        IssueError: for answers of another form than GitHub's, and when the hour's requests are spent for long.
    """

    def __init__(
        self,
        api: str,
        folder: Path,
        *,
        token: str | None,
        refresh: bool,
        per_minute: float,
        tell: Callable[[str], None],
    ) -> None:
        self._api, self._folder, self._refresh = api.rstrip("/"), folder, refresh
        headers = {
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": "2022-11-28",
            "User-Agent": f"angle-llm/{__version__}",
        }
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._web = Web(headers=headers, per_minute=per_minute, wait=limit_wait, tell=tell)
        self._tell, self._spent_until = tell, 0.0
        self._fresh = set[str]()  # asked for in this run
        self.limit: int | None = None
        """Requests an hour, as the server last said."""
        self.not_modified = self.from_disk = 0
        self.not_there = 0
        """Listings that were taken as empty, as they are gone or withheld."""
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder, _TEMPORARY)

    @property
    def requests(self) -> int:
        """Requests sent in this run."""
        return self._web.requests

    def pages(self, path: str, **parameters: str | int) -> Iterator[Page]:
        """The pages of a listing, each as it is asked for."""
        return self._pages(path, parameters, missing_is_fine=False)

    def pages_if_there(self, path: str) -> Iterator[Page]:
        """The pages of a listing; none, and counted, for one that is not there, or no more, or withheld."""
        return self._pages(path, {}, missing_is_fine=True)

    def _pages(self, path: str, parameters: Mapping[str, str | int], missing_is_fine: bool) -> Iterator[Page]:
        url: str | None = f"{self._api}{path}?{urlencode({'per_page': PER_PAGE, **parameters})}"
        seen = set[str]()
        while url is not None:
            page = self._page(url, missing_is_fine)
            if page.body is None and page.status in GONE:
                self.not_there += 1
                return
            if not isinstance(page.body, list):
                raise IssueError(f"{page.url}: needed a list; came {str(page.body)[:100]}. Is --api GitHub's REST API?")
            yield page
            seen.add(page.url)
            if page.next in seen:
                raise IssueError(f"{page.url}: its next page is an earlier one. Is --api GitHub's REST API?")
            url = page.next

    def page(self, path: str, **parameters: str | int) -> Page:
        """One page of a listing."""
        return self._page(f"{self._api}{path}?{urlencode(parameters)}")

    def one(self, path: str) -> Any:
        """One thing; None if it is not there, or no more, or withheld."""
        return self._page(f"{self._api}{path}", missing_is_fine=True).body

    def _page(self, url: str, missing_is_fine: bool = False) -> Page:
        kept = self._read(url)
        if (
            kept is not None
            and (not self._refresh or url in self._fresh)
            and (missing_is_fine or kept.body is not None)
        ):
            self.from_disk += 1
            return kept
        # A last page that is full would be the same and no more the last.
        full = kept is not None and kept.next is None and isinstance(kept.body, list) and len(kept.body) >= PER_PAGE
        etag = {"If-None-Match": kept.etag} if kept is not None and kept.etag and not full else None
        self._rest()
        try:
            answer = self._web.get(url, headers=etag)
        except WebError as error:
            if not missing_is_fine or error.status not in GONE:
                raise
            answer = Answer(error.status, {}, None)
        self._spent_until = time.time() + (_until_reset(answer) or 0.0)
        limit = answer.headers.get("X-RateLimit-Limit", "")
        self.limit = int(limit) if re.fullmatch("[0-9]{1,9}", limit) else self.limit
        links = {name: self._own(found) for name, found in _links(answer.headers.get("Link", "")).items()}
        if answer.status == 304 and kept is not None:
            self.not_modified += 1
            page = Page(**{**asdict(kept), "next": links.get("next", kept.next), "last": links.get("last", kept.last)})
        else:
            etag_now = answer.headers.get("ETag")
            page = Page(url, answer.status, etag_now, links.get("next"), links.get("last"), _slim(answer.body), _FIELDS)
        self._write(page)
        self._fresh.add(url)
        return page

    def _rest(self) -> None:
        """Waits when the last answer said that the hour's requests are spent, so that none is refused."""
        pause = self._spent_until - time.time()
        if pause > LONGEST_WAIT:
            raise IssueError(
                f"the requests are spent, and {self._api} has new ones in {pause / 3600:,.1f} hours. Run the same command again "
                "then (what was read is kept, and not asked for again), or with a token that has requests left."
            )
        if pause > 0:
            self._tell(f"the hour's requests are spent; waiting {pause:.0f} s for new ones")
            time.sleep(pause)

    def _own(self, url: str) -> str:
        """The token goes to the server it is for."""
        try:
            parts = urlsplit(url)
        except ValueError:
            raise IssueError(f"the next page is said to be at {url[:100]!r}, which is no address.") from None
        if parts[:2] != urlsplit(self._api)[:2]:
            raise IssueError(f"the next page is said to be at {parts.netloc}, another server than {self._api}.")
        return url

    def _file(self, url: str) -> Path:
        return self._folder / f"{hashlib.sha256(url.encode()).hexdigest()[:40]}.json"

    def _read(self, url: str) -> Page | None:
        try:
            page = Page(**read_json(self._file(url)))
        except (FileNotFoundError, ArtifactError, TypeError):
            return None
        return page if (page.url, page.fields) == (url, _FIELDS) else None

    def _write(self, page: Page) -> None:
        # Half a character of a text cannot be written in UTF-8; in ASCII it can.
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(page), file)
            Path(name).replace(self._file(page.url))
        finally:
            Path(name).unlink(missing_ok=True)


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Removes the temporary files and folders of runs that were killed."""
    for path in folder.glob(f"{prefix}*"):
        try:
            if time.time() - path.lstat().st_mtime < _ABANDONED:
                continue
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError:  # another run is at it, or it is somebody else's
            continue


def limit_wait(answer: Answer) -> float | None:
    """Seconds until the API may be asked again: Retry-After, else the reset of the hourly limit, else a minute."""
    usual = usual_wait(answer)
    if usual is not None or answer.status not in (403, 429):
        return usual
    if (pause := _until_reset(answer)) is not None:
        return pause
    words = str(answer.body.get("message")) if isinstance(answer.body, Mapping) else ""
    return _SECONDARY_PAUSE if answer.status == 429 or "rate limit" in words.lower() else None


def _until_reset(answer: Answer) -> float | None:
    """Seconds until there are new requests; None if some are left."""
    reset = answer.headers.get("X-RateLimit-Reset", "")
    if answer.headers.get("X-RateLimit-Remaining") != "0" or not reset.isdecimal():
        return None
    return max(0.0, float(reset) - time.time()) + 1.0  # the server's clock is told in whole seconds


def _links(header: str) -> dict[str, str]:
    """`<https://…>; rel="next", …` → name: address."""
    return {name: url for url, name in re.findall(r'<([^<>]*)>[^<>]*?;\s*rel="?(\w+)"?', header)}


def _slim(body: Any, fields: tuple[str, ...] = KEPT) -> Any:
    if isinstance(body, list):
        return [_slim(item, fields) for item in body]
    if isinstance(body, dict):
        return {name: _slim(value, _KEPT_WITHIN) for name, value in body.items() if name in fields}
    return body
