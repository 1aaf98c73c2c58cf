"""Locate and load the backbone, a `transformers` model without a head; find whether it is causal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from angle_llm.io import set_allocator
from angle_llm.model.layers.fingerprint import ORIGINAL, weights_fingerprint
from angle_llm.model.layers.quantization import bits_of, check_bits, quantize
from angle_llm.model.layers.quantized_layers import Bits
from angle_llm.model.source.checks import (
    ArtifactError,
    as_artifact_error,
    check_model_files,
    check_states,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.source.composite import COMPOSITE, TEXT_PREFIX, Composite, text_part
from angle_llm.model.source.gguf_base import check_layers, complete_config, complete_tokenizer, header_read_once
from angle_llm.settings.parsing import unknown_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BackboneLocation:
    """Where `transformers` finds a model, and how its tokens attend to each other.

    `name` is a folder or hub id, and `gguf_file` the name of the GGUF file in the folder, if any. `bidirectional`: the
    tokens of a decoder-only model attend to later tokens too.
    """

    name: str
    gguf_file: str | None = None
    bidirectional: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the backbone is a folder on this machine, not a hub id."""
        return Path(self.name).is_dir()

    @property
    def arguments(self) -> dict[str, str]:
        """Keyword arguments for `from_pretrained` of `transformers`: `gguf_file` for a GGUF file, else none."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def absolute_name(path_or_id: str) -> str:
    """Return an existing local path as an absolute path; return a hub id or any other name unchanged."""
    path = Path(path_or_id).expanduser()
    return str(path.absolute()) if path.exists() else path_or_id


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with a name: float32, bfloat16 or float16.

    Raises:
        ValueError: for an unknown name; the message gives the most similar name.
    """
    if name not in DTYPES:
        raise ValueError(unknown_name("dtype", name, [*DTYPES, "auto"]))
    return DTYPES[name]


def torch_device(name: str | torch.device | None) -> torch.device:
    """Return the torch device with a name; for None, the GPU (also MPS of a Mac) if there is a GPU, else the CPU.

    For a CUDA device, the allocator is set (`set_allocator`).

    Raises:
        ValueError: for a CUDA device that this machine does not have.
        RuntimeError: for an unknown device.
    """
    if name is None:
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r}: torch can use {torch.cuda.device_count()} CUDA devices of this machine. Use cpu, or "
            "unset device."
        )
    if device.type == "cuda":
        set_allocator()
    return device


def load_tokenizer(location: BackboneLocation, revision: str | None = None) -> Any:
    """Load the tokenizer from the folder, GGUF file or hub repository of a model.

    Raises:
        ArtifactError: for a damaged file, or a GGUF file for which this version of `transformers` gives other token ids.
    """
    from transformers import AutoTokenizer

    arguments: dict[str, Any] = dict(location.arguments)
    with as_artifact_error(f"the tokenizer in {location.name}"), header_read_once(location.gguf_file):
        tekken = find_tekken(location, revision)
        if tekken is not None:  # any value makes transformers ignore mistral-common
            arguments["fix_mistral_regex"] = False
        tokenizer = AutoTokenizer.from_pretrained(
            location.name, revision=revision, trust_remote_code=False, **arguments
        )
        if location.gguf_file is not None:
            complete_tokenizer(tokenizer, str(Path(location.name) / location.gguf_file))
        if tekken is not None:
            _split_as_tekken(tokenizer, tekken)
    return tokenizer


