"""Export a saved encoder as a sentence-transformers folder with the same vectors.

    adapter ──► merge ──┐
    whole model ────────┴─► weights, config.json              with the keys of transformers 4 and 5
                            tokenizer.json                    with prompt, edits and maximum length
                            modules.json, 1_Pooling/ …        pooling, Dense, Normalize
                            angle_llm_export.json             what was exported, for `angle-llm verify`

Prompts of sentence-transformers are prefixes, and the library truncates the end of a formatted text, which would remove
the tail of the prompt. So the prompt is part of the tokenizer (see `tokenizer.prompt_tokenizer`), and a program that
opens the folder needs no prompt argument and no code from the folder. This package does not open the folder, because it
would add the prompt twice.

sentence-transformers adds the prompts (`prompts` in `config_sentence_transformers.json`) in two cases: queries and
documents have different prompts, or the prompt is text before `{text}` and the tokenizer cannot include it, because it has
added tokens that are not special, or `AutoTokenizer` rebuilds it. The tokenizer is then unchanged, and other programs must
send the prompts with the texts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RawTokenizer

from angle_llm.export.comparison import Verification
from angle_llm.export.exported_folder import ExportFacts
from angle_llm.export.merge import check_paths, merge
from angle_llm.export.tokenizer import PromptTokenizer, changed_names, check_same_ids, prompt_tokenizer
from angle_llm.export.verify import VerifyOptions, finish_folder
from angle_llm.io import write_json
from angle_llm.model.source.artifact import write_directory, write_earlier_names
from angle_llm.model.source.backbone import BackboneLocation, find_composite, load_config, load_tokenizer
from angle_llm.model.source.checks import CARD_NAME, MERGE_NAME, ArtifactError, read_json
from angle_llm.model.source.dense import dense_folders
from angle_llm.model.source.resolve import locate
from angle_llm.model.source.sentence_transformers_folder import library_pooling, library_prompts, write_library_files
from angle_llm.model.source.tokenizer import SentenceTokenizer, SideTokenizers
from angle_llm.model.source.weights import open_base
from angle_llm.prompts import SIDES, Side, load_prompt, load_prompts
from angle_llm.settings.parsing import need_library

_REBUILT = "qwen3_5_moe_text"
"""Text model whose tokenizer `AutoTokenizer` of transformers 5.19 and later rebuilds, without the prompt in its normalizer.

