"""Check model folders before a library opens them, and the loaded model afterwards.

Files are untrusted. Weights must be safetensors files, not pickle files. After loading, every token must have an
embedding, test texts must have known tokens, and states must be finite.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from angle_llm.device import evaluating, is_out_of_memory
from angle_llm.settings.parsing import MissingLibraryError, SettingsError

CARD_NAME = "angle_llm.json"
EXPORT_NAME = "angle_llm_export.json"
"""Name of the file that marks a folder exported for another library, whose tokenizer can apply the prompt itself."""
MERGE_NAME = "merge.json"
"""Name of the file with the provenance of a merged model: its base and its adapter."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "bpe.codes", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
)  # fmt: skip
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""Files of a multimodal model beside its weights, configuration and tokenizer."""

PROBE_TEXTS = ("A man is eating 3 apples.", "Привет", "你好，世界", "مرحبا", "नमस्ते", "안녕", "ACGT", "こんにちは")


class ArtifactError(ValueError):
    """Raised if a model folder cannot be used; the message gives the reason."""


def is_saved_encoder(path: str | Path) -> bool:
    """Return whether a path is a folder that `SentenceEncoder.save_pretrained` wrote: it contains `angle_llm.json`."""
    return (Path(path).expanduser() / CARD_NAME).is_file()


def model_inside(folder: Path) -> str:
    """Return the end of an error message that names the model in a run directory, or how to save a peft adapter; or ""."""
    if (folder / "adapter_config.json").is_file():
        return f" Save {folder} with its prompt first: from_pretrained(ADAPTER, prompt=…).save_pretrained(FOLDER) in Python."
    inside = folder / "model"
    return f" Did you mean {inside}?" if is_saved_encoder(inside) or (inside / "config.json").is_file() else ""


def read_json(path: Path, kind: type[dict[Any, Any] | list[Any]] = dict) -> Any:
    """Return the JSON object in an untrusted file; with `kind=list`, the JSON array.

    Raises:
        FileNotFoundError: if the file does not exist.
        ArtifactError: if the file is not valid JSON in UTF-8, or contains another type.
    """
    try:
        values: Any = json.loads(path.read_bytes().decode())
        if not isinstance(values, kind):
            raise ValueError(f"it is not a JSON {'object' if kind is dict else 'array'}")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} is not valid JSON ({error}). Fetch or save it again.") from error
    return values


def refuse_setting(place: Path, key: str, value: object, hint: str = "") -> NoReturn:
    """Raise `ArtifactError` for a setting of a model file that this package does not support; `hint` states what to do."""
    raise ArtifactError(
        f"{place}: `{key}` is {value!r:.120}, which this package does not support, so it would give other vectors. "
        + (hint or "Open the folder with the library that saved it.")
    )


def check_settings(path: Path, values: Mapping[str, Any], known: Mapping[str, Sequence[object] | None]) -> None:
    """Check that a file of another library has no setting that changes embeddings and that this package ignores.

    `known` maps a key to the values that are supported; None: any value. Values such as null and false are always allowed.

    Raises:
        ArtifactError: for another key or value; the message names the file and the key.
    """
    for key, value in values.items():
        supported = known.get(key, ())
        if value and supported is not None and value not in supported:
            refuse_setting(path, key, value)


def check_links(folder: Path) -> None:
    """Check that no symbolic link in a folder points outside the folder.

    The folder itself can be a link. In the cache of the hub, files can be links to the folder `blobs` of the repository.

    Raises:
        ArtifactError: if a link points outside; the message names the link.
    """
    real = Path(os.path.realpath(folder))
    allowed = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    for path in sorted(real.rglob("*")):
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not any(target.is_relative_to(allowed_folder) for allowed_folder in allowed):
            raise ArtifactError(f"{path} is a link out of its folder, to {target}. Replace it with the file itself.")


@contextmanager
def as_artifact_error(place: object) -> Iterator[None]:
    """Convert errors that a library raises inside this context to an `ArtifactError` with the folder and the reason.

    Libraries raise errors of any type for a damaged file, such as KeyError or TypeError. Errors of settings, missing
    libraries and memory are not converted. `place` names the folder or file.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ArtifactError | SettingsError | MissingLibraryError) or is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {text:.400}"
        advice = "If a file is damaged, fetch or save it again."
        if "trust_remote_code" in text:
            reason = "it needs Python code of its repository, which is never executed"
            advice = "Use a model that transformers contains."
        elif "use_safetensors" in text:
            reason = "it has no safetensors weights"
            advice = "Load it where you trust it, and call save_pretrained; of a GGUF repository, download and name the file."
        elif "No space left" in text:
            advice = "Free disk space, or set HF_HOME to a folder on a larger disk."
        raise ArtifactError(f"{place} cannot be opened: {reason}. {advice}") from error


