"""Read and write the configuration files of a sentence-transformers model, as version 6.2 of the library reads them.

    modules.json                         Transformer, Pooling and perhaps Dense and Normalize, with old or new class paths
    sentence_bert_config.json            maximum length (or another name in `_TRANSFORMER_FILES`)
    1_Pooling/config.json                pooling
    2_Dense/ …                           weights and activation of a Dense module (see `dense`)
    config_sentence_transformers.json    prompts, default prompt, similarity

Weights, configuration and tokenizer are files of `transformers`. Settings that this package does not support (another
module, several poolings, a chat template with roles) raise an error, because embeddings would differ. Only JSON is read;
no code of the folder runs.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from angle_llm.io import write_json
from angle_llm.model.source.backbone import state_sizes
from angle_llm.model.source.checks import ArtifactError, as_artifact_error, check_settings, read_json, refuse_setting
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.tokenizer import CHAT_PROBES, SentenceTokenizer, Tokenizer
from angle_llm.prompts import PLACEHOLDER, SIDES, PromptTemplate, SidePrompts, load_prompt

MODULES_NAME = "modules.json"
"""Name of a file that every sentence-transformers folder contains."""
USAGE_FILES = (
    MODULES_NAME,
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "*processor_config.json",
    "*/config.json",
    "*/model.safetensors",
)
"""Patterns of the files of a sentence-transformers model that are not files of the backbone."""

_MODULE = "sentence_transformers.models.{}"
"""Class path of a module in `modules.json`, in the form that all versions of sentence-transformers read."""
_REFUSAL = "a folder of angle_llm (use `angle-llm export` for sentence-transformers)"
"""Invalid class path, which sentence-transformers shows in an error. A full stop in the text would cut the message."""
LIBRARY_POOLINGS = {
    "lasttoken": "last", "cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len", "weightedmean_tokens": "weightedmean",
}  # fmt: skip
"""Name of a pooling in sentence-transformers, after `pooling_mode_`, that all its versions read → name in `POOLINGS`."""
_DOCUMENT_NAMES = ("document", "passage", "corpus")
_STATES = ("last_hidden_state", ["last_hidden_state"])
_ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs")
_SUPPORTED: dict[str, Sequence[object] | None] = {
    **dict.fromkeys(("max_seq_length", "do_lower_case", "unpad_inputs", *_ARGUMENTS)),
    "transformer_task": ["feature-extraction"],
    "modality_config": None,
    "module_output_name": ["token_embeddings"],
}
"""Keys of the Transformer module's config, and the values that are supported (see `check_settings`)."""
_FORWARD = [{"method": "forward", "method_output_name": name} for name in _STATES]
_MESSAGE = [item | {"format": name} for item in _FORWARD for name in ("structured", "flat")]
_MODALITIES: dict[str, Any] = dict.fromkeys(("text", "image", "audio", "video"), _FORWARD) | {"message": _MESSAGE}
"""Keys of `modality_config` and the supported values. With `message`, texts go through the chat template."""
_TOKENIZER_ARGUMENTS = dict.fromkeys(("model_max_length", "padding_side", "use_fast", "trust_remote_code"))
_MODEL_ARGUMENTS = dict.fromkeys(("add_pooling_layer", "attn_implementation", "use_safetensors", "trust_remote_code"))
OUR_POOLINGS = {ours: theirs for theirs, ours in LIBRARY_POOLINGS.items()} | {
    "last-avg": "mean_tokens",
    "last-max": "max_tokens",
}
"""Name of a pooling in `POOLINGS` → name in sentence-transformers."""
_NO_LIMIT = 2**31 - 1
_PROBES = ("A man is eating 3 apples.", "Straße, Привет 你好!", "x")


def find_sentence_transformers(folder: str | Path) -> Path | None:
    """Return the folder as a `Path` if sentence-transformers wrote it (it contains `modules.json`), else None."""
    path = Path(folder)
    return path if (path / MODULES_NAME).is_file() else None


