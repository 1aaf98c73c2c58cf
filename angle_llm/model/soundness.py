"""Whether a model folder may be opened, and whether what came of it computes.

Files come from anywhere. Before a library opens a folder, its weights must be safetensors that lie in it, and its
configuration must not ask for more than they hold; after, tokens must have their embeddings, and states must be finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from angle_llm.model.artifact import ArtifactError, read_json, told_as_damage

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
    with told_as_damage(folder):
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