It is in `MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` and has a tokenizer class. So has `qwen2`, see `_write_as_llama`.
"""


def export_sentence_transformers(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    side: Side | None = None,
    check: bool = True,
    device: str | None = None,
) -> Verification | None:
    """Export a saved encoder to a sentence-transformers folder, and return the comparison of folder and encoder.

    Args:
        run: folder of the encoder: an adapter, which is merged first, or a whole model.
        out: folder to write.
        dtype: dtype of a merged adapter; None: float32. A whole model keeps its dtype.
        side: use only the prompt of queries, or only the prompt of documents, for all texts.
        check: False skips the comparison, which needs sentence-transformers; the result is then None.
        device: device of the comparison; None: the best available.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is missing.
        ArtifactError: for a pooling or prompts that sentence-transformers does not support, a tokenizer that cannot
            include the prompt, a damaged encoder, or a target that would overwrite its inputs.
        MissingLibraryError: if sentence-transformers is not installed and `check` is True.
        VerificationError: if the folder differs from the encoder; nothing is written.
    """
    # Checks before anything is written.
    source, target, card = check_paths(run, out)
    library_pooling(card.pooling, source)
    if card.dimensions is not None:
        raise ArtifactError(
            f"{source} keeps the first {card.dimensions} dimensions, which a sentence-transformers folder cannot store. Set "
            f"`dimensions` to null in {CARD_NAME} of a copy, export the copy, and open the folder with "
            f"SentenceTransformer(…, truncate_dim={card.dimensions})"
            f"{', and encode(…, normalize_embeddings=True)' if card.normalize else ''}."
        )
    if card.base is None and dtype not in (None, card.dtype):
        raise ArtifactError(
            f"--dtype {dtype}: {source} is a whole model, which keeps its dtype {card.dtype}. "
            "Omit --dtype; it is for adapters."
        )
    if card.base is None and find_composite(BackboneLocation(str(source))) is not None:
        raise ArtifactError(
            f"{source} is a composite model. Save its text model, which can be exported: "
            "SentenceEncoder.from_pretrained(MODEL).save_pretrained(FOLDER)."
        )
    if check:
        need_library("sentence_transformers", "the comparison (--no-verify skips it)", "export")
    # Prompts: in the tokenizer, or as prompts of the library if the tokenizer cannot include them.
    if side is not None:
        card = replace(card, prompt=load_prompts(card.prompt.of(side)))
    tokenizer = load_tokenizer(BackboneLocation(str(source)))
    tokenizers = SideTokenizers.of(tokenizer, card.prompt, card.max_length)
    query = card.prompt.query
    prompts = dict[str, str]()
    default_name = None
    base = load_config(locate(card.base or str(source), card.base_revision), card.base_revision)
    # As `library_prompts` needs it.
    is_prefix = query.tokenization == "joined" and not (query.tail or query.edits) and query.head == query.head.lstrip()
    included = tokenizers.query
    cannot_include = is_prefix and included.template.head and (changed_names(tokenizer) or base.model_type == _REBUILT)
    if card.prompt.differ or cannot_include:
        prompts, default_name = library_prompts(card.prompt, source)
        included = SentenceTokenizer(tokenizer, replace(load_prompt("plain"), append=query.append), card.max_length)
    exported = prompt_tokenizer(included, base.get_text_config().vocab_size)

    def fill(folder: Path) -> Verification | None:
        # Weights.
        if card.base is None:
            for path in _weights_files(source):
                shutil.copyfile(path, folder / path.name)
        else:
            with tempfile.TemporaryDirectory(prefix=".merged.", dir=folder) as work:
                merge(source, Path(work) / "merged", dtype=dtype or "float32", check=False)
                for path in _weights_files(Path(work) / "merged"):
                    path.replace(folder / path.name)
        for path in dense_folders(source, card.dense):
            shutil.copytree(path, folder / path.name)
        # Tokenizer, and the config that it needs.
        write_json(folder / "tokenizer.json", exported.spec)
        write_json(folder / "tokenizer_config.json", exported.config)
        write_earlier_names(folder)  # a whole model may be saved by an earlier version
        # transformers 5.6 and later rebuild the tokenizer of Qwen2 from the vocabulary, without the stored normalizer.
        as_llama = exported.changes_text and read_json(folder / "config.json").get("model_type") == "qwen2"
        if as_llama:
            _write_as_llama(folder)
        _check_tokenizers(folder, tokenizers, prompts, exported)
        # Files of the library, facts of the export, verification.
        backbone = open_base(BackboneLocation(str(folder)), dtype=card.dtype).skeleton
        write_library_files(folder, backbone, card, prompts=prompts, default=default_name)
        facts = ExportFacts(card.prompt, card.pooling, card.max_length, exported.plain_names, card.normalize)
        replace(facts, head=prompts.get(default_name or ""), as_llama=as_llama, dense=card.dense).write(folder)
        return finish_folder(folder, source, str(out), VerifyOptions(side=side, device=device) if check else None)

    return write_directory(target, fill, writer="")


def _weights_files(folder: Path) -> list[Path]:
    """Return the existing paths of the weights, index, model configuration and merge provenance in a model folder."""
    names = ("config.json", MERGE_NAME, "model.safetensors.index.json")
    return [*(folder / name for name in names if (folder / name).is_file()), *sorted(folder.glob("model*.safetensors"))]


def _check_tokenizers(
    folder: Path, tokenizers: SideTokenizers, prompts: Mapping[str, str], exported: PromptTokenizer
) -> None:
    """Check that the tokenizer of an exported folder gives the same token ids as the encoder.

    The tokenizer is opened with `AutoTokenizer` and with the library `tokenizers`. `prompts` are prompts that a program
    adds before a text.

    Raises:
        ArtifactError: if token ids differ.
    """
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    automatic = load_tokenizer(BackboneLocation(str(folder)))
    for encode in (lambda text: raw.encode(text).ids, lambda text: automatic(text, truncation=True)["input_ids"]):
        for side, sentences in zip(SIDES, tokenizers.distinct, strict=False):
            check_same_ids(encode, sentences, prompts.get(side, ""), exported.plain_names)


def _write_as_llama(folder: Path) -> None:
    """Rewrite a Qwen2 model in a folder as a LLaMA model with the same values.

    The weights and attention biases are kept, and an output bias of 0 is added. transformers keeps the stored tokenizer
    of a LLaMA model, but rebuilds the tokenizer of a Qwen2 model.

    Raises:
        ArtifactError: for a model with sliding windows.
    """
    config = read_json(folder / "config.json")
    if config.get("use_sliding_window"):
        raise ArtifactError(
            "transformers reads the tokenizer of Qwen2 models without the prompt, and a Qwen2 model with sliding windows "
            "cannot be stored as a LLaMA model. Use this encoder with angle_llm."
        )
    for key in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
        config.pop(key, None)
    config |= {"model_type": "llama", "architectures": ["LlamaModel"], "attention_bias": True, "mlp_bias": False}
    write_json(folder / "config.json", config)
    path = max(folder.glob("model*.safetensors"))  # the last shard
    tensors = load_file(path)
    zero = torch.zeros(config["hidden_size"], dtype=next(iter(tensors.values())).dtype)
    biases = {f"layers.{number}.self_attn.o_proj.bias": zero.clone() for number in range(config["num_hidden_layers"])}
    save_file(tensors | biases, path, metadata={"format": "pt"})
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        index = read_json(index_path)
        index["weight_map"] |= dict.fromkeys(biases, path.name)
        write_json(index_path, index)
