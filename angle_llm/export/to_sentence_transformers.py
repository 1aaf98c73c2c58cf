"""A saved encoder as a folder of sentence-transformers, whose `SentenceTransformer(folder).encode(texts)` gives its vectors.

    adapter ──► merge ──┐
    whole model ────────┴─► weights + config.json            as they are
                            tokenizer.json                    with prompt, tail, edits and length inside
                            modules.json, 1_Pooling/ …        which pooling
                            angle_llm_export.json             what was put in, for `angle-llm verify`

The library's own prompts are prefixes, and it cuts a worded text at its end, which is the prompt's tail. So the prompt goes
into the tokenizer (see `worded_tokenizer`, which tells what that can do and what not), where no argument of `encode` and
no code of the folder's is needed. Not for this package to load again: such a tokenizer words texts once more.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from pathlib import Path
from typing import Any

from angle_llm import __version__
from angle_llm.export.library import MODULES_NAME, ExportFacts, check_library
from angle_llm.export.merge import REPORT_NAME, check_target, merge
from angle_llm.export.report import Verification
from angle_llm.export.verify import MERGE_NAME, VerificationError, verify
from angle_llm.export.worded_tokenizer import check_same_ids, worded_tokenizer
from angle_llm.io import write_json
from angle_llm.model.artifact import EncoderCard, write_directory
from angle_llm.model.backbone import BackboneLocation, load_tokenizer, locate
from angle_llm.model.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.tokenizer import SentenceTokenizer, load_tokenizer_file
from angle_llm.model.weights import open_base

POOLINGS = {"last": "lasttoken", "cls": "cls", "mean": "mean", "last-avg": "mean", "last-max": "max"}
"""Our poolings in the library's words."""

_POOLING_FLAGS = {
    "cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken",
}  # fmt: skip
"""As every version of the library reads them."""

_AS_STORED = "stablelm"
"""A type of model whose tokenizer `transformers` 5 takes from tokenizer.json as it is. Named in a folder where the model's
own type would have it built anew from the vocabulary (Qwen2), without the prompt."""


def export_sentence_transformers(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    check: bool = True,
    device: str | None = None,
) -> Verification | None:
    """Writes the saved encoder `run` as a sentence-transformers folder `out`; returns what the verification found.

    An adapter is merged first, onto the values it was trained on, and stored in `dtype` (None: float32); a whole model stays
    as it is stored. `check` False leaves the comparison out, for which the library has to be installed.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is gone.
        ArtifactError: for a pooling the library does not have, a tokenizer that cannot hold the prompt, a damaged encoder, or
            a target that is in the way.
        MissingLibraryError: if it is to be compared, and sentence-transformers is not installed.
        VerificationError: if the folder is not the same encoder; nothing is written then.
    """
    source, target = Path(run).expanduser(), Path(out).expanduser()
    if not is_saved_encoder(source):
        raise FileNotFoundError(f"{source} is no saved encoder. Give the model directory of a run, or a merged model.")
    card = EncoderCard.read(source)
    if card.pooling not in POOLINGS:
        raise ArtifactError(
            f"{source} is pooled by {card.pooling!r}, which sentence-transformers does not have. It has {', '.join(POOLINGS)}."
        )
    if card.dimensions is not None:
        raise ArtifactError(
            f"{source} keeps the first {card.dimensions} dimensions, and a folder of sentence-transformers cannot say so. Set "
            f"`dimensions` to null in {source / CARD_NAME}, export that, and open the folder with "
            f"SentenceTransformer(…, truncate_dim={card.dimensions})."
        )
    if card.base is None and dtype not in (None, card.dtype):
        raise ArtifactError(
            f"{source} is a whole model stored in {card.dtype}, which is kept; dtype {dtype} is for adapters."
        )
    if check:
        check_library()
    check_target(source, locate(card.base or str(source)), target)
    sentences = SentenceTokenizer(load_tokenizer(BackboneLocation(str(source))), card.prompt, card.max_length)
    worded = worded_tokenizer(sentences)
    found: Verification | None = None

    def fill(folder: Path) -> None:
        nonlocal found
        if card.base is None:
            _copy_weights(source, folder)
        else:
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.merged.", dir=folder.parent) as work:
                merge(source, Path(work) / "merged", dtype=dtype or "float32", check=False)
                _move_weights(Path(work) / "merged", folder)
        write_json(folder / "tokenizer.json", worded.spec)
        write_json(folder / "tokenizer_config.json", worded.config)
        rebuilt = _is_rebuilt(folder, sentences)
        _write_library_files(folder, card, rebuilt=rebuilt)
        facts = ExportFacts(card.prompt, card.pooling, card.max_length)
        facts.write(folder, plain_names=worded.plain_names, angle_llm=__version__)
        if check:
            found = verify([source, folder], names=[str(run), str(out)], device=device)
            if not found.holds:
                raise VerificationError(
                    f"{out} was not written, for it would not be the encoder in {run}:\n{found.text()}"
                )
        write_json(folder / REPORT_NAME, {"holds": None} if found is None else found.to_dict())
        (folder / "README.md").write_text(
            _readme(target.name, card, sentences.template.merge_span, worded.plain_names, found), encoding="utf-8"
        )

    write_directory(target, fill)
    return found


