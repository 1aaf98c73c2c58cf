"""Answers of language models to requests, within a budget; each is in a journal before it is used, so none is paid for twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import yaml
from annotated_types import Ge, Gt, Le, Lt
from journal import Journal
from pydantic.dataclasses import dataclass

from angle_llm.config import STRICT, NonNegative, Positive, PositiveFloat, SettingsError
from angle_llm.data import DataError

LOCAL = "local:"
HERE = ("localhost", "127.0.0.1", "::1")
JOURNAL_FIELDS = ("key", "text", "finished", "read_tokens", "new_tokens")
OVERHEAD_TOKENS = 64  # of a chat template around a message
SHORTEST_SECRET = 8  # a shorter key is a word for a server that accepts any


@dataclass(frozen=True, config=STRICT)
class GeneratorSettings:
    """Which language models write, and how."""

    generator: tuple[str, ...] = ()
    """local:MODEL (a folder, a .gguf file, a hub id, package:NAME/path), run with transformers; or URL#MODEL, such as
    http://127.0.0.1:8000/v1#MODEL, a server with OpenAI's chat completions API. Several: all of them write."""
    seed: int = 42
    """Determines the seed of each request."""
    max_new_tokens: Positive = 128
    """Maximum tokens of an answer; the last line of an answer that is cut off is dropped."""
    temperature: Annotated[float, Ge(0), Lt(10)] = 0.7
    """0: always the most likely token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 0.9
    """Sample from the fewest tokens that have this probability together."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of a local model."""
    device: str | None = None
    """Device of a local model and the judge, such as cpu or cuda:0. None: a GPU if there is one."""
    batch_size: Positive = 32
    """Requests that a local model answers together."""
    concurrency: Positive = 4
    """Requests that a server answers at the same time."""
    retries: NonNegative = 5
    """Repetitions of a request that a server could not answer, after growing waits or as long as the server demands."""
    timeout: PositiveFloat = 120.0
    """Seconds to wait for an answer of a server."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key of a server. The key is sent by https or to this machine only, and never written."""
    body: dict[str, str] = field(default_factory=dict)
    """Further fields of requests to a server, values as YAML; null removes one, such as seed null."""
    max_requests: NonNegative | None = None
    """Send at most this many requests, those of earlier runs of the same settings included."""
    max_tokens: NonNegative | None = None
    """Spend at most this many tokens of messages and answers, those of earlier runs of the same settings included."""
    max_failures: Positive = 20
    """Stop after this many failed requests in a row."""


class Request(NamedTuple):
    """A message to a generator; answers to requests with the same key are interchangeable."""

    row: int
    text: str
    side: str
    generator: str
    message: str
    seed: int
    key: str


class Answer(NamedTuple):
    """The text of an answer, or the reason of a failure."""

    text: str = ""
    finished: bool = True
    """False: cut off at the maximum of tokens."""
    read_tokens: int = 0
    new_tokens: int = 0
    failure: str = ""
    fatal: bool = False
    """No other request can succeed."""


def make_request(settings: GeneratorSettings, name: str, row: int, text: str, side: str, message: str) -> Request:
    """A request with its own seed and its key."""
    seed = int.from_bytes(_digest([settings.seed, row, side])[:4], "big") >> 1  # servers take 31 bits
    how = settings.dtype if name.startswith(LOCAL) else settings.body
    sampling = [settings.max_new_tokens, settings.temperature, settings.top_p, how]
    return Request(row, text, side, name, message, seed, _digest([name, sampling, message, seed]).hex()[:24])


def _digest(values: object) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


