"""Whether a model folder may be opened, and whether the model in it computes.

Files can have any origin. Before a library opens a folder, its weights must be safetensors inside it, and its
configuration must not describe more than they hold; after, tokens must have their embeddings, and states must be finite.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

CARD_NAME = "angle_llm.json"

EXPORT_NAME = "angle_llm_export.json"
"""In a folder made for another library: what was put in. Such a folder words texts itself."""

LARGEST_JSON = 1 << 28
"""Bytes; the largest there are, tokenizers, take a tenth of it."""


class ArtifactError(ValueError):
    """A saved directory that cannot be used, with what is wrong in it."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that anybody may have written.

    Raises:
        FileNotFoundError: if there is no file.
        ArtifactError: for anything but an object in UTF-8 of a size and depth that JSON files have.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it has more than {LARGEST_JSON} bytes")
        values: Any = json.loads(path.read_bytes().decode())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not valid JSON ({error}). Fetch or save it again.") from error
    return values


def check_files(folder: Path) -> None:
    """Refuses a folder with a link that leads out of it: what is read as an encoder's would be something else.

    The folder itself may be a link, and in the hub's cache files are links to the blobs beside the snapshots.

    Raises:
        ArtifactError: naming the link.
    """
    real = Path(os.path.realpath(folder))
    rooms = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    for path in sorted(real.rglob("*")):
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not any(target.is_relative_to(room) for room in rooms):
            raise ArtifactError(
                f"{path} is a link that leads out of its folder, to {target}. Put the file itself there."
            )


@contextmanager
def as_artifact_error(place: object) -> Iterator[None]:
    """What a library raises over the files of a folder becomes an `ArtifactError` that names the folder and the reason.

    Libraries raise anything over a damaged file: a KeyError, a TypeError, a Rust panic. This package's own errors pass as
    they are, and so does what the machine lacks: memory, a permission, a working GPU. A package that a folder asks for and
    that is not installed is told as that.
    """
    try:
        yield
    except ImportError as error:
        raise ArtifactError(f"{place} cannot be opened without another package: {error}") from error
    except BaseException as error:
        kind = type(error).__name__
        foreign = isinstance(error, Exception) or kind == "PanicException"
        if not foreign or _is_of_the_machine(error) or _is_own(error):
            raise
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"{place} cannot be opened: {kind}: {reason if len(reason) < 400 else reason[:400] + '…'}. A file in it is damaged, "
            "or not of a kind that is read here; fetch or save it again."
        ) from error


def _is_of_the_machine(error: BaseException) -> bool:
    # torch says in words alone that memory or the GPU failed.
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in ("allocate memory", "CUDA"))
    return told or isinstance(error, (MemoryError, PermissionError)) or type(error).__name__ == "OutOfMemoryError"


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("angle_llm.") or (
        isinstance(error, (ValueError, OSError, TypeError)) and raised_here(error)
    )


def raised_here(error: BaseException) -> bool:
    """Whether an error was raised by this package, so that its message is written for the user; not by a library."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("angle_llm.")


def is_saved_encoder(path: str | Path) -> bool:
    """Whether a path is a directory that holds a card."""
    return (Path(path).expanduser() / CARD_NAME).is_file()


_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}

_NAMES_FILES_OR_CODE = {"transformers_weights"}
"""Keys of a configuration that lead to other files than the usual ones."""

_COUNTS_MODULES = re.compile(r"layers?$|^n_layer|blocks?$|experts?$|depth|branches|groups|stages|codebooks")

_PACKED = 16
"""Weights that a stored number may hold: 4 bits in 32 are 8."""

_SMALL = 50_000_000
"""So many weights are no danger to anybody's memory."""

_FEWEST_MODULES = 256
"""So many are made in no time, whatever the weights are."""


