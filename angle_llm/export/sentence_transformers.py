"""Export a saved encoder as a sentence-transformers folder with the same vectors.

    adapter ──► merge ──┐
    whole model ────────┴─► weights + config.json            unchanged
                            tokenizer.json                    with prompt, edits and maximum length
                            modules.json, 1_Pooling/ …        pooling, Normalize
                            angle_llm_export.json             what was exported, for `angle-llm verify`

Prompts of the library are prefixes, and it truncates a formatted text at its end, which is the tail of the prompt. So
the prompt is part of the tokenizer (see `tokenizer.prompt_tokenizer`), and `encode` needs no argument and no code of
the folder. This package does not open the folder: the prompt would be added twice.

With different prompts for queries and documents, the library adds them: `prompts` in `config_sentence_transformers.json`
for its `encode_query` and `encode_document`. So each must be text before `{text}` only; otherwise a folder per side.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from angle_llm.export.card import MERGE_NAME
from angle_llm.export.comparison import Verification
from angle_llm.export.exported_folder import ExportFacts
from angle_llm.export.merge import check_target, merge
from angle_llm.export.tokenizer import check_same_ids, prompt_tokenizer
from angle_llm.export.verify import finish_folder
from angle_llm.io import write_json
from angle_llm.model.artifact import EncoderCard, write_directory
from angle_llm.model.backbone import BackboneLocation, load_tokenizer, locate
from angle_llm.model.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.library_folder import MODULES_NAME, POOLINGS
from angle_llm.model.tokenizer import SentenceTokenizer, SideTokenizers, Tokenizer, load_tokenizer_file
from angle_llm.model.weights import open_base
from angle_llm.prompts import SIDES, Side, SidePrompts, load_prompt, load_prompts
from angle_llm.settings_io import need_library

_POOLINGS = {ours: theirs for theirs, ours in POOLINGS.items()} | {"last-avg": "mean_tokens", "last-max": "max_tokens"}
"""Our poolings → names of the library."""

_AS_STORED = "stablelm"
"""Model type whose tokenizer `transformers` 5 reads from tokenizer.json unchanged. Set in a folder whose own model type
(Qwen2) would rebuild the tokenizer from its vocabulary, without the prompt."""


def export_sentence_transformers(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    side: Side | None = None,
    check: bool = True,
    device: str | None = None,
) -> Verification | None:
    """Write the saved encoder `run` as a sentence-transformers folder `out`, and return the verification.

    An adapter is merged first and stored in `dtype` (None: float32); a whole model keeps its dtype. `side`: only the
    prompt of queries or of documents, for all texts. `check` False skips the comparison, which needs the library.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is missing.
        ArtifactError: for a pooling or prompts that the library does not support, a tokenizer that cannot hold the
            prompt, a damaged encoder, or a target that would overwrite its inputs.
        MissingLibraryError: if sentence-transformers is not installed and `check` is True.
        VerificationError: if the folder is a different encoder; nothing is written.
    """
    source, target = Path(run).expanduser(), Path(out).expanduser()
    if not is_saved_encoder(source):
        raise FileNotFoundError(f"{source} is not a saved encoder. Give the model folder of a run, or a merged model.")
    card = EncoderCard.read(source)
    if card.pooling not in _POOLINGS:
        raise ArtifactError(
            f"{source} has pooling {card.pooling!r}; sentence-transformers supports {', '.join(_POOLINGS)}."
        )
    if card.dimensions is not None:
        raise ArtifactError(
            f"{source} keeps the first {card.dimensions} dimensions, which a sentence-transformers folder cannot store. Set "
            f"`dimensions` to null in {source / CARD_NAME}, export again, and open the folder with "
            f"SentenceTransformer(…, truncate_dim={card.dimensions})."
        )
    if card.base is None and dtype not in (None, card.dtype):
        raise ArtifactError(
            f"{source} is a whole model stored in {card.dtype}, which is kept; --dtype {dtype} is for adapters."
        )
    if check:
        need_library("sentence_transformers", "the comparison (--no-verify skips it)", "export")
    if target.is_dir() and any(target.iterdir()):
        raise ArtifactError(f"OUT {target} has files. Name a new folder.")
    check_target(source, locate(card.base or str(source)), target)
    if side is not None:
        card = replace(card, prompt=load_prompts(card.prompt.of(side)))
    tokenizer = load_tokenizer(BackboneLocation(str(source)))
    tokenizers = SideTokenizers.of(tokenizer, card.prompt, card.max_length)
    heads: dict[Side, str] = {}
    if card.prompt.differ:
        heads = _heads(card.prompt, source)
        headless = replace(load_prompt("plain"), append=card.prompt.query.append)
        exported = prompt_tokenizer(SentenceTokenizer(tokenizer, headless, card.max_length))
    else:
        exported = prompt_tokenizer(tokenizers.query)
    found: list[Verification | None] = []

    def fill(folder: Path) -> None:
        if card.base is None:
            for path in _weights_files(source):
                shutil.copyfile(path, folder / path.name)
        else:
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.merged.", dir=folder.parent) as work:
                merge(source, Path(work) / "merged", dtype=dtype or "float32", check=False)
                for path in _weights_files(Path(work) / "merged"):
                    path.replace(folder / path.name)
        write_json(folder / "tokenizer.json", exported.spec)
        write_json(folder / "tokenizer_config.json", exported.config)
        _write_library_files(folder, card, heads, rebuilt=_is_rebuilt(folder, tokenizers, heads))
        ExportFacts(card.prompt, card.pooling, card.max_length, exported.plain_names, card.normalize).write(folder)
        found.append(finish_folder(folder, source, (str(run), str(out)), side=side, check=check, device=device))

    write_directory(target, fill)
    return found[0]


def _weights_files(folder: Path) -> list[Path]:
    names = ("config.json", MERGE_NAME, "model.safetensors.index.json")
    return [*(folder / name for name in names if (folder / name).is_file()), *sorted(folder.glob("model*.safetensors"))]


def _heads(prompts: SidePrompts, source: Path) -> dict[Side, str]:
    """Return the text that the library adds before a text of each side.

    Raises:
        ArtifactError: for a prompt that is more than a head.
    """
    for side in SIDES:
        prompt = prompts.of(side)
        same_end = prompt.append == prompts.query.append
        if prompt.tail or prompt.edits or prompt.tokenization != "joined" or not same_end:
            raise ArtifactError(
                f"{source} has {prompts}. A sentence-transformers folder holds two prompts only if each is text before "
                f"{{text}}, joined, without edits and with the same `append`; expected this of the {side} prompt, got "
                f"{prompt.to_dict()}. Export one folder for each side: --as query, and --as document."
            )
    return {side: prompts.of(side).head for side in SIDES}


def _is_rebuilt(folder: Path, tokenizers: SideTokenizers, heads: Mapping[Side, str]) -> bool:
    """Return whether `transformers` would rebuild the tokenizer of the folder instead of reading it.

    Raises:
        ArtifactError: if its ids differ from the encoder's even when it is read unchanged.
    """

    def check(exported: Tokenizer) -> None:
        for sentences, head in zip(tokenizers.distinct, heads.values() or [""], strict=True):
            check_same_ids(exported, sentences, head)

    check(load_tokenizer_file(folder))
    try:
        check(load_tokenizer(BackboneLocation(str(folder))))
    except ArtifactError:
        return True
    return False


def _write_library_files(folder: Path, card: EncoderCard, heads: Mapping[Side, str], *, rebuilt: bool) -> None:
    backbone: Any = open_base(BackboneLocation(str(folder)), dtype=card.dtype).skeleton
    config = backbone.config.get_text_config()
    dimensions: int = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
    # Names and keys that all versions of the library accept.
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    if card.normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    transformer: dict[str, Any] = {"max_seq_length": card.max_length, "do_lower_case": False}
    if "add_pooling_layer" in inspect.signature(type(backbone).__init__).parameters:
        transformer["model_args"] = {"add_pooling_layer": False}  # BERT's pooler is not stored and would be random
    if rebuilt:
        transformer["tokenizer_args"] = {"tokenizer_type": _AS_STORED}
    flags = {"pooling_mode_mean_tokens": False, f"pooling_mode_{_POOLINGS[card.pooling]}": True}
    write_json(folder / MODULES_NAME, modules)
    write_json(folder / "sentence_bert_config.json", transformer)
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": heads, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    (folder / "1_Pooling").mkdir()
    write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": dimensions, **flags, "include_prompt": True}
    )
