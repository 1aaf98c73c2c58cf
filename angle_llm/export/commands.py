"""The commands `angle-llm merge`, `export`, `verify` and `push`: settings and output.
Functions import heavy libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from angle_llm.io import write_json
from angle_llm.prompts import Side
from angle_llm.settings_io import PositiveFloat, SettingsError, settings_class

if TYPE_CHECKING:
    from angle_llm.export.comparison import Verification
    from angle_llm.export.verify import Score


@settings_class
class MergeSettings:
    """Settings of `angle-llm merge`."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The saved adapter: a folder with angle_llm.json, such as runs/nli/model."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Output folder. A saved encoder in it is replaced; a folder with other content is refused."""
    base: Literal["dequantised", "original"] = "dequantised"
    """dequantised: merge into the values the adapter was trained on (rounded to the dtype of training, dequantised).
    original: merge into the stored weights of the base; an adapter trained on 4 bits then differs slightly."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the stored weights. The merge is computed in float32 and rounded once; 1 - cos is about 1e-12 in float32
    and 1e-4 in bfloat16, which has half the size."""
    shard_gigabytes: PositiveFloat = 4.0
    """Size of a weights file. Merging needs this much memory plus one layer."""
    verify: bool = True
    """Compare the result with the adapter before it is kept. Loads each of them in float32."""
    device: str | None = None
    """Device of the comparison, such as cpu or cuda:0. None: the best available."""


@settings_class
class ExportSettings:
    """Settings of `angle-llm export`."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The saved encoder, such as runs/nli/model: an adapter, which is merged first, or a whole model."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Output folder. It must be new or empty."""
    to: Literal["sentence-transformers"] = "sentence-transformers"
    """sentence-transformers: a folder whose SentenceTransformer(OUT).encode(texts) gives the same vectors, prompt
    included; with two prompts its encode_query and encode_document."""
    side: Annotated[Side | None, tyro.conf.arg(name="as")] = None
    """Export the prompt of one side only, for all texts."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of a merged adapter; a whole model keeps its dtype. None: float32."""
    verify: bool = True
    """Compare the result with MODEL before it is kept; needs sentence-transformers."""
    device: str | None = None
    """Device of the comparison, such as cpu or cuda:0. None: the best available."""


@settings_class
class VerifySettings:
    """Settings of `angle-llm verify`."""

    forms: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="A B [C …]")]
    """Two or more saved folders (adapter or whole), sentence-transformers folders, or models; each is compared with the
    first. A plain model gets the prompt, pooling and maximum length of the first."""
    texts: Path | None = None
    """A UTF-8 file with one text per line. None: built-in texts."""
    pairs: str | None = None
    """A file of scored pairs, as in eval sts, such as starter:graded_pairs.tsv: compare Spearman too."""
    side: Annotated[Side | None, tyro.conf.arg(name="as")] = None
    """Compare only this side of an encoder with two prompts, such as with a folder of `export --as`."""
    tolerance: PositiveFloat | None = None
    """Largest allowed 1 - cos. None: 1e-5 for weights stored in float32, 1e-3 for bfloat16 and float16, and every
    stored weight must be that of the adapter's merge. With a tolerance, wrong weights are counted but allowed."""
    json: Path | None = None
    """Also write the report to this file."""
    device: str | None = None
    """Device, such as cpu or cuda:0. None: the best available."""

    def __post_init__(self) -> None:
        if len(self.forms) < 2:
            raise SettingsError(f"verify: expected two or more forms, got {len(self.forms)}.")


@settings_class
class PushSettings:
    """Settings of `angle-llm push`."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A saved encoder: the model folder of a run, a merged model, or an exported folder."""
    repo: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="USER/NAME")]
    """The repository on the hub. It is created if it does not exist; an existing one must hold an encoder of angle_llm,
    whose files are replaced. Other files are kept."""
    run: Path | None = None
    """Run directory whose settings and scores are added to the card. None: the parent of the folder, if it is one."""
    results: Path | None = None
    """JSON file of `angle-llm eval sts --json` or `eval retrieval --json`; its scores are added to the card."""
    public: bool = False
    """Make a new repository public. Default: private."""
    unverified: bool = False
    """Push a merged or exported folder even if it was not verified."""
    dry_run: bool = False
    """Print the files and the card without using the network."""


def merge_main(settings: MergeSettings) -> None:
    """Merge and print the verification; exit code 1 if the result differs from the adapter."""
    from angle_llm.export.card import REPORT_NAME
    from angle_llm.export.merge import merge

    _print_verification(
        settings,
        merge,
        base=settings.base,
        dtype=settings.dtype,
        shard_bytes=int(settings.shard_gigabytes * 1e9),
    )
    print(f"\nThe merged encoder is saved in {settings.out}, with this report in {REPORT_NAME}.")


def export_main(settings: ExportSettings) -> None:
    """Export and print the verification; exit code 1 if the result differs from the encoder."""
    from angle_llm.export.exported_folder import ExportFacts
    from angle_llm.export.programs import program_notes
    from angle_llm.export.sentence_transformers import export_sentence_transformers

    _print_verification(settings, export_sentence_transformers, dtype=settings.dtype, side=settings.side)
    folder = Path(settings.out).expanduser()
    facts = ExportFacts.read(folder)
    assert facts is not None  # just written
    calls = ["queries = model.encode_query(texts)", "documents = model.encode_document(texts)"]
    print(
        f"\nThe folder for {settings.to} is {settings.out}. To use it:\n\n"
        "    from sentence_transformers import SentenceTransformer\n"
        + (
            f"    model = SentenceTransformer({settings.out!r})\n    " + "\n    ".join(calls)
            if facts.prompt.differ
            else f"    rows = SentenceTransformer({settings.out!r}).encode(texts)"
        )
        + "\n"
    )
    for note in program_notes(folder, facts):
        print(f"* {note}")


def _print_verification(
    settings: MergeSettings | ExportSettings, make: Callable[..., Verification | None], **options: Any
) -> None:
    from angle_llm.export.verify import VerificationError

    try:
        found = make(settings.run, settings.out, check=settings.verify, device=settings.device, **options)
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    later = f"NOT verified (--no-verify). To verify later: angle-llm verify {settings.run} {settings.out}"
    print(later if found is None else found.text())


def verify_main(settings: VerifySettings, score_on: Callable[[str], Score]) -> None:
    """Compare and print the report; exit code 1 if the forms differ. `score_on` makes a score of scored pairs."""
    from angle_llm.export.verify import verify

    score = None if settings.pairs is None else score_on(settings.pairs)
    texts = None if settings.texts is None else _read_texts(settings.texts)
    found = verify(
        settings.forms,
        texts=texts,
        score=score,
        tolerance=settings.tolerance,
        device=settings.device,
        side=settings.side,
    )
    if settings.json is not None:
        write_json(settings.json, found.to_dict())
    print(found.text())
    sys.exit(0 if found.holds else 1)


def _read_texts(path: Path) -> list[str]:
    try:
        texts = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--texts: expected a UTF-8 file with one text per line, got {path} ({error}).") from None
    if not texts:
        raise SettingsError(f"--texts: {path} holds no text.")
    return texts


def push_main(settings: PushSettings) -> None:
    """Upload an encoder and print its address; with `--dry-run` print its files and card."""
    from angle_llm.export.push import push

    print(push(settings))
