"""An HTTP server on 127.0.0.1 whose answers are a function of the request."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Reply:
    """An answer: bytes as they are, other bodies as JSON. `cut`: close the connection after this many bytes of the body."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None


@dataclass
class Request:
    """A request; the names of headers are in lower case."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class FakeServer:
    """Answers with `reply(request)` and records the requests. A context manager."""

    def __init__(self, reply: Callable[[Request], Reply]) -> None:
        self.requests: list[Request] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                parts, length = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
                query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(parts.path, query, headers, self.rfile.read(length))
                server.requests.append(request)
                answer = reply(request)
                body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(body)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body[: answer.cut])

            do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Writer(FakeServer):
    """A chat server that answers with `rule(message)`: a text, or a reply, by default of the type JSON."""

    def __init__(self, rule: Callable[..., str | Reply | None]) -> None:
        super().__init__(self.reply)
        self.rule, self.delay = rule, 0.0
        self.name = f"{self.url}/v1#tiny"

    def answer(self, message: str) -> str | Reply | None:
        return self.rule(message)

    def reply(self, request: Request) -> Reply:
        text = json.loads(request.body)["messages"][0]["content"]
        time.sleep(self.delay)
        answer = self.answer(text)
        headers = {"Content-Type": "application/json"}
        if isinstance(answer, Reply):
            return replace(answer, headers={**headers, **answer.headers})
        choices = [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        content = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny"}
        return Reply(content | {"choices": choices, "usage": usage}, headers=headers)
