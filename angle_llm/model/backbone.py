"""The language model underneath: where its weights are, how they are loaded, which kind it is."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from angle_llm.config import unknown_name
from angle_llm.model.checks import (
    EXPORT_NAME,
    ArtifactError,
    as_artifact_error,
    check_model_files,
    check_states,
    is_saved_encoder,
)
from angle_llm.model.quantization import ORIGINAL, bits_of, check_bits, quantize

PACKAGE_SCHEME = "package:"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILE_ENDINGS = {".gguf", ".safetensors", ".bin", ".pt", ".json", ".yaml"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BackboneLocation:
    """A backbone as `transformers` wants it named: a folder or hub id, and the GGUF file inside the folder if it is one."""

    name: str
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's disk, not on the hub."""
        return Path(self.name).is_dir()

    @property
    def arguments(self) -> dict[str, str]:
        """Keyword arguments for `from_pretrained`."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def locate(path_or_id: str) -> BackboneLocation:
    """Finds a backbone named by a folder, a `.gguf` file, a hub id, or `package:NAME/path/inside`.

    The last form names a file or folder inside an installed Python package, so that settings hold on any machine.

    Raises:
        FileNotFoundError: if nothing is there; says what was looked for.
        ArtifactError: for a folder that was exported for another library.
    """
    path = _inside_package(path_or_id) if path_or_id.startswith(PACKAGE_SCHEME) else Path(path_or_id).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return BackboneLocation(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = path / "model"  # of a run directory
            is_run = is_saved_encoder(inside) or (inside / "config.json").is_file()
            raise FileNotFoundError(
                f"{path} holds no config.json, so it is not a model folder. Give a folder written by save_pretrained, "
                "or the path of a .gguf file." + (f" Did you mean {inside}?" if is_run else "")
            )
        if (path / EXPORT_NAME).is_file():
            raise ArtifactError(
                f"{path} was exported for another library ({EXPORT_NAME} says which): its tokenizer words texts, and here they "
                "would be worded twice. Open it with that library, or here the encoder it was made from."
            )
        return BackboneLocation(str(path))
    meant_locally = "/" in path_or_id and path.parent.is_dir()  # runs/typo, beside a folder runs
    if _HUB_ID.fullmatch(path_or_id) and path.suffix not in _FILE_ENDINGS and not meant_locally:
        return BackboneLocation(path_or_id)
    raise FileNotFoundError(
        f"no model at {path}. Give a folder with a config.json, a .gguf file, a hub id such as "
        "NousResearch/Llama-2-7b-hf, or package:NAME/path/inside."
    )


def absolute_name(path_or_id: str) -> str:
    """The name as it holds from any working directory: a local path absolute, `package:` and hub names as they are."""
    path = Path(path_or_id).expanduser()
    return str(path.absolute()) if path.exists() else path_or_id


def count_positions(backbone: nn.Module) -> int | None:
    """The longest sequence the backbone was made for, None if its config does not say."""
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    positions: int | None = getattr(config, "max_position_embeddings", None)
    for name, module in backbone.named_modules():
        padding_id = getattr(module, "padding_idx", None)
        if positions and name.endswith("position_embeddings") and padding_id is not None:
            positions -= padding_id + 1  # RoBERTa and its kin count from padding_idx + 1
    return positions


def _inside_package(reference: str) -> Path:
    package, _, inside = reference.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{reference}: no Python package {package!r} is installed here. Install it with pip.")
    return Path(next(iter(spec.submodule_search_locations))) / inside


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a setting; an unknown name is a `ValueError` that tells the nearest."""
    if name not in DTYPES:
        raise ValueError(unknown_name("dtype", name, [*DTYPES, "auto"]))
    return DTYPES[name]


def load_tokenizer(location: BackboneLocation, revision: str | None = None) -> Any:
    """The tokenizer beside the weights."""
    from transformers import AutoTokenizer

    with as_artifact_error(f"the tokenizer in {location.name}") if location.is_local else nullcontext():
        return AutoTokenizer.from_pretrained(
            location.name, revision=revision, trust_remote_code=False, **location.arguments
        )