def _weights_files(folder: Path) -> list[Path]:
    names = ("config.json", MERGE_NAME, "model.safetensors.index.json")
    return [*(folder / name for name in names if (folder / name).is_file()), *sorted(folder.glob("model*.safetensors"))]


def _copy_weights(source: Path, folder: Path) -> None:
    for path in _weights_files(source):
        shutil.copyfile(path, folder / path.name)


def _move_weights(source: Path, folder: Path) -> None:
    for path in _weights_files(source):
        path.replace(folder / path.name)


def _is_rebuilt(folder: Path, sentences: SentenceTokenizer) -> bool:
    """Whether `transformers` builds the folder's tokenizer anew instead of reading it, and has to be told otherwise.

    Raises:
        ArtifactError: if its ids are not the encoder's even when it is read as it is.
    """
    check_same_ids(load_tokenizer_file(folder), sentences)
    try:
        check_same_ids(load_tokenizer(BackboneLocation(str(folder))), sentences)
    except ArtifactError:
        return True
    return False


def _write_library_files(folder: Path, card: EncoderCard, *, rebuilt: bool) -> None:
    backbone: Any = open_base(BackboneLocation(str(folder)), dtype=card.dtype).skeleton
    config = backbone.config.get_text_config()
    dimensions: int = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
    # These names and keys are the ones that all versions of the library know.
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    transformer: dict[str, Any] = {"max_seq_length": card.max_length, "do_lower_case": False}
    if "add_pooling_layer" in inspect.signature(type(backbone).__init__).parameters:
        transformer["model_args"] = {"add_pooling_layer": False}  # BERT's pooler, which is not stored, would be random
    if rebuilt:
        transformer["tokenizer_args"] = {"tokenizer_type": _AS_STORED}
    flags = {f"pooling_mode_{flag}": mode == POOLINGS[card.pooling] for mode, flag in _POOLING_FLAGS.items()}
    write_json(folder / MODULES_NAME, modules)
    write_json(folder / "sentence_bert_config.json", transformer)
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    (folder / "1_Pooling").mkdir()
    write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": dimensions, **flags, "include_prompt": True}
    )


def _readme(name: str, card: EncoderCard, merge_span: str, plain_names: list[str], found: Verification | None) -> str:
    prompt = card.prompt.template.replace("\n", "\n    ")
    edits = f" The text is edited first: {', '.join(card.prompt.edits)}." if card.prompt.edits else ""
    lost = f", and the `{merge_span}` behind it," if merge_span else ","
    plain = f"\n\nThese names are plain characters in a text: {', '.join(plain_names)}." if plain_names else ""
    if found is None:
        checked = "Not compared with its origin: the export was asked not to. `angle-llm verify ORIGIN FOLDER` does it."
    else:
        (other,) = found.comparisons
        checked = (
            f"On {found.texts} texts against its origin: 1 - cosine at most {other.largest_difference:.1e}. "
            + " ".join(note.removeprefix(f"{other.form.name}: ") for note in found.notes)
        ).strip()
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---

# {name}

    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer("{name}")
    rows = model.encode(["A man is eating.", "Someone eats."])

Give the bare texts and no `prompt`: the tokenizer words each of them as below, with the text in place of `{{text}}`.{edits}

    {prompt}

Pooling `{card.pooling}`; at most {card.max_length} tokens, prompt included. A text that is too long loses its end{lost} never
more of the prompt; it has the same vector as in angle_llm.{plain}
Names of special tokens in a text are plain characters. The vectors are not scaled to length 1; compare them by cosine.

## Checked

{checked} `{REPORT_NAME}` has the details. Made by angle_llm {__version__}.
"""
