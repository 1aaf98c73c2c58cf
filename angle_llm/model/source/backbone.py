"""The language model: where its weights are, how they are loaded, and what kind it is."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.model.source.checks import (
    ArtifactError,
    as_artifact_error,
    check_model_files,
    check_states,
)
from angle_llm.model.source.quantization import ORIGINAL, bits_of, check_bits, quantize
from angle_llm.settings.parsing import unknown_name

_PACKED = 16
"""Most weights that a stored number can hold: 4 bits in 32 are 8."""
_SMALL = 50_000_000
"""Weights that fit into any memory."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BackboneLocation:
    """A backbone as `transformers` names it: a folder or hub id, and the GGUF file in the folder, if any."""

    name: str
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, not on the hub."""
        return Path(self.name).is_dir()

    @property
    def arguments(self) -> dict[str, str]:
        """Keyword arguments for `from_pretrained`."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    @property
    def path(self) -> Path:
        """The folder or GGUF file of a local one."""
        return Path(self.name) / (self.gguf_file or "")


def absolute_name(path_or_id: str) -> str:
    """Make a local path absolute; return hub ids and other names unchanged."""
    path = Path(path_or_id).expanduser()
    return str(path.absolute()) if path.exists() else path_or_id


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a setting; an unknown name is a `ValueError` with the nearest one."""
    if name not in DTYPES:
        raise ValueError(unknown_name("dtype", name, [*DTYPES, "auto"]))
    return DTYPES[name]


def torch_device(name: str | torch.device | None) -> torch.device:
    """Return the torch device of a name; for None, the GPU if there is one, else the CPU.

    Raises:
        ValueError: for an unknown device, or one that this machine does not have.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu, cuda, cuda:1, mps, …; got {name!r}.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
        raise ValueError(
            f"device {str(device)!r}: this machine has {found} that torch can use. Use cpu, or unset device."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {str(device)!r}: this machine has no MPS device. Use cpu, or unset device.")
    return device


def load_tokenizer(location: BackboneLocation, revision: str | None = None) -> Any:
    """Load the tokenizer beside the weights."""
    from transformers import AutoTokenizer

    with as_artifact_error(f"the tokenizer in {location.name}") if location.is_local else nullcontext():
        return AutoTokenizer.from_pretrained(
            location.name, revision=revision, trust_remote_code=False, **location.arguments
        )


def open_pretrained(kind: str, location: BackboneLocation, *, dtype: str = "auto", revision: str | None = None) -> Any:
    """Load a model with a class such as AutoModel; all its weights must be in the files.

    `dtype` "auto" keeps the stored dtype; a GGUF file is dequantized to float32. Code of a model never runs.

    Raises:
        ArtifactError: for a folder that cannot be opened, or lacks weights; they would be random.
    """
    import transformers

    arguments: dict[str, Any] = dict(location.arguments)
    if not location.gguf_file:
        arguments["use_safetensors"] = True
    elif hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    arguments["dtype"] = torch_dtype(dtype) if dtype != "auto" else ("float32" if location.gguf_file else "auto")
    if location.is_local and not location.gguf_file:
        stored = check_model_files(Path(location.name))
        with (
            as_artifact_error(location.name),
            torch.device("meta"),
        ):  # libraries make all modules before they read weights
            described = sum(parameter.numel() for parameter in empty_backbone(load_config(location)).parameters())
        if described > _PACKED * stored + _SMALL:
            raise ArtifactError(
                f"{location.name}/config.json describes a model of {described} weights, but the files hold {stored}. One of "
                "the two is damaged; fetch or save them again."
            )
    with as_artifact_error(location.name) if location.is_local else _explained(location.name), _without_load_report():
        model, report = getattr(transformers, kind).from_pretrained(
            location.name, revision=revision, trust_remote_code=False, output_loading_info=True, **arguments
        )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ArtifactError(
            f"{location.name} lacks {len(missing)} tensors of the model, {missing[0]} first. The files are damaged or belong "
            "to another architecture; fetch or save them again."
        )
    if location.gguf_file:
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):  # with this mark on dequantized weights, `save_pretrained` refuses
                delattr(owner, name)
        model.is_quantized = False
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Suppress the report of transformers on unused or missing weights; show it if loading fails.

    Missing weights are refused by `open_pretrained`; those of a pooler, which is dropped, are not needed.
    """
    logger = logging.getLogger("transformers.modeling_utils")
    reports: list[logging.LogRecord] = []

    def hold_back(record: logging.LogRecord) -> bool:
        if "LOAD REPORT" not in record.getMessage():
            return True
        reports.append(record)
        return False

    logger.addFilter(hold_back)
    try:
        yield
        reports.clear()
    finally:
        logger.removeFilter(hold_back)
        for record in reports:
            logger.handle(record)


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if "cannot be loaded with `safetensors`" not in str(error):
            raise
        raise ArtifactError(
            f"{repo} on the hub has no weights in safetensors. Pickles can run any code when they are loaded, so they are not "
            "opened: convert them where you trust them (save_pretrained writes safetensors)."
        ) from error


def without_head(model: Any) -> Any:
    """Remove the pooler of a BERT: only the head uses it, which is not loaded, so it would get no gradient."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def use_capped_attention(backbone: Any) -> None:
    """Select eager attention for a model with capped scores (Gemma-2): transformers 5.6 ignores the cap in its default."""
    if getattr(backbone.config.get_text_config(), "attn_logit_softcapping", None):
        backbone.set_attn_implementation("eager")