def check_model_files(folder: Path) -> None:
    """What has to be true of a model folder before a library opens it: its weights are safetensors that lie in it, and what
    its configuration asks for is no more than they hold.

    Raises:
        ArtifactError: for anything else, with what to do.
    """
    from safetensors import SafetensorError, safe_open

    config = read_json(folder / "config.json")
    if (folder / "adapter_config.json").exists():
        raise ArtifactError(
            f"{folder} holds an adapter beside a model. Put them in two folders, and name the model and adapter=…"
        )
    for key in _NAMES_FILES_OR_CODE & config.keys():
        raise ArtifactError(f"{folder / 'config.json'}: `{key}` ({config[key]!r}) is not followed here. Remove it.")
    tensors = stored = 0
    for path in _weights_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                tensors += len(names)
                stored += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{path} cannot be read: {error}. Fetch or save it again.") from error
    # Modules are made before weights are looked for, one by one, in a time and memory without bound.
    for key, value in _numbers(config):
        if _COUNTS_MODULES.search(key) and value > max(tensors, _FEWEST_MODULES):
            raise ArtifactError(
                f"{folder / 'config.json'}: `{key}` is {value}, and the weights are {tensors} tensors. One of them is "
                "damaged; fetch or save them again."
            )
    # And then memory is taken for all of them, whatever the files hold.
    with as_artifact_error(folder):
        asked = _count_numbers(folder)
    if asked > _PACKED * stored + _SMALL:
        raise ArtifactError(
            f"{folder / 'config.json'} describes a model of {asked} weights, and the files hold {stored}. One of them is "
            "damaged; fetch or save them again."
        )


def _count_numbers(folder: Path) -> int:
    """Weights of the model that a folder's configuration describes, made without memory for them."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    build: Any = AutoModel.from_config
    with torch.device("meta"):
        skeleton = build(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in skeleton.parameters())


def _weights_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, as `transformers` would choose them."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        pickled = next((path.name for path in sorted(folder.iterdir()) if path.suffix in _PICKLES), None)
        raise ArtifactError(
            f"{folder} holds no model.safetensors. "
            + (
                f"{pickled} is a pickle, which can run any code when it is loaded, and is not opened. "
                if pickled
                else ""
            )
            + "Load the model where you trust it, and save it with save_pretrained, which writes safetensors."
        )
    shards = read_json(index).get("weight_map")
    names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    for name in sorted(names) or [""]:
        # In the folder itself, under a name of its own: an index could name any file of the machine.
        if not re.fullmatch(r"\w[\w.-]*\.safetensors", name) or not (folder / name).is_file():
            raise ArtifactError(
                f"{index} names the weights file {name!r:.200}, which is not in {folder}. Fetch or save it again."
            )
    return [folder / name for name in sorted(names)]


def _numbers(values: object, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, with the key it stands under."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _numbers(value, name)
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value, key)
    elif isinstance(values, int | float):
        yield key, values


@torch.no_grad()
def check_states(backbone: nn.Module) -> torch.Tensor:
    """States (2, 4, D) of two sequences that differ in their last token, float32: the smallest proof that weights compute.

    Raises:
        ArtifactError: if they are not finite.
    """
    device = next(backbone.parameters()).device
    ids = torch.tensor([[7, 5, 3, 1], [7, 5, 3, 2]], device=device)
    was_training = backbone.training
    backbone.eval()
    states: torch.Tensor = backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float()
    backbone.train(was_training)
    if not bool(torch.isfinite(states).all()):
        dtype = str(next(backbone.parameters()).dtype).removeprefix("torch.")
        raise ArtifactError(
            f"the states of this {type(backbone).__name__} are not finite in {dtype}: its weights or its adapter are damaged, "
            "or it needs another dtype, such as bfloat16 in place of float16."
        )
    return states


def check_vocabulary(backbone: nn.Module, tokenizer: Any, where: object) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for, and embeddings that are not finite.

    Names of special tokens may be more than were embedded: in a text they are plain characters.

    Raises:
        ArtifactError: naming the first such token.
    """
    embeddings: Any = backbone.get_input_embeddings()  # type: ignore[operator]
    rows = int(embeddings.num_embeddings)
    added = tokenizer.get_added_vocab()
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= rows and token not in added]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}  # named or not
    beyond += [token for token, number in added.items() if number >= rows and number not in special]
    if beyond:
        raise ArtifactError(
            f"the tokenizer in {where} has {len(beyond)} tokens, {beyond[0]!r:.80} first, beyond the model's {rows} "
            "embeddings. It is another model's, or damaged; fetch or save it again."
        )
    weight = embeddings.weight
    if weight.is_floating_point() and not bool(torch.isfinite(weight.sum(dtype=torch.float32))):
        raise ArtifactError(
            f"the embeddings of {where} are not finite. Its weights are damaged; fetch or save them again."
        )