def opens_in_library(folder: Path) -> bool:
    """Return whether a folder has a `modules.json` that sentence-transformers can load (see `write_library_refusal`)."""
    path = folder / MODULES_NAME
    return path.is_file() and _REFUSAL not in path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class SentenceTransformersFolder:
    """Prompts, pooling, normalization and maximum length from the files of a sentence-transformers model."""

    folder: Path
    prompt: SidePrompts
    prompt_is_own: bool
    """Whether the prompt comes from the files of the model, not from the caller."""
    pooling: str
    dense: Sequence[Path]
    """Folders of the Dense modules that are applied to the pooled state."""
    normalize: bool
    max_length: int | None
    """Maximum number of tokens of a text; None: the limit of the tokenizer."""
    lower_case: bool
    """Whether sentence-transformers converts texts to lower case before tokenization."""
    message_format: str | None = None
    """Format of the messages for the chat template, `structured` or `flat`; None: texts are tokenized without it."""

    @classmethod
    def read(cls, folder: Path, prompt: SidePrompts | None = None) -> SentenceTransformersFolder:
        """Read the configuration files of a sentence-transformers model; `prompt` replaces the prompts of the model.

        Raises:
            ArtifactError: for a damaged file, or a setting that this package does not support; names file and value.
            SettingsError: for a prompt of the model that contains `{text}`.
        """
        with as_artifact_error(folder):
            # Modules and options.
            pooling_path, dense, normalize = read_modules(folder)
            options = _read_options(folder)
            # Settings of the library: all are allowed (None), but these two with a listed value, or without a value.
            config, config_path = _read_config(folder, "config_sentence_transformers.json")
            known = dict.fromkeys(config) | {"model_type": ["SentenceTransformer"], "truncate_dim": []}
            check_settings(config_path, config, known)
            # Prompt, pooling and length.
            is_own_prompt = prompt is None
            prompt = prompt or _read_prompts(config, config_path)
            pooling = _read_pooling(folder, pooling_path, prompt)
            length = options.get("max_seq_length")
            message = (options.get("modality_config") or {}).get("message") or {}
        similarity = config.get("similarity_fn_name")
        if similarity not in (None, "cosine") and not (normalize and similarity in ("dot", "euclidean")):
            warnings.warn(
                f"{config_path}: similarity_fn_name is {similarity!r:.40}, but this package compares vectors by cosine.",
                UserWarning,
                stacklevel=2,
            )
        return cls(
            folder,
            prompt=prompt,
            prompt_is_own=is_own_prompt,
            pooling=pooling,
            dense=dense,
            normalize=normalize,
            max_length=length,
            lower_case=bool(options.get("do_lower_case")),
            message_format=message.get("format"),
        )

    def length_for(self, tokenizer: Tokenizer, positions: int | None) -> int:
        """Return the maximum number of tokens per text that sentence-transformers uses, and check the token ids.

        `positions` is the number of positions of the model; None: no limit.

        Raises:
            ArtifactError: if sentence-transformers and this package tokenize a test text to different token ids.
        """
        # sentence-transformers would modify the tokenizer to lower-case, but a saved tokenizer has no such change.
        if self.lower_case and any(
            tokenizer(text)["input_ids"] != tokenizer(text.lower())["input_ids"] for text in _PROBES
        ):
            refuse_setting(self.folder, "do_lower_case", True, "Save it with a tokenizer that lower-cases, as BERT's.")
        length = self.max_length or tokenizer.model_max_length
        length = int(min(length, positions or _NO_LIMIT, _NO_LIMIT))
        if length < (self.max_length or 0):
            warnings.warn(
                f"{self.folder}: max_seq_length is {self.max_length}, but the model has {positions} positions in its config, so "
                "longer texts are cut there.",
                UserWarning,
                stacklevel=3,
            )
        if tokenizer.truncation_side != "right":
            refuse_setting(self.folder / "tokenizer_config.json", "truncation_side", tokenizer.truncation_side)
        if not self.prompt_is_own:
            return length
        for prompt in {self.prompt.query, self.prompt.document}:
            self._check_messages(tokenizer, prompt)
            sentence_tokenizer = SentenceTokenizer(tokenizer, prompt, length)
            for text in _PROBES:
                theirs = tokenizer(prompt.format(text), truncation=True, max_length=length)["input_ids"]
                if theirs != (ours := sentence_tokenizer([text])[0]):
                    raise ArtifactError(
                        f"{self.folder}: sentence-transformers tokenizes {text!r} with prompt {prompt.template!r} to "
                        f"{theirs[:30]}, but this package to {ours[:30]}, because it reads names of special tokens in a "
                        "prompt as plain text. Pass another prompt=…"
                    )
        return length

    def _check_messages(self, tokenizer: Tokenizer, prompt: PromptTemplate) -> None:
        """Check that the chat template, if texts go through it, joins prompt and text, and special tokens are added.

        sentence-transformers makes the prompt the system message, and the text the user message. Raises `ArtifactError`.
        """
        if self.message_format is None:
            return

        def message(role: str, text: str) -> dict[str, Any]:
            content = [{"type": "text", "text": text}] if self.message_format == "structured" else text
            return {"role": role, "content": content}

        has_processor = any(
            (self.folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")
        )
        with as_artifact_error(f"the chat template in {self.folder}"):
            for text in CHAT_PROBES:
                messages = [message("system", prompt.head)] if prompt.head else []
                rendered = tokenizer.apply_chat_template([*messages, message("user", text)], tokenize=False)
                # A processor adds special tokens to a rendering without them; a tokenizer alone does not.
                if rendered != prompt.format(text) or not has_processor:
                    hint = (
                        "Its chat template adds text or no special tokens. Pass another prompt, such as chat_template."
                    )
                    refuse_setting(self.folder, "modality_config", "message", hint)


def library_pooling(pooling: str, place: object) -> str:
    """Return the name in sentence-transformers of a pooling of this package; `place` is for the error message.

    Raises:
        ArtifactError: if sentence-transformers does not have the pooling.
    """
    if pooling not in OUR_POOLINGS:
        raise ArtifactError(
            f"{place} has pooling {pooling!r}; sentence-transformers supports {', '.join(OUR_POOLINGS)}."
        )
    return OUR_POOLINGS[pooling]


def library_prompts(prompts: SidePrompts, place: object) -> tuple[dict[str, str], str | None]:
    """Convert prompts for sentence-transformers: return a dictionary from name to prefix, and the name of the default.

    The default is None if queries and documents have different prompts, or if the prefix is empty. `place` is for the
    error message.

    Raises:
        ArtifactError: if a prompt is more than a prefix: text after `{text}`, edits, tokenization `segments`, or another
            `append` on the query than on the document.
    """
    for side in SIDES:
        prompt = prompts.of(side)
        same_append = prompt.append == prompts.query.append
        # Versions before 6 remove white space at the start of the prompt.
        plain = prompt.tokenization == "joined" and prompt.head == prompt.head.lstrip()
        if prompt.tail or prompt.edits or not (plain and same_append):
            raise ArtifactError(
                f"{place}: sentence-transformers adds a prompt only as text before {{text}} that starts without white space, "
                f"joined, without edits and with the same `append` on both sides; got the {side} prompt {prompt.template!r} of "
                f"{prompts}. Export one folder for each side: --as query, and --as document."
            )
    heads: dict[str, str] = {side: prompts.of(side).head for side in SIDES}
    if prompts.differ:
        return heads, None
    # For both sides: encode_query and encode_document do not use the default prompt, which `encode` uses.
    return (heads, "query") if prompts.query.head else ({}, None)


def tokenizer_config(tokenizer: Tokenizer, max_length: int, vocabulary: int) -> dict[str, Any]:
    """Return the contents of a `tokenizer_config.json` with which transformers 4 and 5 read `tokenizer.json` unchanged.

    It also makes names of special tokens in a text plain characters, as in `tokenizer.plain_ids`. Padding is a token with an
    id below `vocabulary`, the number of token embeddings.

    Raises:
        ArtifactError: without such a token.
    """
    named = tokenizer.special_tokens_map
    known = [named[name] for name in ("pad_token", "eos_token", "unk_token", "bos_token") if name in named]
    padding = next((token for token in known if tokenizer.convert_tokens_to_ids(token) < vocabulary), None)
    if padding is None:
        raise ArtifactError(
            "the tokenizer has no pad, eos, unk or bos token with an embedding. Set its pad_token, and save it again."
        )
    return {
        # This class reads tokenizer.json unchanged; the tokenizer class of a model may rebuild parts of the tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "pad_token": padding,
        "padding_side": "right",
        "truncation_side": "right",
        "model_max_length": max_length,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": list(tokenizer.model_input_names),
    }


def write_library_refusal(folder: Path) -> None:
    """Write a `modules.json` that stops sentence-transformers with an error, which names `angle-llm export`.

    Without this file, sentence-transformers would load the folder with mean pooling and without the prompt.
    """
    write_json(folder / MODULES_NAME, [{"idx": 0, "name": "0", "path": "", "type": _REFUSAL}])


def write_library_files(
    folder: Path, backbone: nn.Module, card: EncoderCard, *, prompts: Mapping[str, str], default: str | None = None
) -> None:
    """Write the configuration files of sentence-transformers into a model folder, in a form that versions 2 to 6 read.

    Args:
        card: pooling, maximum length, Dense modules and normalization.
        prompts: name → text that sentence-transformers adds before a text.
        default: name of the prompt that `encode` of sentence-transformers uses; None: no prompt.

    Raises:
        ArtifactError: for a pooling that sentence-transformers does not have.
    """
    # Text Embeddings Inference needs the first two keys.
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    flags[f"pooling_mode_{library_pooling(card.pooling, folder)}"] = True
    names = ["Transformer", "Pooling", *["Dense"] * card.dense, *(["Normalize"] if card.normalize else [])]
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{name}" if number else "", "type": _MODULE.format(name)}
        for number, name in enumerate(names)
    ]
    model_args: dict[str, Any] = {}
    if "add_pooling_layer" in inspect.signature(type(backbone).__init__).parameters:
        model_args["add_pooling_layer"] = False  # BERT's pooler is not stored and would be random
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    if getattr(config, "attn_logit_softcapping", None):  # Gemma-2: transformers 4 ignores it in other implementations
        model_args["attn_implementation"] = "eager"
    transformer = {"max_seq_length": card.max_length, "do_lower_case": False}
    write_json(folder / MODULES_NAME, modules)
    write_json(folder / "sentence_bert_config.json", transformer | ({"model_args": model_args} if model_args else {}))
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": dict(prompts), "default_prompt_name": default, "similarity_fn_name": "cosine"},
    )
    (folder / "1_Pooling").mkdir()
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": state_sizes(backbone)[0], **flags, "include_prompt": True},
    )