def load_config(location: BackboneLocation, revision: str | None = None) -> Any:
    """Load the configuration of a backbone, for a GGUF file from its header."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(location.name, revision=revision, trust_remote_code=False, **location.arguments)
    if location.gguf_file is not None:
        config.dtype = "float32"  # as `open_pretrained` dequantizes it by default
    return config


def empty_backbone(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the layers of `load_backbone` with new weights; inside `torch.device("meta")`, without memory for them."""
    from transformers import AutoModel

    if getattr(config, "quantization_config", None) is not None:
        delattr(config, "quantization_config")
    build: Any = AutoModel.from_config
    options = {} if dtype is None else {"dtype": dtype}  # None would replace the stored dtype
    model = without_head(build(config, trust_remote_code=False, **options))
    use_capped_attention(model)
    return model


def check_decoder_or_encoder(config: Any, name: str) -> None:
    """Raise `ValueError` for an encoder-decoder."""
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder ({config.model_type}). Use a decoder (LLaMA, Mistral, Qwen, …) or an encoder "
            "(BERT, RoBERTa, …)."
        )


def load_backbone(
    location: BackboneLocation,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    bits: int | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Load the layers without a language-model head or pooler, in evaluation mode, on `device`.

    `dtype` as in `open_pretrained`. With `bits`, the linear layers are then quantized one by one (see `quantization`)
    and compute in that dtype; a folder that is stored in bits stays as it is.

    Raises:
        ArtifactError: if the folder lacks weights of the backbone.
        QuantizationError: if it cannot be quantized.
        ValueError: for an encoder-decoder.
    """
    if bits is not None:
        check_bits(bits)  # before minutes of loading
    model = open_pretrained("AutoModel", location, dtype=dtype, revision=revision)
    check_decoder_or_encoder(model.config, location.name)
    without_head(model)
    if bits is not None and bits_of(model) != bits:
        setattr(model, ORIGINAL, weights_fingerprint(model))
        quantize(model, bits, device)
    loaded: nn.Module = model.eval().to(device)
    return loaded


def is_causal(backbone: nn.Module) -> bool:
    """Return whether the state of a token depends on the tokens before it only, from the states of two sequences.

    Raises:
        ArtifactError: if its states are not finite.
    """
    states = check_states(backbone)
    # Equal inputs in equal shapes give equal bits; the tolerance is for kernels that split work by row.
    return bool((states[0, :-1] - states[1, :-1]).abs().max() <= 1e-3 * states.abs().max())


def state_sizes(backbone: nn.Module) -> tuple[int, int]:
    """Return the width of states after the last layer and between layers, which differ in OPT-350m only."""
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    between: int = config.hidden_size
    return getattr(config, "word_embed_proj_dim", None) or between, between


def weights_fingerprint(backbone: nn.Module) -> str:
    """Return a short hash of the base weights: names, shapes, and a sample of the values of each tensor.

    Values are rounded to bfloat16, so the fingerprint is the same in float32 and bfloat16. A backbone that
    `load_backbone` quantized has the fingerprint of its original weights.
    """
    original: str | None = getattr(backbone, ORIGINAL, None)
    state = backbone.state_dict()
    return original or fingerprint_of(state, state.__getitem__)


def fingerprint_of(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """Return the fingerprint of named tensors, which are read one at a time."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = read(name).detach()
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
