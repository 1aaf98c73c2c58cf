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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from angle_llm.data import DataError
from angle_llm.resumable_folder import lock_file, unlock_folder
from angle_llm.settings.commands import LanguageModelSettings
from angle_llm.settings.parsing import SettingsError, need_library

LOCAL = "local:"
"""Prefix of the name of a local model."""
LOCALHOST = ("localhost", "127.0.0.1", "::1")
OVERHEAD_TOKENS = 64
"""Upper bound of the tokens that a chat template adds to a message."""
TIMEOUT = 120.0
"""Minimum timeout of a request in seconds. The timeout is `max_new_tokens` seconds if that is more."""
MAX_FAILURES = 20
"""Number of consecutive failed requests after which the program stops."""
_NO_TEXT = "the answer has no text"


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
Row = dict[str, Any]


def make_request(
    settings: LanguageModelSettings, name: str, row: int, text: str, kind: str, message: str
) -> LlmRequest:
    """Make a request to a language model.

    The seed is derived from row and kind, the key from everything that changes the answer.
    """
    seed = int.from_bytes(_digest([settings.seed, row, kind])[:4], "big") >> 1  # servers take 31 bits
    dtype = settings.dtype if name.startswith(LOCAL) else None
    sampling = [settings.max_new_tokens, settings.temperature, settings.top_p, dtype]
    return LlmRequest(row, text, kind, name, message, seed, _digest([name, sampling, message, seed]).hex()[:24])


def _digest(values: object) -> bytes:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