def _read_config(folder: Path, name: str) -> tuple[dict[str, Any], Path]:
    """Return the contents of a JSON file, or {} if it does not exist; and the path of the file."""
    config_path = folder / name
    return (read_json(config_path) if config_path.is_file() else {}), config_path


def read_modules(folder: Path) -> tuple[str, list[Path], bool]:
    """Read and check `modules.json`.

    Return the folder of Pooling in the model folder, the folders of the Dense modules, and whether embeddings are
    normalized. Raises `ArtifactError` for other modules.
    """
    path = folder / MODULES_NAME
    modules = read_json(path, list)
    with as_artifact_error(path):
        # Other types keep their full name and are refused below: they are code of the folder, which never runs.
        names = [re.sub(r"^sentence_transformers\..*\.", "", module["type"]) for module in modules]
        folders = [folder / module["path"] for module in modules]
    for module in modules:
        if Path(module["path"]).is_absolute() or ".." in Path(module["path"]).parts:
            raise ArtifactError(f"{path}: expected folders of modules inside {folder}, got {module['path']!r}.")
    if modules and modules[0]["path"]:
        raise ArtifactError(
            f"{path}: expected the Transformer module in {folder}, got {modules[0]['path']!r}. Open that folder with "
            "sentence-transformers, and save the model again."
        )
    dense = [folders[number] for number, name in enumerate(names) if name == "Dense"]
    expected = ["Transformer", "Pooling", *["Dense"] * len(dense)]
    if names not in (expected, [*expected, "Normalize"]):
        raise ArtifactError(
            f"{path}: expected Transformer, Pooling, and perhaps Dense and Normalize, got {', '.join(names)}. Open the "
            "folder with sentence-transformers."
        )
    for module in modules:
        check_settings(path, module, dict.fromkeys(("idx", "name", "path", "type")))  # None: any value
    if names[-1] == "Normalize":  # it must apply to the embedding
        config, config_path = _read_config(folders[-1], "config.json")
        embedding = ["sentence_embedding"]
        check_settings(config_path, config, {"module_input_name": embedding, "module_output_name": embedding})
    return modules[1]["path"], dense, names[-1] == "Normalize"


