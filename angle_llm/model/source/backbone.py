"""Locate and load the backbone, a `transformers` model without a head; find whether it is causal."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from angle_llm.model.layers.fingerprint import ORIGINAL, weights_fingerprint
from angle_llm.model.layers.quantization import bits_of, check_bits, quantize
from angle_llm.model.layers.quantized_layers import Bits
from angle_llm.model.source.checks import (
    ArtifactError,
    as_artifact_error,
    check_model_files,
    check_states,
    is_saved_encoder,
)
from angle_llm.model.source.composite import COMPOSITE, TEXT_PREFIX, Composite, text_part
from angle_llm.settings.parsing import unknown_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Scaling of the rotary embeddings of all published LLaMA 3 models, without the factor (8 or 32)."""
_WORDS_WITHOUT_MERGES = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""Names in `tokenizer.ggml.pre` of tokenizers as LLaMA 3 and tekken have them."""
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of splits that are those of GPT-2, after a split around each digit."""
_AS_GPT_2 = (
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "a.x-4.0", "gigachat", "exaone4", "granite-docling",
)  # fmt: skip
"""Names of the split of GPT-2."""


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

    Raises:
        ValueError: for a CUDA device that this machine does not have.
        RuntimeError: for an unknown device.
    """
    if name is None:
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else mps)
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r}: torch can use {torch.cuda.device_count()} CUDA devices of this machine. Use cpu, or "
            "unset device."
        )
    return device


def load_tokenizer(location: BackboneLocation, revision: str | None = None) -> Any:
    """Load the tokenizer from the folder, GGUF file or hub repository of a model.

    Raises:
        ArtifactError: for a damaged file, or a GGUF file for which this version of `transformers` gives other token ids.
    """
    from transformers import AutoTokenizer

    with as_artifact_error(f"the tokenizer in {location.name}"), header_read_once(location):
        tokenizer = AutoTokenizer.from_pretrained(
            location.name, revision=revision, trust_remote_code=False, **location.arguments
        )
        if location.gguf_file is not None:
            _complete_gguf_tokenizer(tokenizer, str(Path(location.name) / location.gguf_file))
    return tokenizer


def _complete_gguf_tokenizer(tokenizer: Any, path: str) -> None:
    """Set what `transformers` 5.24 does not read from the tokenizer of a GGUF file, as llama.cpp does (`src/llama-vocab.cpp`).

    * SmolLM2 and others split a text around each digit. `transformers` uses the split of GPT-2 for names that it does not
      know.
    * In LLaMA 3 and Mistral's tekken, a word of the vocabulary is one token without merges, and the start token is added
      if the file does not say whether to add it, as older files of LLaMA 3 do not.

    Raises:
        ArtifactError: for an unknown split, or a version of `transformers` without the start token and most splits.
    """
    import gguf
    from packaging.version import Version
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    fields = gguf.GGUFReader(path).fields
    split, adds_bos = (
        fields[name].contents() if name in fields else None
        for name in ("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
    )
    version = metadata.version("transformers")
    if Version(version) < Version("5.23") and (adds_bos or split not in ("gpt-2", "qwen2", "smollm")):
        raise ArtifactError(
            f"{path}: transformers {version} gives wrong token ids for a GGUF file with this tokenizer "
            f"({split or 'unnamed'}). Install transformers 5.23 or later (Python 3.11 or later), or use the model folder."
        )
    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, ByteLevel):
        if split in _DIGITS_APART:
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
        elif split not in _AS_GPT_2:
            raise ArtifactError(
                f"{path}: transformers does not split words as this tokenizer does ({split or 'unnamed'}). Use the model "
                "folder."
            )
    if split in _WORDS_WITHOUT_MERGES:
        backend.model.ignore_merges = True
        if adds_bos is None:
            tokenizer.add_bos_token = True


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
    with as_artifact_error(location.name), _without_load_report(), header_read_once(location):
        config, composite = _read_config(location, revision)
        if composite is not None:
            arguments["key_mapping"] = {TEXT_PREFIX: ""}
        if composite is not None or location.bidirectional or location.gguf_file:
            arguments["config"] = config
        model, report = getattr(transformers, class_name).from_pretrained(
            location.name, revision=revision, trust_remote_code=False, output_loading_info=True, **arguments
        )
        if location.gguf_file:
            _check_gguf_layers(model, str(Path(location.name) / location.gguf_file))
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
def header_read_once(location: BackboneLocation) -> Iterator[None]:
    """Make `gguf.GGUFReader` parse a GGUF file once inside this context, and map the names of its tensors once.

    `transformers` calls it for the configuration, the weights and the tokenizer, with a new memory map for each token of
    the vocabulary, and maps all names again for each module. SmolLM2 opens in 7 instead of 22 seconds of CPU time.

    Two names of the module `gguf` are replaced inside the context; `transformers` imports these names when it needs
    them. A nested context uses the header that the outer context has read. Not thread-safe.
    """
    if location.gguf_file is None:
        yield
        return
    import gguf

    if hasattr(gguf.GGUFReader, "cache_info"):  # replaced by an outer context
        yield
        return

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            # A slice of a plain array is no new memory map.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    module: Any = gguf
    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    module.GGUFReader, module.get_tensor_name_map = functools.cache(Reader), functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        module.GGUFReader, module.get_tensor_name_map = originals


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
        ArtifactError: for a composite model whose text model cannot be opened (see `composite.text_part`).
    """
    with header_read_once(location):
        return _read_config(location, revision)[0]


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
        _complete_gguf_config(config, str(Path(location.name) / location.gguf_file))
    config, composite = text_part(config, location.name)
    if config.is_encoder_decoder:
        raise ArtifactError(
            f"{location.name} is an encoder-decoder ({config.model_type}). Use a decoder (LLaMA, Mistral, Qwen, …) or an encoder "
            "(BERT, RoBERTa, …)."
        )
    if location.bidirectional:
        config.get_text_config().is_causal = False
    return config, composite