class Answers:
    """Answers of earlier runs in a journal, and those of this run."""

    def __init__(self, journal: Journal, settings: GeneratorSettings, requests: Sequence[Request]) -> None:
        self._journal, self._settings = journal, settings
        self.by_key, self.failures = dict[str, Answer](), dict[str, str]()
        for number, row in enumerate(journal.rows, 1):
            if tuple(row) != JOURNAL_FIELDS:
                raise DataError(f"{journal.path}:{number}: expected an answer, got {str(row)[:80]}; remove this line")
            self.by_key.setdefault(row["key"], Answer(*list(row.values())[1:]))
        known = [self.by_key[request.key] for request in requests if request.key in self.by_key]
        self.requests, self.tokens = len(known), sum(answer.read_tokens + answer.new_tokens for answer in known)

    def _affordable(self, requests: Sequence[Request]) -> list[Request]:
        """The first requests within the budget, if each takes all tokens it can: one for each byte of its message."""
        limits, chosen, tokens = self._settings, list[Request](), self.tokens
        for request in requests:
            tokens += len(request.message.encode()) + OVERHEAD_TOKENS + limits.max_new_tokens
            if limits.max_requests is not None and self.requests + len(chosen) >= limits.max_requests:
                break
            if limits.max_tokens is not None and tokens > limits.max_tokens:
                break
            chosen.append(request)
        return chosen

    def collect(
        self, requests: Sequence[Request], generator: LocalModel | ChatServer, progress: Callable[[int], object]
    ) -> None:
        """Send the requests without an answer, batch by batch, until the budget is used up.

        Raises:
            DataError: if the server refuses all requests, or too many in a row fail.
        """
        in_a_row = 0
        for start in range(0, len(requests), generator.batch_size):
            batch = requests[start : start + generator.batch_size]
            while missing := [each for each in batch if each.key not in self.by_key and each.key not in self.failures]:
                affordable = self._affordable(missing)
                if not affordable or (generator.whole_batches and len(affordable) < len(missing)):
                    return
                with closing(generator.answer(batch if generator.whole_batches else affordable)) as answered:
                    for request, answer in answered:
                        if request.key not in self.by_key:
                            self._note(request, answer)
                            progress(0 if answer.failure else 1)
                            in_a_row = in_a_row + 1 if answer.failure and not generator.whole_batches else 0
                        if answer.fatal or in_a_row >= self._settings.max_failures:
                            raise DataError(f"{generator.name}: {answer.failure}. Run the same command again to resume")

    def _note(self, request: Request, answer: Answer) -> None:
        self.requests += 1
        self.tokens += answer.read_tokens + answer.new_tokens
        if answer.failure:
            self.failures[request.key] = answer.failure
        else:
            self._journal.append([dict(zip(JOURNAL_FIELDS, (request.key, *answer), strict=False))])
            self.by_key[request.key] = answer


class LocalModel:
    """A causal language model, run with transformers. The same batch always gets the same answers."""

    whole_batches = True  # an answer depends on the others of its batch

    def __init__(self, name: str, settings: GeneratorSettings) -> None:
        self.name, self.batch_size, self._settings = name, settings.batch_size, settings
        self._model: Any = None

    def _open(self) -> None:
        """On the first request: with all answers in the journal, no model is loaded."""
        import torch
        from transformers import GenerationConfig

        from angle_llm.model.backbone import load_tokenizer, locate, open_pretrained

        location = locate(self.name.removeprefix(LOCAL))
        self._tokenizer = load_tokenizer(location)
        model = open_pretrained("AutoModelForCausalLM", location, dtype=self._settings.dtype).eval()
        self._model = model.to(self._settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        ends = model.generation_config.eos_token_id
        ends = self._tokenizer.eos_token_id if ends is None else ends
        self._ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # without penalties and beams of the model's file

    def answer(self, batch: Sequence[Request]) -> Generator[tuple[Request, Answer], None, None]:
        """Answers to a batch, sampled together."""
        import torch
        from transformers import GenerationConfig

        if self._model is None:
            self._open()
        new, rows = self._settings.max_new_tokens, dict[Request, list[int]]()
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or 10**9
        for request in batch:
            rows[request] = message_ids(self._tokenizer, request.message)
            if len(rows[request]) + new > positions:
                needed = len(rows.pop(request)) + new
                yield request, Answer(failure=f"message and answer need {needed} positions, the model has {positions}")
        if not rows:
            return
        longest, pad = max(map(len, rows.values())), (self._ends or [0])[0]
        ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in rows.values()])
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows.values()])
        how: dict[str, Any] = {"max_new_tokens": new, "pad_token_id": pad, "eos_token_id": self._ends or None}
        if self._settings.temperature:
            how |= {
                "temperature": self._settings.temperature,
                "top_p": self._settings.top_p,
                "top_k": 0,
                "do_sample": True,
            }
        config = GenerationConfig(**how)  # type: ignore[no-untyped-call]
        torch.manual_seed(int.from_bytes(_digest([request.key for request in rows])[:4], "big"))
        with torch.inference_mode():
            out_BT = self._model.generate(
                input_ids=ids_BT.to(self._model.device),
                attention_mask=mask_BT.to(self._model.device),
                generation_config=config,
            )
        for (request, ids), out in zip(rows.items(), out_BT[:, longest:].tolist(), strict=True):
            end = next((place for place, token in enumerate(out) if token in self._ends), None)
            text = self._tokenizer.decode(out[:end], skip_special_tokens=True)
            yield request, Answer(text, end is not None, len(ids), len(out) if end is None else end + 1)


