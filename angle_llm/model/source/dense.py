"""Dense modules of sentence-transformers: linear layers that are applied to the pooled state of a text.

A folder of the module has `config.json` (sizes and activation) and `model.safetensors`. Saved encoders and exports use the
same files, in `2_Dense`, `3_Dense`, …
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from angle_llm.io import write_json
from angle_llm.model.source.checks import ArtifactError, as_artifact_error, check_settings, read_json

DENSE_FILES = ("*_Dense/config.json", "*_Dense/model.safetensors")
"""Patterns of the files of Dense modules in a model folder."""
_WEIGHTS = "model.safetensors"
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    f"{activation.__module__}.{activation.__name__}": activation
    for activation in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
}
"""Class path of an activation in `config.json` → class."""


class Dense(nn.Module):
    """activation(W x + b) of the embeddings of texts, in float32; the module Dense of sentence-transformers."""

    def __init__(self, linear: nn.Linear, activation: str) -> None:
        super().__init__()
        self.linear = linear
        self.path = activation
        """Class path of the activation in `config.json`."""
        self.activation = _ACTIVATIONS[activation]()

    def forward(self, x_RD: Tensor) -> Tensor:
        x: Tensor = self.activation(self.linear(x_RD))
        return x


def dense_folders(folder: Path, count: int) -> list[Path]:
    """Return the folders of `count` Dense modules in a saved encoder or an export: 2_Dense, 3_Dense, …"""
    return [folder / f"{number}_Dense" for number in range(2, 2 + count)]


_SETTINGS: dict[str, Sequence[object] | None] = {
    "in_features": None,
    "out_features": None,
    "bias": None,
    "activation_function": list(_ACTIVATIONS),
    "module_input_name": ["sentence_embedding"],
    "module_output_name": ["sentence_embedding"],
}
"""Keys of `config.json` of a Dense module, and the values that are supported (see `check_settings`)."""


def read_dense(folders: Iterable[Path], columns: int) -> nn.Sequential:
    """Read the Dense modules in folders, in the order of their application.

    Args:
        folders: folders of the modules.
        columns: number of dimensions of the pooled state, the input of the first module.

    Raises:
        ArtifactError: for a damaged or unsupported module, or sizes that do not fit.
    """
    modules: list[Dense] = []
    for folder in folders:
        with as_artifact_error(folder):
            config = read_json(folder / "config.json")
            check_settings(folder / "config.json", config, _SETTINGS)
            linear = nn.Linear(columns, config["out_features"], bias=config["bias"])
            weights = {name: tensor.float() for name, tensor in load_file(folder / _WEIGHTS).items()}
            dense = Dense(linear, config["activation_function"])
            dense.load_state_dict(weights)
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise ArtifactError(f"{folder / _WEIGHTS} has values that are not finite. Fetch or save it again.")
        modules.append(dense)
        columns = linear.out_features
    return nn.Sequential(*modules)


def write_dense(folder: Path, dense: nn.Sequential | None) -> None:
    """Write Dense modules into a model folder; nothing for None."""
    modules: list[Any] = list(dense or ())
    for path, module in zip(dense_folders(folder, len(modules)), modules, strict=True):
        path.mkdir()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
        save_file(weights, path / _WEIGHTS)
        linear = module.linear
        sizes: dict[str, Any] = {"in_features": linear.in_features, "out_features": linear.out_features}
        write_json(path / "config.json", {**sizes, "bias": linear.bias is not None, "activation_function": module.path})


def dense_fingerprint(dense: nn.Sequential) -> bytes:
    """Return a hash of the activations and weights of Dense modules; empty without modules."""
    digest = hashlib.sha256()
    modules: list[Any] = list(dense)
    for module in modules:
        digest.update(module.path.encode())
        for name, tensor in module.state_dict().items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.to("cpu", torch.float32).numpy().tobytes())
    return digest.digest() if modules else b""