def open_pretrained(kind: str, location: BackboneLocation, *, dtype: str = "auto", revision: str | None = None) -> Any:
    """A model of one of transformers' automatic classes, such as AutoModel, with every weight it has in its files.

    `dtype` "auto" keeps the dtype the weights are stored in; a GGUF file is dequantized to float32. Code from a folder or the
    hub is never run.

    Raises:
        ArtifactError: for a folder that cannot be opened, or lacks weights; they would be random.
    """
    import transformers

    arguments: dict[str, Any] = dict(location.arguments)
    if location.gguf_file:
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    else:
        arguments["use_safetensors"] = True
    arguments["dtype"] = torch_dtype(dtype) if dtype != "auto" else ("float32" if location.gguf_file else "auto")
    if location.is_local and not location.gguf_file:
        check_model_files(Path(location.name))
    with as_artifact_error(location.name) if location.is_local else _told_of_pickles(location.name):
        model, report = getattr(transformers, kind).from_pretrained(
            location.name, revision=revision, trust_remote_code=False, output_loading_info=True, **arguments
        )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ArtifactError(
            f"{location.name} lacks {len(missing)} of the backbone's tensors, {missing[0]} first. The files are "
            "damaged or belong to another architecture; fetch or save them again."
        )
    if location.gguf_file:
        _forget_quantisation(model)
    return model


def load_backbone(
    location: BackboneLocation,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    bits: int | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Loads the layers without a language-model head or pooler, in evaluation mode, on `device`.

    `dtype` "auto" keeps the dtype the weights are stored in; a GGUF file is dequantized to float32. With `bits` the linear
    layers are then held in 4 or 8 bits (see `quantized`), one by one, and compute in that dtype. A folder that
    bitsandbytes' weights are stored in stays as it is.
    Code from a folder or the hub is never run (`trust_remote_code` is off).

    Raises:
        ArtifactError: if weights of the backbone are missing from its files; they would be random.
        QuantizationError: if it cannot be held in so many bits.
        ValueError: for an encoder-decoder.
    """
    if bits is not None:
        check_bits(bits)  # before minutes of loading
    model = open_pretrained("AutoModel", location, dtype=dtype, revision=revision)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{location.name} is an encoder-decoder ({model.config.model_type}). A sentence encoder is made from a "
            "decoder-only model (LLaMA, Mistral, Qwen, …) or an encoder (BERT, RoBERTa, …)."
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # BERT's pooler feeds a head that is not here; its weights would never see a gradient
    if bits is not None and bits_of(model) != bits:
        setattr(model, ORIGINAL, weights_fingerprint(model))
        quantize(model, bits, device)
    loaded: nn.Module = model.eval().to(device)
    return loaded


@contextmanager
def _told_of_pickles(repo: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if "cannot be loaded with `safetensors`" not in str(error):
            raise
        raise ArtifactError(
            f"{repo} on the hub has no weights in safetensors. Pickles can run any code when they are loaded, and are not "
            "opened: convert them where you trust them (save_pretrained writes safetensors), or ask its authors to."
        ) from error


def _forget_quantisation(model: nn.Module) -> None:
    """The weights are plain now; with the mark left on them, `save_pretrained` refuses."""
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False  # type: ignore[assignment]


@torch.no_grad()
def is_causal(backbone: nn.Module) -> bool:
    """Whether a token's state depends on the tokens before it only: asked of the model itself.

    Two sequences that differ in their last token are encoded; a causal model gives equal states before it.

    Raises:
        ArtifactError: if its states are not finite.
    """
    states = check_states(backbone)
    # Equal inputs in equal shapes give equal bits; the tolerance is for kernels that split work by row.
    return bool((states[0, :-1] - states[1, :-1]).abs().max() <= 1e-3 * states.abs().max())


def weights_fingerprint(backbone: nn.Module) -> str:
    """A short hash that tells two sets of base weights apart: names, shapes, and a sample of each tensor's values.

    Values are rounded through bfloat16, so that one set of weights has one fingerprint in float32 and in bfloat16. And a
    backbone that `load_backbone` quantized has that of the weights it was made from: what an adapter needs in its base's
    place is the same model, and the card says in which bits to hold it.
    """
    made_from: str | None = getattr(backbone, ORIGINAL, None)
    if made_from is not None:
        return made_from
    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations of the linear layers for one token. Attention between tokens is not counted (2 % at 7B and 50 tokens); the
    last layer is, whole, though half of it runs for pooled tokens alone (2 to 3 % at 30 layers)."""

    forward: int
    """Two for each weight."""
    backward: int
    """Two for each weight gradients pass through, and two for each weight that has a gradient."""

    @classmethod
    def of(cls, backbone: nn.Module) -> FlopsPerToken:
        """Counted from the shapes of the layers."""
        forward = backward = 0
        for module in backbone.modules():
            # GPT-2's Conv1D is a linear layer with its weight transposed.
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                weight: torch.Tensor = module.weight  # type: ignore[assignment]
                # Not the size of the tensor where it is a layer's: in 4 bits two weights are packed into one byte.
                size = module.in_features * module.out_features if isinstance(module, nn.Linear) else weight.numel()
                forward += 2 * size
                backward += 2 * size * (2 if weight.requires_grad else 1)
        return cls(forward, backward)
