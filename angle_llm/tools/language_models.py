"""Collect answers of language models within a budget. A journal keeps every answer, so that no request is paid for twice."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from angle_llm.data import DataError
from angle_llm.settings.commands import LanguageModelSettings
from angle_llm.settings.parsing import SettingsError, need_library
from angle_llm.tools.journal import Journal

LOCAL = "local:"
"""Prefix of the name of a local model."""
LOCALHOST = ("localhost", "127.0.0.1", "::1")
OVERHEAD_TOKENS = 64
"""Upper bound of the tokens that a chat template adds to a message."""
MIN_SECRET = 8
"""Length from which on an API key is a secret. A shorter key is a placeholder for a server that accepts any key."""
TIMEOUT = 120.0
"""Seconds to wait for an answer of a server."""
MAX_FAILURES = 20
"""Number of consecutive failed requests after which the program stops."""


class LlmRequest(NamedTuple):
    """A message to a language model. Requests with the same key have the same answer."""

    row: int
    """Index of the source text."""
    text: str
    """The source text: a sentence or a passage."""
    kind: str
    """Kind of the requested texts, such as synonym (a sentence with the same meaning) or keyword (a query)."""
    llm: str
    """Name of the language model."""
    message: str
    seed: int
    key: str


class Answer(NamedTuple):
    """The answer of a language model: its text, or the reason of a failed request."""

    text: str = ""
    finished: bool = True
    """False: the answer was cut off at the maximum number of tokens."""
    read_tokens: int = 0
    new_tokens: int = 0
    failure: str = ""


Answered = list[tuple[LlmRequest, Answer]]


def make_request(
    settings: LanguageModelSettings, name: str, row: int, text: str, kind: str, message: str
) -> LlmRequest:
    """Make a request to a language model.

    The seed is derived from row and kind, the key from everything that changes the answer.
    """
    seed = int.from_bytes(_digest([settings.seed, row, kind])[:4], "big") >> 1  # servers take 31 bits
    how: object = settings.dtype if name.startswith(LOCAL) else {}  # {}: keys of older journals stay valid
    sampling = [settings.max_new_tokens, settings.temperature, settings.top_p, how]
    return LlmRequest(row, text, kind, name, message, seed, _digest([name, sampling, message, seed]).hex()[:24])


def _digest(values: object) -> bytes:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


class Answers:
    """Answers to requests: the answers in the journal and new answers, failures of this run, and the cost of all runs."""

    def __init__(self, journal: Journal, settings: LanguageModelSettings, requests: Sequence[LlmRequest]) -> None:
        self._journal, self._settings = journal, settings
        self.by_key, self.failures = dict[str, Answer](), dict[str, str]()
        keys = {request.key for request in requests}
        charged = list[Answer]()
        for number, row in enumerate(journal.rows, 1):
            try:
                self.by_key |= {key: Answer(*values) for key, *values in row["answers"]}
                charged += [Answer(*values) for key, *values in row.get("charged", []) if key in keys]
            except (KeyError, TypeError, ValueError):
                raise DataError(
                    f"{journal.path}:{number}: expected an answer, got {str(row)[:80]}. Remove this line"
                ) from None
        known = [self.by_key[request.key] for request in requests if request.key in self.by_key]
        self.requests = len(known)
        self.cost = sum(settings.prices.cost(answer.read_tokens, answer.new_tokens) for answer in (*known, *charged))

    def collect(
        self, requests: Sequence[LlmRequest], llm: LocalModel | ChatServer, progress: Callable[[int], object]
    ) -> None:
        """Send the requests that have no answer yet, until the budget is used up.

        `progress` is called with the number of new answers.

        Raises:
            DataError: if the server refuses a request, or too many consecutive requests fail.
        """
        for start in range(0, len(requests), llm.batch_size):
            batch = requests[start : start + llm.batch_size]
            while missing := [
                request for request in batch if request.key not in self.by_key and request.key not in self.failures
            ]:
                affordable = self._affordable(missing)
                if not affordable:
                    return
                for answered in llm.answer(affordable):
                    self._record(answered)
                    progress(sum(not answer.failure for _, answer in answered))

    def _affordable(self, requests: Sequence[LlmRequest]) -> Sequence[LlmRequest]:
        """Return the first requests that the budget allows, at the largest possible cost of each request.

        A message has at most one token per byte; an answer at most `max_new_tokens` tokens.
        """
        limits, cost = self._settings, self.cost
        most = math.inf if limits.max_requests is None else limits.max_requests - self.requests
        for count, request in enumerate(requests):
            cost += limits.prices.cost(len(request.message.encode()) + OVERHEAD_TOKENS, limits.max_new_tokens)
            if count >= most or (limits.max_cost is not None and cost > limits.max_cost):
                return requests[:count]
        return requests

    def _record(self, answered: Answered) -> None:
        """Write answers, and failures with a cost, to the journal; count requests and cost."""
        rows = [[request.key, *answer[:-1]] for request, answer in answered if not answer.failure]
        charged = [[request.key, *answer] for request, answer in answered if answer.failure and any(answer[2:4])]
        if rows or charged:
            self._journal.append({"answers": rows} | ({"charged": charged} if charged else {}))
        for request, answer in answered:
            self.requests += 1
            self.cost += self._settings.prices.cost(answer.read_tokens, answer.new_tokens)
            if answer.failure:
                self.failures[request.key] = answer.failure
            else:
                self.by_key[request.key] = answer

    def report(self, requests: Sequence[LlmRequest], lines: Iterable[tuple[LlmRequest, str | None]]) -> dict[str, Any]:
        """Return the numbers of requests, failures, tokens and lines of answers, and the cost, for a report file.

        `lines` are the lines of the answers: the request, and the reason why the line is dropped, None for a kept line.
        They are counted by kind of the request, language model and reason.
        """
        counts: dict[str, Counter[str]] = {f"{request.kind} by {request.llm}": Counter() for request in requests}
        for request, dropped in lines:
            counts[f"{request.kind} by {request.llm}"][dropped or "kept"] += 1
        answered = [self.by_key[request.key] for request in requests if request.key in self.by_key]
        sent = {"answered": len(answered), "failed": len(self.failures)}
        return {
            "requests": sent | {"not sent": len(requests) - sum(sent.values())},
            "failures": dict(Counter(self.failures.values()).most_common(10)),
            "tokens read": sum(answer.read_tokens for answer in answered),
            "tokens written": sum(answer.new_tokens for answer in answered),
            "cost": round(self.cost, 6),
            "lines": counts,
        }


class LocalModel:
    """A causal language model, run with transformers. The same batch of requests always gets the same answers."""

    def __init__(self, name: str, settings: LanguageModelSettings) -> None:
        self.name, self._settings = name, settings
        self.batch_size = 8 * settings.batch_size  # sorted by length, and answered in batches of settings.batch_size

    @cached_property
    def _loaded(self) -> tuple[Any, Any, list[int]]:
        """Model, tokenizer, and token ids that end an answer; loaded on first use."""
        import torch
        from transformers import GenerationConfig

        from angle_llm.model.source.backbone import load_tokenizer, open_pretrained
        from angle_llm.model.source.resolve import locate

        settings = self._settings
        location = locate(self.name.removeprefix(LOCAL))
        tokenizer = load_tokenizer(location)
        model = open_pretrained("AutoModelForCausalLM", location, dtype=settings.dtype).eval()
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        how: dict[str, Any] = {"pad_token_id": (ends or [0])[0], "eos_token_id": ends or None}
        if settings.temperature:
            how |= {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
        # Replaces the generation config of the model, which can contain penalties and beams.
        model.generation_config = GenerationConfig(max_new_tokens=settings.max_new_tokens, **how)  # type: ignore[no-untyped-call]
        return model.to(settings.device or ("cuda" if torch.cuda.is_available() else "cpu")), tokenizer, ends

    def answer(self, batch: Sequence[LlmRequest]) -> Iterator[Answered]:
        """Generate the answers to requests, in batches of similar length, and yield the answers of each batch."""
        from angle_llm.model.source.tokenizer import count_positions

        model, tokenizer, _ = self._loaded
        positions = count_positions(model) or math.inf
        rows = sorted(
            ((request, message_ids(tokenizer, request.message)) for request in batch), key=lambda row: len(row[1])
        )
        most = positions - self._settings.max_new_tokens
        problem = f"message and answer need {{}} positions, the model has {positions}"
        if failed := [row for row in rows if len(row[1]) > most]:
            yield [
                (request, Answer(failure=problem.format(len(ids) + self._settings.max_new_tokens)))
                for request, ids in failed
            ]
        fitting = rows[: len(rows) - len(failed)]
        for start in range(0, len(fitting), self._settings.batch_size):
            yield self._generate(dict(fitting[start : start + self._settings.batch_size]))

    def _generate(self, rows: dict[LlmRequest, list[int]]) -> Answered:
        """Return the answers to a batch of requests with their token ids."""
        import torch

        model, tokenizer, ends = self._loaded
        longest = max(map(len, rows.values()))
        pad = model.generation_config.pad_token_id
        ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in rows.values()], device=model.device)
        lengths_B1 = torch.tensor([[len(ids)] for ids in rows.values()], device=model.device)
        mask_BT = (torch.arange(longest, device=model.device) >= longest - lengths_B1).long()
        torch.manual_seed(int.from_bytes(_digest([request.key for request in rows])[:4], "big"))
        with torch.inference_mode():
            out_BT = model.generate(input_ids=ids_BT, attention_mask=mask_BT)[:, longest:].tolist()
        answered = []
        for (request, ids), out in zip(rows.items(), out_BT, strict=True):
            end = next((position for position, token in enumerate(out) if token in ends), None)
            text = tokenizer.decode(out[:end], skip_special_tokens=True)
            new_tokens = len(out) if end is None else end + 1
            answer = Answer(text=text, finished=end is not None, read_tokens=len(ids), new_tokens=new_tokens)
            answered.append((request, answer))
        return answered


def message_ids(tokenizer: Any, message: str) -> list[int]:
    """Return the token ids of a message in the chat template, if the tokenizer has a template.

    Names of special tokens in the message are tokenized as plain text.
    """
    from angle_llm.model.source.tokenizer import plain_ids

    if not tokenizer.chat_template:
        return list(tokenizer(message, split_special_tokens=True)["input_ids"])
    turn = [{"role": "user", "content": "TEXT"}]
    head, _, tail = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).rpartition("TEXT")
    before, after = tokenizer([head, tail], add_special_tokens=False)["input_ids"]
    return [*before, *plain_ids(tokenizer, [message])[0], *after]


class ChatServer:
    """A language model on a server. The `openai` client waits for rate limits and repeats failed requests.

    Raises:
        SettingsError: if the address is malformed, or the key would be sent unencrypted or to several hosts.
    """

    def __init__(self, name: str, settings: LanguageModelSettings) -> None:
        variable = settings.api_key_variable
        parts = urlsplit(name)
        key = os.environ.get(variable, "").strip()
        if "@" in parts.netloc or parts.query:
            raise SettingsError(f"--llm: an address cannot have a password or a query; set {variable} instead.")
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.fragment:
            raise SettingsError(f"--llm: expected local:MODEL or http://HOST:PORT/v1#MODEL, got {name}.")
        hosts = {urlsplit(address).netloc for address in settings.llm if urlsplit(address).scheme == "https"}
        if key and parts.hostname not in LOCALHOST and (parts.scheme != "https" or len(hosts) > 1):
            raise SettingsError(
                f"--llm: {variable} would be sent unencrypted or to several hosts "
                f"({', '.join(sorted({parts.netloc, *hosts}))}). Use https, and one command for each host with the same --out "
                "and its own --api-key-variable; then all models with --api-key-variable NONE."
            )
        need_library("openai", "a language model on a server", "questions")
        import openai

        self.name = name
        self.batch_size = 8 * settings.concurrency
        self._settings = settings
        self._secret = key if len(key) >= MIN_SECRET else "\0"
        local = parts.hostname in LOCALHOST
        # Without idle connections, nothing has to be closed; other hosts would need a TLS handshake per request.
        connections: dict[str, Any] = {"limits": httpx.Limits(max_keepalive_connections=0)} if local else {}
        self._client = openai.OpenAI(
            base_url=name.partition("#")[0],
            api_key=key or "none",  # an empty key would be replaced by OPENAI_API_KEY
            max_retries=settings.retries,
            timeout=TIMEOUT,
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False,
                trust_env=not local,
                **connections,
            ),
        )
        self._error = openai.OpenAIError
        self._model = parts.fragment
        self._failed = 0
        self._pace = threading.Lock()
        self._next_request = 0.0

    def answer(self, batch: Sequence[LlmRequest]) -> Iterator[Answered]:
        """Send a batch of requests, and yield each answer in a list, in the order of their completion."""
        most = self._settings.concurrency
        left = iter(batch)
        futures = dict[Future[Answer], LlmRequest]()
        pool = ThreadPoolExecutor(most)
        try:
            # A request is sent only after an earlier answer is in the journal: a kill loses at most `concurrency`
            # answers.
            for _ in batch:
                futures |= {
                    pool.submit(self._answer, request): request for request in islice(left, most - len(futures))
                }
                future = next(as_completed(futures))
                request, answer = futures.pop(future), future.result()
                yield [(request, answer)]
                self._failed = self._failed + 1 if answer.failure else 0
                if self._failed >= MAX_FAILURES:
                    raise DataError(f"{self.name}: {answer.failure}. Run the same command again to resume")
        finally:
            pool.shutdown(cancel_futures=True)

    def _answer(self, request: LlmRequest) -> Answer:
        """Send a request, at most `requests_per_minute`, and return its answer or failure."""
        settings = self._settings
        with self._pace:
            time.sleep(max(0.0, self._next_request - time.monotonic()))
            self._next_request = time.monotonic() + 60 / (settings.requests_per_minute or math.inf)
        body: dict[str, Any] = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": request.seed}
        body |= {"max_tokens": settings.max_new_tokens}
        try:
            completion: Any = self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": request.message}],
                extra_body=body,
            )
        except (self._error, ValueError) as error:
            problem = self._safe(str(error))[:300]
            if getattr(error, "status_code", 0) in (401, 403, 404):
                hint = f"Check address, model, and the key in {settings.api_key_variable}"
                raise DataError(f"{self.name}: {problem}. {hint}. Run the same command again to resume") from None
            return Answer(failure=f"not a chat completion: {problem}" if isinstance(error, ValueError) else problem)
        usage = getattr(completion, "usage", None)
        read, new = (getattr(usage, name, None) or 0 for name in ("prompt_tokens", "completion_tokens"))
        try:
            choice = completion.choices[0]
            text = self._safe(str(choice.message.content or "").encode(errors="replace").decode())
        except (AttributeError, IndexError, TypeError):
            text = ""
        if not text:  # the server charges for it, so the tokens are counted
            return Answer("", True, read, new, "the answer is not a chat completion with a text")
        finished = choice.finish_reason not in ("length", "content_filter")
        # If the server does not count tokens, four characters are estimated as a token.
        return Answer(text, finished, read or len(request.message) // 4 + 1, new or len(text) // 4 + 1)

    def _safe(self, text: str) -> str:
        """Return a text without the key of the server."""
        return text.replace(self._secret, "***")


def open_language_model(name: str, settings: LanguageModelSettings) -> LocalModel | ChatServer:
    """Return the language model with the name given as --llm."""
    return LocalModel(name, settings) if name.startswith(LOCAL) else ChatServer(name, settings)
