"""The commands `angle-llm merge`, `export`, `verify` and `push`: call the library and print the outcome.

Heavy libraries are imported inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angle_llm.io import write_json
from angle_llm.settings.export import ExportSettings, MergeSettings, PushSettings, VerifySettings
from angle_llm.settings.parsing import SettingsError

if TYPE_CHECKING:
    from angle_llm.export.comparison import Verification
    from angle_llm.export.verify import Score


def merge_main(settings: MergeSettings) -> None:
    """Run `angle-llm merge`: write the merged model, and print the verification.

    The exit code is 1 if the embeddings of the merged model differ from the embeddings of the adapter.
    """
    from angle_llm.export.card import REPORT_NAME
    from angle_llm.export.merge import merge

    *others, out = (settings.out, *settings.more)  # `angle-llm merge MODEL [MODEL …] OUT`
    options = {name: getattr(settings, name) for name in ("weights", "dtype", "composite")}
    _print_verification(replace(settings, out=out), merge, others=others, **options)
    print(f"\nThe merged encoder is saved in {out}, with this report in {REPORT_NAME}.")


def export_main(settings: ExportSettings) -> None:
    """Run `angle-llm export`: write the folder for another program, print the verification and how to use the folder.

    The exit code is 1 if the embeddings of the folder differ from the embeddings of the encoder.
    """
    from angle_llm.export.card import CardFacts
    from angle_llm.export.formats.gguf_file import export_gguf
    from angle_llm.export.formats.onnx_graph import export_onnx
    from angle_llm.export.sentence_transformers import export_sentence_transformers

    # Export.
    export_to: dict[str, Callable[..., Verification | None]] = {
        "sentence-transformers": export_sentence_transformers, "onnx": export_onnx, "gguf": export_gguf
    }  # fmt: skip
    _print_verification(settings, export_to[settings.to], side=settings.side, dtype=settings.dtype)

    # Instructions.
    facts = CardFacts.read(Path(settings.out).expanduser())
    print(f"\nThe folder for {settings.to} is {settings.out}. To use it", end="")
    if facts.instructions:
        print(f", in this folder:\n\n{facts.instructions}")
        return
    methods = ("encode_query", "encode_document") if facts.usage.prompt.differ else ("encode",)
    code = [f"SentenceTransformer({settings.out!r}).{method}(texts)" for method in methods]
    print(", with sentence-transformers:\n")
    print(*(f"    {line}" for line in code), "", *(f"* {note}" for note in facts.notes), sep="\n")


def _print_verification(
    settings: MergeSettings | ExportSettings, make: Callable[..., Verification | None], **options: Any
) -> None:
    """Write an encoder folder with `make`, and print the verification. The exit code is 1 if the verification fails.

    `make` takes the source folder, the new folder, `check` and `options`. It returns the verification, or None if it
    was skipped.
    """
    from angle_llm.export.verify import VerificationError

    try:
        verification = make(settings.model, settings.out, check=settings.verify, **options)
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print("NOT verified (--no-verify)." if verification is None else verification.text())


def verify_main(settings: VerifySettings, score_on: Callable[[str], Score]) -> None:
    """Run `angle-llm verify`: compare stored versions of an encoder and print the report. Exit code 1 if they differ.

    Exit code 3 if a server agrees with an encoder whose base is unknown: an untrained encoder would agree too.

    `score_on` takes the path of a file of scored pairs, and returns a function from an encoder to its score on them.
    """
    from angle_llm.export.verify import VerifyOptions, verify
    from angle_llm.serve.client import is_server

    forms = [*settings.forms, *settings.server]
    options = VerifyOptions(
        texts=None if settings.texts is None else _read_texts(settings.texts),
        score=None if settings.pairs is None else score_on(settings.pairs),
        tolerance=settings.tolerance,
        side=settings.side,
        base=settings.base,
        server={"send_prompt": settings.send_prompt, "model": settings.server_model},
    )
    result = verify(forms, options)
    try:
        if settings.json is not None:
            write_json(settings.json.expanduser(), result.to_dict())
    finally:
        print(result.text())
    if result.holds and result.base_difference is None and any(map(is_server, forms)):
        sys.exit(3)
    sys.exit(0 if result.holds else 1)


def _read_texts(path: Path) -> list[str]:
    """Read the non-blank lines of the UTF-8 file given by `--texts`.

    Raises:
        SettingsError: for a file that cannot be read or has no text.
    """
    try:
        texts = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--texts: expected a UTF-8 file with one text per line, got {path} ({error}).") from None
    if not texts:
        raise SettingsError(f"--texts: {path} contains no text.")
    return texts


def push_main(settings: PushSettings) -> None:
    """Run `angle-llm push`: upload an encoder and print its address; with `--dry-run`, only print files and card."""
    from angle_llm.export.push import push

    print(push(settings))