def _complete_gguf_config(config: Any, path: str) -> None:
    """Set what `transformers` 5.23 does not read from GGUF files of most families, such as LLaMA 3 and Gemma-3.

    These are the scaling of rotary embeddings, biases, bidirectional attention, and the scale of attention scores of Gemma. A
    file of LLaMA 3 has a divisor for each frequency; they are compared with the divisors of the published models.

    Raises:
        ArtifactError: for a scaling of another type.
    """
    import gguf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    values = {name.partition(".")[2]: field for name, field in reader.fields.items()}  # without the architecture
    for tensor, option in (("attn_q", "attention_bias"), ("ffn_up", "mlp_bias")):
        if f"blk.0.{tensor}.bias" in tensors and hasattr(config, option):
            setattr(config, option, True)
    if "attention.causal" in values and not values["attention.causal"].contents():
        config.is_causal = False
    if hasattr(config, "query_pre_attn_scalar"):  # the size of a head, except in the models of 27B
        is_27b = (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62))
        size = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        config.query_pre_attn_scalar = size
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma-3 has parameters for each type of layer
    if not rope or rope.get("rope_type", "default") != "default":  # no rotary embeddings, or read by `transformers`
        return
    scaling = values["rope.scaling.type"].contents() if "rope.scaling.type" in values else "none"
    if "rope_factors_long.weight" in tensors or "rope.scale_linear" in values:  # Phi-3, files of 2023
        scaling = "longrope or scale_linear"
    divisors = tensors.get("rope_freqs.weight")
    if scaling == "linear" and "rope.scaling.factor" in values:
        rope |= {"rope_type": "linear", "factor": values["rope.scaling.factor"].contents()}
    elif divisors is not None and (divisors != 1).any():
        plain = rope["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors))
        rope |= LLAMA_3_SCALING | {"factor": round(float(divisors.max()), 3)}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        scaling = "llama3" if np.allclose(plain / scaled, divisors, rtol=1e-4) else "of unknown parameters"
    if scaling not in ("none", "linear", "llama3"):
        raise ArtifactError(f"{path}: rotary scaling {scaling} of a GGUF file is not supported. Use the model folder.")


def _check_gguf_layers(model: Any, path: str) -> None:
    """Check that a model has all weights that the layers of a GGUF file have: `transformers` drops unknown ones.

    Raises:
        ArtifactError: for other numbers of weights.
    """
    import gguf

    layers = [f"blk.{number}." for number in range(model.config.get_text_config().num_hidden_layers)]
    in_file = sum(
        int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors if tensor.name.startswith(tuple(layers))
    )
    in_model = sum(
        weight.numel() for name, weight in model.base_model.named_parameters() if re.match(r"\w+\.\d+\.", name)
    )
    if in_file != in_model:
        raise ArtifactError(
            f"{path}: the layers have {in_file:,} weights, and the {type(model).__name__} of transformers {in_model:,}. Use "
            "the model folder."
        )


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
