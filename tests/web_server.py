"""A server on this machine that answers as it is told, over real sockets."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Reply:
    """What goes back. `body`: bytes as they are, anything else as JSON. `cut`: so many bytes of it, then the connection ends."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None


@dataclass
class Asked:
    """What came: headers by their names in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Server:
    """Answers with `reply(asked)`; `asked` lists what came. A context manager."""

    def __init__(self, reply: Callable[[Asked], Reply]) -> None:
        self.reply, self.asked = reply, list[Asked]()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"owner": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Server":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: Server

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        asked = Asked(self.command, parts.path, query, headers, self.rfile.read(length))
        self.owner.asked.append(asked)
        reply = self.owner.reply(asked)
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        body = b"" if reply.status in (204, 304) else body
        self.send_response(reply.status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **reply.headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if reply.cut is None else body[: reply.cut])

    do_GET = do_POST = _answer