def message_ids(tokenizer: Any, message: str) -> list[int]:
    """Token ids of a user's message in the chat template, if there is one. Names of special tokens in it are plain text."""
    from angle_llm.model.tokenizer import plain_ids

    if not tokenizer.chat_template:
        return list(tokenizer(message, split_special_tokens=True)["input_ids"])
    turn = [{"role": "user", "content": "TEXT"}]
    head, _, tail = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).rpartition("TEXT")
    before, after = tokenizer([head, tail], add_special_tokens=False)["input_ids"]
    return [*before, *plain_ids(tokenizer, [message])[0], *after]


class ChatServer:
    """A model on a server, through the `openai` client, which waits for rate limits and repeats failed requests."""

    whole_batches = False

    def __init__(self, name: str, settings: GeneratorSettings, key: str | None) -> None:
        try:
            import openai
        except ImportError:
            raise SettingsError("openai is not installed: pip install 'angle_llm[supervision]'.") from None
        url, _, self._model = name.partition("#")
        self.name, self.batch_size, self._settings = name, 8 * settings.concurrency, settings
        self._fields = {name: yaml.safe_load(value) for name, value in settings.body.items()}
        self._secret = key if key is not None and len(key) >= SHORTEST_SECRET else "\0"
        transport = openai.DefaultHttpxClient(follow_redirects=False, trust_env=urlsplit(url).hostname not in HERE)
        # Without an explicit key, the client takes one from the environment.
        limits: dict[str, Any] = {"max_retries": settings.retries, "timeout": settings.timeout}
        self._client = openai.OpenAI(base_url=url, api_key=key or "none", http_client=transport, **limits)
        self._error = openai.OpenAIError

    def answer(self, batch: Sequence[Request]) -> Generator[tuple[Request, Answer], None, None]:
        """Answers in the order in which the server completes them."""
        pool = ThreadPoolExecutor(self._settings.concurrency)
        try:
            futures = {pool.submit(self._answer, request): request for request in batch}
            yield from ((futures[future], future.result()) for future in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)

    def _answer(self, request: Request) -> Answer:
        sampling = {name: getattr(self._settings, name) for name in ("temperature", "top_p")}
        sampling |= {"max_tokens": self._settings.max_new_tokens, "seed": request.seed, **self._fields}
        body: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        try:
            completion = self._client.chat.completions.create(
                model=self._model, messages=[{"role": "user", "content": request.message}], extra_body=body
            )
        except (self._error, ValueError) as error:
            fatal = getattr(error, "status_code", 0) in (401, 403, 404)
            hint = f". Check address, model, and the key in {self._settings.api_key_variable}" if fatal else ""
            problem = "not a chat completion: " if isinstance(error, ValueError) else ""
            return Answer(failure=f"{problem}{self._safe(str(error))[:300]}{hint}", fatal=fatal)
        usage = getattr(completion, "usage", None)
        read, new = (getattr(usage, name, None) or 0 for name in ("prompt_tokens", "completion_tokens"))
        try:
            choice = completion.choices[0]
            text = self._safe(str(choice.message.content or "").encode(errors="replace").decode())
        except (AttributeError, IndexError, TypeError):
            text = ""
        if not text:  # paid for, even so
            return Answer(failure="the answer is not a chat completion with a text", read_tokens=read, new_tokens=new)
        finished = choice.finish_reason not in ("length", "content_filter")
        # Estimates for a server that does not count: four characters for a token.
        return Answer(text, finished, read or len(request.message) // 4 + 1, new or len(text) // 4 + 1)

    def _safe(self, text: str) -> str:
        return text.replace(self._secret, "***")


def open_generator(name: str, settings: GeneratorSettings) -> LocalModel | ChatServer:
    """The generator that the user named.

    Raises:
        SettingsError: for an address that is not one, or a key that would be sent unencrypted or to several hosts.
    """
    if name.startswith(LOCAL):
        return LocalModel(name, settings)
    variable, parts = settings.api_key_variable, urlsplit(name)
    key = os.environ.get(variable, "").strip() or None
    if "@" in parts.netloc or parts.query:
        raise SettingsError(f"--generator: an address cannot have a password or a query; set {variable} instead.")
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.fragment:
        raise SettingsError(f"--generator: expected local:MODEL or http://HOST:PORT/v1#MODEL, got {name}.")
    hosts = {urlsplit(each).netloc for each in settings.generator if urlsplit(each).scheme == "https"}
    if key and parts.hostname not in HERE and (parts.scheme != "https" or len(hosts) > 1):
        named = ", ".join(sorted({parts.netloc, *hosts}))
        raise SettingsError(
            f"--generator: {variable} would be sent unencrypted or to several hosts ({named}). Use https, and one command for "
            "each host with the same --out and its own --api-key-variable; then all generators with --api-key-variable NONE."
        )
    return ChatServer(name, settings, key)
