"""`angle-llm data generate`: its settings, and what is printed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import tyro
import yaml

from angle_llm.config import SettingsError
from angle_llm.generation.budget import Prices
from angle_llm.generation.filters import Limits
from angle_llm.generation.generators import LOCAL, Generator, Sampling
from angle_llm.generation.pairs import Ensemble
from angle_llm.generation.wording import SIDES, Side
from angle_llm.web import Web


@dataclass(frozen=True)
class GenerateSettings:
    """What `angle-llm data generate` asks for, whom, and where the pairs go.

    Answers are kept in OUT.journal.jsonl as they come: killed anywhere, the same command goes on, and makes no request twice.
    """

    sentences: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SENTENCES")]
    """UTF-8 text, one sentence a line; or .jsonl, .csv, .tsv (these also .gz) or .parquet; a folder of such files."""
    generator: tyro.conf.UseAppendAction[tuple[str, ...]]
    """Who is asked: local:MODEL (a folder, a .gguf file, a hub id, package:NAME/path), or the address of a server that speaks
    OpenAI's chat completions and the model's name there, http://127.0.0.1:8000/v1#MODEL. Given several times, all are asked."""
    out: Path
    """The file of pairs, .jsonl; OUT.report.json beside it tells what became of every line."""
    column: str | None = None
    """The column of a table that holds the sentences. None: `text`, `sentence`, or the only one."""
    limit: int | None = None
    """Use at most so many sentences; repeated ones are asked for once."""
    shuffle_seed: int | None = None
    """Take those of the limit at random, with this seed; None: the first ones."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a text that is empty or not UTF-8 does."""
    sides: tuple[Side, ...] = SIDES
    """synonym: sentences of the same meaning, score 1. antonym: of the opposite, score 0."""
    size: int = 3
    """Sentences asked for at a time, and kept at most."""
    prompt: str = "paper"
    """How it is asked: paper (AnglE's own words), plain, examples, or a YAML file of your own with `name`, `synonym` and
    `antonym`, each with {size} and {text} once."""
    seed: int = 42
    """Decides every request's own seed."""
    sampling: Sampling = field(default_factory=Sampling)
    ensemble: Ensemble = "all"
    """Of several generators. all: the pairs of each. agree: pairs that more than one of them wrote."""
    limits: Limits = field(default_factory=Limits)
    judge: str | None = None
    """An encoder that looks at every pair; see judge_min and judge_max."""
    judge_min: dict[Side, float] = field(default_factory=dict)
    """Side and the smallest cosine of a pair that is kept, such as synonym 0.5."""
    judge_max: dict[Side, float] = field(default_factory=dict)
    """Side and the largest cosine of a pair that is kept, such as antonym 0.9."""
    batch_size: int = 32
    """Requests a local model answers together."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of a local model's weights."""
    device: str | None = None
    """Where a local model and the judge compute, such as cpu or cuda:0. None: the best there is."""
    concurrency: int = 4
    """Requests a server answers at a time."""
    requests_per_minute: float | None = None
    """At most so many to a server."""
    tokens_per_minute: int | None = None
    """At most so many to and from a server, counted before they are known: as many new ones as an answer may have."""
    retries: int = 5
    """A server that is busy or broken is asked again so often, after growing waits, or as long as it says."""
    timeout: float = 120.0
    """Seconds to wait for an answer of a server."""
    api_key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key to a server. It is sent over https and to this machine only, and written
    nowhere."""
    body: dict[str, str] = field(default_factory=dict)
    """Further fields of a request to a server, values as YAML; null takes one out, such as seed null."""
    max_requests: int | None = None
    """Made at most, those that earlier runs of the same settings have answers to counted. A batch of a local model is asked as
    a whole or not at all."""
    max_cost: float | None = None
    """Spent at most, earlier runs of the same settings counted; needs prices."""
    prices: Prices = field(default_factory=Prices)
    max_failures: int = 20
    """So many failed requests in a row end the command."""

    def __post_init__(self) -> None:
        needs = (
            (bool(self.generator), "a generator: --generator local:MODEL"),
            (len(set(self.generator)) == len(self.generator), "each --generator once"),
            (bool(self.sides) and len(set(self.sides)) == len(self.sides), "--sides synonym, antonym, or both"),
            (self.out.suffix == ".jsonl", f"--out to end in .jsonl, got {self.out}"),
            (
                0 <= self.sampling.temperature < 10,
                f"--sampling.temperature of 0 or more, got {self.sampling.temperature}",
            ),
            (0 < self.sampling.top_p <= 1, f"--sampling.top-p above 0 and up to 1, got {self.sampling.top_p}"),
            (self.judge is None or bool(self.judge_min or self.judge_max), "--judge-min or --judge-max with --judge"),
            (
                self.judge is not None or not (self.judge_min or self.judge_max),
                "--judge for --judge-min and --judge-max",
            ),
            (self.ensemble == "all" or len(self.generator) > 1, "two generators or more to --ensemble agree"),
        )
        for holds, need in needs:
            if not holds:
                raise SettingsError(f"data generate needs {need}.")
        for option, number in {
            "--size": self.size,
            "--limit": self.limit,
            "--batch-size": self.batch_size,
            "--concurrency": self.concurrency,
            "--max-failures": self.max_failures,
            "--sampling.max-new-tokens": self.sampling.max_new_tokens,
        }.items():
            if number is not None and number < 1:
                raise SettingsError(f"{option} must be at least 1, got {number}.")
        for option, least in {
            "--retries": self.retries,
            "--max-requests": self.max_requests,
            "--max-cost": self.max_cost,
            "--prices.read": self.prices.read,
            "--prices.new": self.prices.new,
        }.items():
            if least is not None and not least >= 0:
                raise SettingsError(f"{option} must be 0 or more, got {least}.")
        for option, rate in {
            "--timeout": self.timeout,
            "--requests-per-minute": self.requests_per_minute,
            "--tokens-per-minute": self.tokens_per_minute,
        }.items():
            if rate is not None and not rate > 0:
                raise SettingsError(f"{option} must be above 0, got {rate}.")
        if self.sentences.is_dir() and self.out.resolve().is_relative_to(self.sentences.resolve()):
            raise SettingsError(
                f"--out {self.out} lies in {self.sentences}, whose files are read. Name another folder."
            )
        if self.max_cost is not None and self.most_new_tokens is None:
            raise SettingsError(
                "--max-cost needs a limit to an answer's tokens, and --body takes max_tokens out. Give "
                "max_completion_tokens there a number."
            )

    @property
    def request_body(self) -> dict[str, Any]:
        """The further fields of a request, as JSON values."""
        try:
            return {name: yaml.safe_load(value) for name, value in self.body.items()}
        except yaml.YAMLError as error:
            raise SettingsError(f"--body: a value is not valid YAML: {error}") from error

    @property
    def most_new_tokens(self) -> int | None:
        """Tokens that one request may cost; None: nobody knows."""
        body = {"max_tokens": self.sampling.max_new_tokens, **self.request_body}
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(body.get(name), int)]
        answers = body.get("n")
        return max(limits) * (answers if isinstance(answers, int) else 1) if limits else None

    def beside(self, ending: str) -> Path:
        """A file beside the pairs."""
        return self.out.with_suffix(ending)


def generate_main(settings: GenerateSettings) -> bool:
    """Generates, writes pairs and report, and prints the account; whether every request has its answer.

    Raises:
        SettingsError, DataError, JournalError: for what cannot be used; before anything is asked.
        GenerationError: for a generator that refuses; what was answered stays.
    """
    from angle_llm.generation.run import generate

    report = generate(settings, _generators(settings))
    sources, asked = report["sources"], report["requests"]
    print(
        f"{sources['rows']:,} rows = {sources['asked']:,} sentences + {sources['repeated']:,} repeated + "
        f"{sources['bad']:,} bad + {sources['beyond_limit']:,} beyond the limit"
    )
    print(
        f"{asked['total']:,} requests = {asked['answered']:,} answered + {asked['failed']:,} failed + "
        f"{asked['unasked']:,} unasked"
    )
    for one in report["account"]:
        reasons = " + ".join(f"{count:,} {why}" for why, count in one["left_out"].items())
        print(
            f"  {one['side']} by {one['generator']}: {one['lines']:,} lines = {one['kept']:,} kept + {reasons or '0'}"
        )
    print(f"{report['read_tokens']:,} tokens read, {report['new_tokens']:,} written, cost {report['cost']:.4f}")
    print(f"{report['pairs']:,} pairs in {settings.out}; account in {settings.beside('.report.json')}")
    for reason, count in report["failures"].items():
        print(f"  failed, {count:,} times: {reason}")
    if asked["failed"] or asked["unasked"]:
        print(
            "The same command asks again for what has no answer; with a larger budget, for what it had nothing left for."
        )
    return not asked["failed"] and not asked["unasked"]


def _generators(settings: GenerateSettings) -> list[Generator]:
    """Those that were named, in their order."""
    key = os.environ.get(settings.api_key_variable, "").strip() or None
    addresses = [urlsplit(name) for name in settings.generator]
    hosts = {one.netloc.rpartition("@")[2] for one in addresses if key and one.scheme == "https"}
    if len(hosts) > 1:
        raise SettingsError(
            f"the key in {settings.api_key_variable} would go to all of {', '.join(sorted(hosts))}. Ask each by a command of its "
            "own with the same --out and its --api-key-variable; then name all with --api-key-variable NONE: all is answered."
        )
    generators: list[Generator] = []
    for name in settings.generator:
        if name.startswith(LOCAL):
            from angle_llm.generation.generators import LocalGenerator

            generators.append(
                LocalGenerator(
                    name,
                    settings.sampling,
                    batch_size=settings.batch_size,
                    dtype=settings.dtype,
                    device=settings.device,
                )
            )
        else:
            generators.append(_server(settings, name, key))
    return generators


def _tell(words: str) -> None:
    """Beside a bar that is being drawn."""
    from tqdm import tqdm

    tqdm.write(words, file=sys.stderr)


def _server(settings: GenerateSettings, name: str, key: str | None) -> Generator:
    from angle_llm.generation.server import ChatServer

    server = ChatServer(
        name,
        settings.sampling,
        Web(settings.retries, settings.timeout, settings.requests_per_minute, tell=_tell),
        key=key,
        workers=settings.concurrency,
        tokens_per_minute=settings.tokens_per_minute,
        body=settings.request_body,
    )
    if key is not None and not server.sends_key:
        print(
            f"{settings.api_key_variable} is not sent to {name}: it would go over the network in the clear. Use https.",
            file=sys.stderr,
        )
    return server