class Journal:
    """An append-only JSON Lines file of results of requests, as a context manager.

    A killed program does not repeat the requests. Opening removes a row that a kill has cut off.

    Raises:
        FolderError: if another process writes to the file.
        DataError: if a line is not JSON.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = lock_file(Path(f"{path}.lock"), path)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a kill has cut off the last row
        self.rows: list[Row] = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self.rows.append(json.loads(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}. Remove this line; its content is requested again") from None
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        unlock_folder(self._lock)

    def append(self, *rows: Row) -> None:
        """Append rows to the file and to `rows`; return when they are on disk."""
        # ASCII escapes, because a text can contain a lone surrogate.
        self._file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.extend(rows)


class Answers:
    """Answers to requests: the answers in the journal and new answers, failures of this run, and the cost of all runs."""

    def __init__(self, journal: Journal, settings: LanguageModelSettings, requests: Sequence[LlmRequest]) -> None:
        self._journal, self._settings, self._requests = journal, settings, requests
        self.failures = dict[str, str]()
        self.by_key = {key: Answer(*values) for row in journal.rows for key, *values in row["answers"]}
        answered = self._answered()
        self.requests = len(answered)
        keys = {request.key for request in requests}
        failures = [(key, Answer(*values)) for row in journal.rows for key, *values in row.get("charged", ())]
        answered += [answer for key, answer in failures if key in keys]  # only failures with a cost are stored
        self.cost = sum(settings.prices.cost(answer.read_tokens, answer.new_tokens) for answer in answered)

    def collect(self, llms: Sequence[LocalModel | ChatServer], progress: Callable[[int], object]) -> None:
        """Send the requests that have no answer yet, until the budget is used up.

        `progress` is called with the number of new answers.

        Raises:
            DataError: if too many consecutive requests to a server fail.
        """
        for llm in llms:
            missing = [
                request for request in self._requests if request.llm == llm.name and request.key not in self.by_key
            ]
            for answered in llm.answer(self._within_budget(missing)):
                self._record(answered)
                progress(sum(not answer.failure for _, answer in answered))

    def _within_budget(self, requests: Iterable[LlmRequest]) -> Iterator[LlmRequest]:
        """Yield requests to send, and count their largest possible cost, until the budget is used up."""
        limits = self._settings
        for request in requests:
            cost = self._largest_cost(request)
            if limits.max_requests is not None and self.requests >= limits.max_requests:
                return
            if limits.max_cost is not None and self.cost + cost > limits.max_cost:
                return
            self.requests += 1
            self.cost += cost
            yield request

    def _largest_cost(self, request: LlmRequest) -> float:
        """Return the cost of a request with a token per byte and an answer of `max_new_tokens` tokens."""
        read_tokens = len(request.message.encode()) + OVERHEAD_TOKENS
        return self._settings.prices.cost(read_tokens, self._settings.max_new_tokens)

    def _record(self, answered: Answered) -> None:
        """Write answers and failures with a cost to the journal, and replace the largest possible cost by the cost."""
        rows = [[request.key, *answer[:-1]] for request, answer in answered if not answer.failure]
        charged = [[request.key, *answer] for request, answer in answered if answer.failure and any(answer[2:4])]
        if rows or charged:
            self._journal.append({"answers": rows} | ({"charged": charged} if charged else {}))
        for request, answer in answered:
            cost = self._settings.prices.cost(answer.read_tokens, answer.new_tokens)
            self.cost += cost - self._largest_cost(request)
            if answer.failure:
                self.failures[request.key] = answer.failure
            else:
                self.by_key[request.key] = answer

    def _answered(self) -> list[Answer]:
        """Return the answers to the requests that have an answer."""
        return [self.by_key[request.key] for request in self._requests if request.key in self.by_key]

    def report(self, lines: Iterable[tuple[str, str, str | None]]) -> dict[str, Any]:
        """Return the numbers of requests, failures, tokens and lines of answers, and the cost, for a report file.

        `lines` are the lines of the answers: kind of the request, language model, and the reason why the line is dropped,
        None for a kept line.
        """
        counts: dict[str, Counter[str]] = {f"{request.kind} by {request.llm}": Counter() for request in self._requests}
        for kind, llm, dropped in lines:
            counts[f"{kind} by {llm}"][dropped or "kept"] += 1
        answered = self._answered()
        sent = {"answered": len(answered), "failed": len(self.failures)}
        return {
            "requests": sent | {"not sent": len(self._requests) - sum(sent.values())},
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

    def answer(self, requests: Iterable[LlmRequest]) -> Iterator[Answered]:
        """Generate the answers to requests, in batches of similar length, and yield the answers of each batch."""
        ordered = sorted(requests, key=lambda request: len(request.message))
        if not ordered:
            return
        model, tokenizer = self._load()
        for start in range(0, len(ordered), self._settings.batch_size):
            yield _generate(model, tokenizer, ordered[start : start + self._settings.batch_size])

    def _load(self) -> tuple[Any, Any]:
        """Return the model, on its device, and its tokenizer."""
        import torch
        from transformers import GenerationConfig

        from angle_llm.model.source.backbone import load_tokenizer, open_pretrained
        from angle_llm.model.source.resolve import locate, split_revision

        settings = self._settings
        name, revision = split_revision(self.name.removeprefix(LOCAL))
        location = locate(name, revision)
        tokenizer = load_tokenizer(location, revision)
        tokenizer.padding_side = "left"
        model = open_pretrained("AutoModelForCausalLM", location, dtype=settings.dtype, revision=revision).eval()
        end_ids = model.generation_config.eos_token_id or tokenizer.eos_token_id
        end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(end_ids[0])
        options: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": end_ids}
        if settings.temperature:
            options |= {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
        # Replaces the generation config of the model, which can contain penalties and beams.
        model.generation_config = GenerationConfig(max_new_tokens=settings.max_new_tokens, **options)  # type: ignore[no-untyped-call]
        return model.to(settings.device or ("cuda" if torch.cuda.is_available() else "cpu")), tokenizer


def _generate(model: Any, tokenizer: Any, requests: Sequence[LlmRequest]) -> Answered:
    """Return the answers of a local model to a batch of requests."""
    import torch

    ids_of_messages = [message_ids(tokenizer, request.message) for request in requests]
    inputs = tokenizer.pad({"input_ids": ids_of_messages}, return_tensors="pt")
    # Answers, up to the first token that ends an answer.
    torch.manual_seed(int.from_bytes(_digest([request.key for request in requests])[:4], "big"))
    with torch.inference_mode():
        ids_BT = model.generate(**inputs.to(model.device))[:, inputs["input_ids"].shape[1] :]
    read_tokens_B = inputs["attention_mask"].sum(dim=1).tolist()
    answered = []
    for request, read_tokens, ids in zip(requests, read_tokens_B, ids_BT.tolist(), strict=True):
        end = next((n for n, token in enumerate(ids) if token in model.generation_config.eos_token_id), None)
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        new_tokens = len(ids) if end is None else end + 1
        failure = "" if text else _NO_TEXT
        answered.append((request, Answer(text, end is not None, read_tokens, new_tokens, failure)))
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
        need_library("openai", "a language model on a server", "questions")
        import openai

        # The address, which is written to the output.
        address = urlsplit(name)
        is_url = address.scheme in ("http", "https") and address.hostname and address.fragment
        if not is_url or "@" in address.netloc or address.query:
            raise SettingsError("--llm: expected local:MODEL, or http://HOST:PORT/v1#MODEL without password and query.")
        # The key, which is sent by https to one host, or to this machine.
        key = os.environ.get(settings.api_key_variable, "").strip()
        is_local = address.hostname in LOCALHOST
        hosts = {urlsplit(llm).netloc for llm in settings.llm if llm.startswith("https:")}
        if key and not is_local and (address.scheme == "http" or len(hosts) > 1):
            raise SettingsError(
                f"--llm: the key in {settings.api_key_variable} would be sent unencrypted or to several hosts. Use https, and "
                "a command with its own --api-key-variable for each host; or --api-key-variable NONE."
            )
        self.name = name
        self._settings = settings
        self._key = key
        self._model = address.fragment
        self._client = openai.OpenAI(
            base_url=name.partition("#")[0],
            api_key=key or "none",  # an empty key would be replaced by OPENAI_API_KEY
            max_retries=settings.retries,
            timeout=max(TIMEOUT, settings.max_new_tokens),
            http_client=openai.DefaultHttpxClient(follow_redirects=False, trust_env=not is_local),
        )
        # Errors of the client, and of malformed replies.
        self._errors = (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError)
        self._pace = threading.Lock()
        self._next_request = 0.0

    def answer(self, requests: Iterable[LlmRequest]) -> Iterator[Answered]:
        """Send requests, and yield each answer in a list, in the order of their completion.

        A request is sent when an earlier answer was taken from the iterator: a kill loses at most `concurrency` answers.
        """
        failed = 0
        waiting = iter(requests)
        with self._client, ThreadPoolExecutor(self._settings.concurrency) as pool:
            running = dict[Future[Answer], LlmRequest]()
            while True:
                for request in islice(waiting, self._settings.concurrency - len(running)):
                    running[pool.submit(self._answer, request)] = request
                if not running:
                    return
                future = next(as_completed(running))
                answer = future.result()
                yield [(running.pop(future), answer)]
                failed = failed + 1 if answer.failure else 0
                if failed >= MAX_FAILURES:
                    raise DataError(
                        f"{self.name}: {failed} requests in a row failed: {answer.failure}. Run the same command again to resume"
                    )

    def _answer(self, request: LlmRequest) -> Answer:
        """Send a request, at most `requests_per_minute`, and return its answer or failure."""
        settings = self._settings
        with self._pace:
            time.sleep(max(0.0, self._next_request - time.monotonic()))
            self._next_request = time.monotonic() + 60 / (settings.requests_per_minute or math.inf)
        try:
            completion: Any = self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": request.message}],
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=request.seed,
                max_tokens=settings.max_new_tokens,
            )
        except self._errors as error:
            return Answer(failure=self._problem(error))
        # The text, without lone surrogates, which no tokenizer reads.
        usage = getattr(completion, "usage", None)
        text, reason = "", None
        try:
            choice = completion.choices[0]
            reason = choice.finish_reason
            text = (choice.message.content or "").encode(errors="replace").decode()
            failure = "" if text else f"{_NO_TEXT} (finish reason: {reason})"
        except self._errors as error:
            failure = self._problem(error)
            if usage is None:  # such as a page of HTML
                return Answer(failure=failure)
        # The tokens, also of a failed answer, because the server charges for it.
        return Answer(
            text=text,
            finished=reason not in ("length", "content_filter"),
            read_tokens=_count(getattr(usage, "prompt_tokens", None), request.message),
            new_tokens=_count(getattr(usage, "completion_tokens", None), text),
            failure=failure,
        )

    def _problem(self, error: Exception) -> str:
        """Return the message of an error, without the key of the server."""
        return f"{type(error).__name__}: {error}".replace(self._key or "\0", "***")[:300]


def _count(tokens: object, text: str) -> int:
    """Return the number of tokens that a server counted; if it did not count, an estimate of a token per 4 bytes in UTF-8."""
    return tokens if isinstance(tokens, int) else len(text.encode()) // 4 + 1


def open_language_model(name: str, settings: LanguageModelSettings) -> LocalModel | ChatServer:
    """Return the language model with the name given as --llm."""
    return LocalModel(name, settings) if name.startswith(LOCAL) else ChatServer(name, settings)