def find_tekken(location: BackboneLocation, revision: str | None) -> str | None:
    """Return the path of `tekken.json`, the tokenizer file of Mistral, beside a model; None if there is none."""
    from huggingface_hub import try_to_load_from_cache
    from transformers import PreTrainedConfig
    from transformers.utils.hub import cached_file

    if location.is_local or location.gguf_file:
        path = Path(location.name) / "tekken.json"
        return str(path) if path.is_file() and not location.gguf_file else None
    model_type = PreTrainedConfig.get_config_dict(location.name, revision=revision)[0].get("model_type", "")
    if "tral" not in model_type:  # Mistral, Mixtral, Ministral, Pixtral, Voxtral
        return None
    found: str | None = cached_file(
        location.name,
        "tekken.json",
        revision=revision,
        _commit_hash=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None and try_to_load_from_cache(location.name, "tekken.json", revision=revision) is None:
        warnings.warn(
            f"without the hub, it is unknown whether {location.name} has tekken.json, which decides how texts are split. Load "
            "it once with a connection.",
            UserWarning,
            stacklevel=3,
        )
    return found


def _split_as_tekken(tokenizer: Any, path: str) -> None:
    """Split texts by the pattern of `tekken.json`, Mistral's own tokenizer file.

    In most Mistral models of 2024 and 2025, `tokenizer.json` has another pattern.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    tokenizer.init_kwargs.pop("fix_mistral_regex", None)  # otherwise it is saved
    splits = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(splits, Sequence) and isinstance(splits[0], Split):
        splits[0] = Split(Regex(read_json(Path(path))["config"]["pattern"]), "isolated")


def tokenizer_config_of(location: BackboneLocation, revision: str | None = None) -> Any:
    """Return the content of `tokenizer_config.json` of a loaded tokenizer; {} without the file, or for a GGUF file."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    return {} if location.gguf_file else get_tokenizer_config(location.name, revision=revision, local_files_only=True)


def open_pretrained(
    class_name: str,
    location: BackboneLocation,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    device: torch.device | None = None,
) -> Any:
    """Load a model with the `transformers` class `class_name`, such as AutoModel; check that no weights are missing.

    Of a composite model, only the text model is loaded (see `composite`). `dtype` "auto" keeps the stored dtype; a GGUF file
    is then dequantized to float32. Code of a model never runs.

    The weights are on the CPU, or each is loaded to `device` at once. On the CPU, weights in the stored dtype are a memory map
    that all processes of a machine share; another dtype is a copy in each process.

    Raises:
        ArtifactError: for a folder that cannot be opened or lacks weights, which `transformers` would set at random.
    """
    import transformers

    arguments: dict[str, Any] = dict(location.arguments)
    if not location.gguf_file:
        arguments["use_safetensors"] = True
    elif hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    default_dtype = "float32" if location.gguf_file else "auto"
    arguments["dtype"] = default_dtype if dtype == "auto" else torch_dtype(dtype)
    if device is not None:
        arguments["device_map"] = {"": device}
    if location.is_local and not location.gguf_file:
        check_model_files(Path(location.name))
    with as_artifact_error(location.name), _without_load_report(), header_read_once(location.gguf_file):
        config, composite = _read_config(location, revision)
        if class_name == "AutoModel":  # a generator of texts may be quantized
            _check_stored_weights(config, location)
        if composite is not None:
            arguments["key_mapping"] = {TEXT_PREFIX: ""}
        if composite is not None or location.bidirectional or location.gguf_file:
            arguments["config"] = config
        model, report = getattr(transformers, class_name).from_pretrained(
            location.name, revision=revision, trust_remote_code=False, output_loading_info=True, **arguments
        )
        if location.gguf_file:
            check_layers(model, str(Path(location.name) / location.gguf_file))
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    code = (getattr(model.config, "auto_map", None) or {}).get("AutoModel")
    if code and not is_saved_encoder(Path(location.name)):
        if missing:
            raise ArtifactError(
                f"{location.name} needs Python code of its repository ({code}), which is never executed."
            )
        if class_name == "AutoModel" and not location.bidirectional:
            warnings.warn(
                f"{location.name} contains Python code ({code}), which is never executed: {type(model).__name__} of "
                "transformers can give other vectors. If the code makes a decoder bidirectional, as for GTE-Qwen2-7B, set "
                "--attention bidirectional.",
                UserWarning,
                stacklevel=3,
            )
    if missing:
        raise ArtifactError(
            f"{location.name} lacks {len(missing)} tensors of the model, {missing[0]} first. The files are damaged or belong "
            "to another architecture; fetch or save them again. For a GGUF file, use the model folder."
        )
    if location.gguf_file:
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):  # with this mark on dequantized weights, `save_pretrained` refuses
                delattr(owner, name)
        model.is_quantized = False
    if composite is not None:
        model._weight_conversions = None  # otherwise `save_pretrained` gives tensors the names in the composite model
        setattr(model, COMPOSITE, composite)
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Suppress the report of `transformers` on unused and missing weights inside this context, unless shapes differ.

    `open_pretrained` checks for missing weights itself. Weights of a pooler are not needed, because the pooler is removed.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage() or "MISMATCH" in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def without_head(model: Any) -> Any:
    """Remove the pooler of a model such as BERT, in place, and return the model.

    Only the head uses the pooler. The head is not loaded, so the pooler would get no gradient.
    """
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def use_equal_states(backbone: Any) -> None:
    """Change settings of `transformers`, in place, with which a model gives other states than its architecture.

    Capped attention scores, such as in Gemma-2, need eager attention: the default attention of transformers 5.6 ignores the
    cap. RWKV divides some weights in evaluation mode, also before they are saved, but not an adapter on them. The text model
    of PaliGemma, a bidirectional Gemma, gets a causal mask for padded texts only, unless `is_causal` is false.
    """
    config = backbone.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        backbone.set_attn_implementation("eager")
    if getattr(config, "rescale_every", None):
        config.rescale_every = 0
    if config.model_type == "gemma" and getattr(config, "use_bidirectional_attention", None):
        config.is_causal = False


def load_config(location: BackboneLocation, revision: str | None = None) -> Any:
    """Load the configuration of a backbone from config.json, or from the header of a GGUF file.

    Raises:
        ArtifactError: for an encoder-decoder, a model that is stored quantized by another library than bitsandbytes, or a
            composite model whose text model cannot be opened (see `composite.text_part`).
    """
    with header_read_once(location.gguf_file):
        config = _read_config(location, revision)[0]
    _check_stored_weights(config, location)
    return config