def check_model_files(folder: Path) -> None:
    """Check the files of a model folder before a library opens them.

    Raises:
        ArtifactError: if weights are not in safetensors files, the folder also contains an adapter, or the configuration
            names other weight files.
    """
    config = read_json(folder / "config.json")
    if (folder / "adapter_config.json").exists():
        raise ArtifactError(
            f"{folder} contains an adapter and a model. Move the adapter to a folder of its own, and pass it as adapter=…"
        )
    if "transformers_weights" in config:  # names other weight files
        raise ArtifactError(f"{folder / 'config.json'}: `transformers_weights` is not supported. Remove it.")
    index = folder / "model.safetensors.index.json"
    weight_files = read_json(index).get("weight_map", {}).values() if index.exists() else ()
    if not any(folder.glob("model*.safetensors")) or not all(name.endswith(".safetensors") for name in weight_files):
        raise ArtifactError(
            f"{folder} has no model.safetensors, or an index that names other files. A pickle, such as pytorch_model.bin, can "
            "run any code when it is loaded: load it where you trust it, and save the model with save_pretrained, which writes "
            "safetensors."
        )


def check_states(backbone: nn.Module) -> torch.Tensor:
    """Return the hidden states (2, 4, D) of two test sequences, in float32, and check that they are finite.

    The sequences have 4 tokens and differ in the last token only.

    Raises:
        ArtifactError: if a state is not finite.
    """
    with evaluating(backbone) as device:
        ids = torch.tensor([[7, 5, 3, 1], [7, 5, 3, 2]], device=device)
        states: torch.Tensor = backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float()
    if not bool(torch.isfinite(states).all()):
        dtype = str(next(backbone.parameters()).dtype).removeprefix("torch.")
        raise ArtifactError(
            f"the states of this {type(backbone).__name__} are not finite in {dtype}: its weights or its adapter are "
            "damaged, or it needs another dtype, such as bfloat16 in place of float16."
        )
    return states


def check_loaded(backbone: nn.Module, tokenizer: Any, place: str | Path) -> None:
    """Check that a loaded tokenizer fits its model and that all weights are finite; `place` is the folder.

    A special token without an embedding is allowed, such as the `<pad>` of early copies of LLaMA-2.

    Raises:
        ArtifactError: if a token has no embedding, the tokenizer has no token for any test text, or a weight is not
            finite. The message names the folder and the token or weight.
    """
    # Token ids beyond the embeddings.
    embeddings: Any = backbone.get_input_embeddings()  # type: ignore[operator]
    rows = int(embeddings.num_embeddings)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= rows and number not in special]
    if beyond:
        raise ArtifactError(
            f"the tokenizer in {place} has {len(beyond)} tokens, {beyond[0]!r:.80} first, beyond the model's {rows} "
            "embeddings. The tokenizer belongs to another model or is damaged; fetch or save it again."
        )
    # A tokenizer without a vocabulary.
    ids = tokenizer(list(PROBE_TEXTS), add_special_tokens=False, verbose=False)["input_ids"]
    if all(number == tokenizer.unk_token_id for text_ids in ids for number in text_ids):
        raise ArtifactError(
            f"the tokenizer in {place} has no token for any text: {PROBE_TEXTS[0]!r} has the ids {ids[0]}. Copy the "
            "tokenizer files of this model into the folder (tokenizer.json is enough for most models)."
        )
    # Weights that are not finite.
    for name, weight in backbone.named_parameters():  # a probe can miss them: fused attention skips some values
        if not weight.is_floating_point() or not weight.numel():
            continue
        values = weight.detach()  # otherwise autograd keeps the copy in float32
        extremes = (values.float() if values.itemsize == 1 else values).aminmax()  # `aminmax` does not support FP8
        if not all(bool(value.isfinite()) for value in extremes):  # both are NaN if one weight is NaN
            raise ArtifactError(f"{place}: {name} is not finite. The weights are damaged; fetch or save them again.")
