"""Servers on 127.0.0.1 for tests: an application in a thread, and a small wrong server over transformers."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoModel, AutoTokenizer

from angle_llm.prompts import PromptTemplate


class Server(uvicorn.Server):
    """Ends as soon as `should_exit` is set; uvicorn looks ten times a second."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.002)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The URL of an application that runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        # Not `run`: it installs handlers of signals, which is possible in the main thread only.
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def transformers_app(
    folder: Path,
    prompt: PromptTemplate,
    *,
    max_length: int = 100,
    masked: bool = True,
    order: Callable[[list[Any]], list[Any]] = list,
) -> FastAPI:
    """What people write: transformers behind FastAPI, `/embed` only, last-token pooling over right padding.

    Without `masked`, the last position is read, whether it is padding or not; `order` changes the order of the answer.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    app = FastAPI()

    @app.post("/embed")
    def embed(body: dict[str, Any]) -> list[Any]:
        texts = [prompt.format(text) for text in body["inputs"]]
        found = tokenizer(texts, split_special_tokens=True, truncation=True, max_length=max_length)["input_ids"]
        longest = max(map(len, found))
        padded = torch.tensor([text_ids + [0] * (longest - len(text_ids)) for text_ids in found])
        last = [len(text_ids) - 1 if masked else -1 for text_ids in found]
        with torch.no_grad():
            states = model(padded).last_hidden_state
        return order(states[torch.arange(len(found)), last].tolist())

    return app