def _check_stored_weights(config: Any, location: BackboneLocation) -> None:
    """Raise `ArtifactError` for a backbone that is stored quantized by another library than bitsandbytes.

    Adapters and merges need its weights as numbers, which `transformers` gives on some machines only.
    """
    stored = getattr(config, "quantization_config", None) or {}
    if stored.get("quant_method", "bitsandbytes") != "bitsandbytes":
        raise ArtifactError(
            f"{location.name}: expected unquantized weights, got {stored['quant_method']}. Use the unquantized model; in "
            "training, --model.bits 4, 8 or fp8 quantizes it."
        )


def find_composite(location: BackboneLocation, revision: str | None = None) -> Composite | None:
    """Return the composite model that the text model at a location is part of; None for any other model."""
    return None if location.gguf_file else _read_config(location, revision)[1]


def _read_config(location: BackboneLocation, revision: str | None) -> tuple[Any, Composite | None]:
    """Return the configuration of a backbone, and the composite model if the backbone is its text model."""
    from transformers import AutoConfig

    with as_artifact_error(Path(location.name) / (location.gguf_file or "")):
        config = AutoConfig.from_pretrained(
            location.name, revision=revision, trust_remote_code=False, **location.arguments
        )
    if location.gguf_file is not None:
        config.dtype = "float32"  # as `open_pretrained` dequantizes it by default
        complete_config(config, str(Path(location.name) / location.gguf_file))
    config, composite = text_part(config, location.name)
    # A folder of the encoder of T5 alone is not marked as an encoder-decoder.
    if config.is_encoder_decoder or config.model_type in ("t5", "mt5", "umt5"):
        raise ArtifactError(
            f"{location.name} is an encoder-decoder ({config.model_type}). Use a decoder (LLaMA, Mistral, Qwen, …) or an encoder "
            "(BERT, RoBERTa, …)."
        )
    if location.bidirectional:
        config.get_text_config().is_causal = False
    return config, composite


def is_made_bidirectional(backbone: nn.Module) -> bool:
    """Return whether the configuration of a decoder-only model has bidirectional attention (`is_causal` is false)."""
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    return not getattr(config, "is_causal", True)


def empty_backbone(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Build a backbone from its configuration with newly initialized weights, and without a pooler.

    Inside `torch.device("meta")`, the weights take no memory.
    """
    from transformers import AutoModel

    if getattr(config, "quantization_config", None) is not None:
        delattr(config, "quantization_config")
    build: Any = AutoModel.from_config
    options = {} if dtype is None else {"dtype": dtype}  # None would replace the stored dtype
    model = without_head(build(config, trust_remote_code=False, **options))
    use_equal_states(model)
    return model


def load_backbone(
    location: BackboneLocation,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    bits: Bits | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Load a backbone, without language-model head and pooler, in evaluation mode, on `device`.

    Args:
        dtype: dtype of the weights. "auto": the stored dtype, or float32 for a GGUF file.
        bits: 4, 8 or fp8 to quantize the linear layers after loading, one by one (see `quantization`). They then compute in
            `dtype`. A model that is stored quantized to `bits` is unchanged.

    Raises:
        ArtifactError: if the folder cannot be opened or lacks weights of the backbone; also for an encoder-decoder.
        QuantizationError: if the backbone cannot be quantized.
    """
    if bits is not None:
        check_bits(bits)  # before minutes of loading
    # To the GPU at once: otherwise every process of a machine would hold a copy of weights in another dtype in host memory.
    on_gpu = torch.device(device).type == "cuda" and bits is None and location.gguf_file is None
    gpu = torch.device(device) if on_gpu else None
    model = open_pretrained("AutoModel", location, dtype=dtype, revision=revision, device=gpu)
    if model.config.model_type.startswith("embedding_gemma2") and model.dtype == torch.float16:
        raise ArtifactError(
            f"{location.name}: EmbeddingGemma 2 gives NaN in float16. Choose dtype bfloat16 or float32."
        )
    without_head(model)
    if bits is not None and bits_of(model) != bits:
        setattr(model, ORIGINAL, weights_fingerprint(model))
        quantize(model, bits, device)
    loaded: nn.Module = model.eval().to(device)
    return loaded


def probes_as_causal(backbone: nn.Module) -> bool:
    """Return whether the hidden state of a token does not depend on later tokens.

    The states of two sequences are compared that differ in their last token only.

    Raises:
        ArtifactError: if the states are not finite.
    """
    states = check_states(backbone)
    # Equal inputs in equal shapes give equal bits; the tolerance is for kernels that split work by row.
    return bool((states[0, :-1] - states[1, :-1]).abs().max() <= 1e-3 * states.abs().max())


def state_sizes(backbone: nn.Module) -> tuple[int, int]:
    """Return the number of dimensions of hidden states after the last layer, and between layers.

    The two numbers differ in OPT-350m and EmbeddingGemma 2.
    """
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    between: int = config.hidden_size
    after = getattr(config, "word_embed_proj_dim", None) or getattr(config, "embedding_dim", None)
    return after or between, between
