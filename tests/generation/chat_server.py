"""A server on this machine that speaks OpenAI's chat completions, over real sockets: answers by rule, and counts."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

SENTENCES = [
    "A man is eating a piece of bread.",
    "Two dogs run over the wet grass.",
    "The company reported a large loss.",
    "Nobody came to the meeting on Friday.",
    "A woman is cutting some onions.",
    "The plane landed in the small town.",
]


class Refusal(NamedTuple):
    """An answer that is no completion."""

    status: int
    headers: Mapping[str, str] = MappingProxyType({})
    words: str = "refused"


Rule = Callable[[str, int], "str | Refusal"]
"""Message, and how often it came before → what to say."""


def usual(message: str, times: int) -> str:
    """Two sentences of a length like the source's, different on each side, the first of a size that is asked for."""
    source = message.partition("Input sentence: ")[2].partition(". Output:")[0]
    words = source.split()
    same = "same-meaning" in message
    first = " ".join(["Once", *words[1:]]) if same else " ".join(["Never", *words[1:]])
    second = " ".join([*words, "today"]) if same else " ".join([*words, "tomorrow"])
    return f"Sure! Here are 2:\n1. {first}.\n2. {second}."


class ChatServer:
    """What it was asked."""

    def __init__(self, rule: Rule, seconds: float) -> None:
        self.rule = rule
        self.seconds = seconds
        self.messages: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.times: list[float] = []
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.address = ""

    def respond(self, body: dict[str, Any], key: str | None) -> "str | Refusal":
        message = body["messages"][0]["content"]
        with self.lock:
            times = self.messages[message]
            self.messages[message] += 1
            self.bodies.append(body)
            self.keys.add(key)
            self.times.append(time.monotonic())
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        with self.lock:
            self.at_once -= 1
        return self.rule(message, times)


@contextmanager
def chat_server(rule: Rule = usual, *, seconds: float = 0.0) -> Iterator[ChatServer]:
    """A server while the block runs; each answer takes `seconds`."""
    state = ChatServer(rule, seconds)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = state.respond(body, self.headers.get("Authorization"))
            if isinstance(said, Refusal):
                self._send(said.status, said.headers, {"error": {"message": said.words}})
                return
            choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 100, "completion_tokens": 20}
            self._send(200, {}, {"object": "chat.completion", "choices": [choice], "usage": usage})

        def _send(self, status: int, headers: Mapping[str, str], content: object) -> None:
            sent = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(sent)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_port}/v1#tiny"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