def _read_options(folder: Path) -> dict[str, Any]:
    """Read the options of the Transformer module, such as the maximum length, and check that they are supported."""
    # The name depends on the model in old folders, such as sentence_roberta_config.json. The library prefers
    # sentence_bert_config.json.
    config_path = folder / "sentence_bert_config.json"
    if not config_path.is_file():
        config_path = next(iter(sorted(folder.glob("sentence_*_config.json"))), config_path)
    options, config_path = _read_config(folder, config_path.name)
    check_settings(config_path, options, _SUPPORTED)
    modalities = options.get("modality_config") or {"text": _FORWARD[0]}
    if "text" not in modalities or any(values not in _MODALITIES.get(name, ()) for name, values in modalities.items()):
        refuse_setting(config_path, "modality_config", modalities)
    # Arguments of the tokenizer and the model.
    tokenizer = options.get("tokenizer_args") or options.get("processor_kwargs") or {}
    check_settings(config_path, tokenizer, _TOKENIZER_ARGUMENTS)
    check_settings(config_path, options.get("model_args") or options.get("model_kwargs") or {}, _MODEL_ARGUMENTS)
    length = tokenizer.get("model_max_length", options.get("max_seq_length"))
    return options | {"max_seq_length": None if length is None else int(length)}


def _read_pooling(folder: Path, path: str, prompt: SidePrompts) -> str:
    """Read the config of the Pooling module in folder / path, and return the name of the pooling in this package."""
    config_path = folder / path / "config.json"
    config = read_json(config_path)
    flag = "pooling_mode"
    set_flags = [key.removeprefix(f"{flag}_") for key in config if key.startswith(f"{flag}_") and config[key]]
    modes = config.get(flag) or set_flags or "mean"
    mode = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    pooling_of_mode = {
        suffix: ours for name, ours in LIBRARY_POOLINGS.items() for suffix in (name, re.sub("_tokens?$", "", name))
    }
    if not isinstance(mode, str) or mode not in pooling_of_mode:
        refuse_setting(config_path, flag, modes)
    templates = [prompt.of(side) for side in SIDES]
    has_words = any(template.template != PLACEHOLDER or template.chat_template for template in templates)
    if not config.get("include_prompt", True) and has_words:
        refuse_setting(
            config_path, "include_prompt", False, "Its prompt is part of the state of each token, but not pooled."
        )
    return pooling_of_mode[mode]


def _read_prompts(config: dict[str, Any], config_path: Path) -> SidePrompts:
    """Return the prompts in a sentence-transformers config. Raises `ArtifactError` if the default prompt is missing.

    These are the prompts named after queries and documents; if both are missing, the default prompt is used for both.
    """
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ArtifactError(f"{config_path}: `default_prompt_name` is {default!r:.80}, which is not in `prompts`.")
    present = [name for name in ("query", *_DOCUMENT_NAMES) if prompts.get(name) is not None]
    names = {"query": "query" if "query" in present else None}
    names["document"] = next((name for name in present if name != "query"), None)
    if not any(prompts.get(name) for name in names.values() if name):  # the library saves empty prompts of both names
        names = dict.fromkeys(SIDES, default)
    return SidePrompts(**{side: _template(name, prompts) for side, name in names.items()})


def _template(name: str | None, prompts: dict[str, str | None]) -> PromptTemplate:
    """Return the prompt template that puts the prefix `prompts[name]` before a text.

    It is the prompt `plain` if the name is None or the prefix is empty.
    """
    text = prompts.get(name) if name is not None else None
    if name is None or not text:
        return load_prompt("plain")
    return PromptTemplate(name, text + PLACEHOLDER, source="config_sentence_transformers.json of the model")
