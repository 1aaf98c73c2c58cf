"""Load and save the folder of an encoder.

adapter_model.safetensors + adapter_config.json     an adapter, for the base that the card names
model.safetensors + config.json                     or a whole backbone
2_Dense/ …                                          Dense modules after the pooling
tokenizer.json …                                    the tokenizer
angle_llm.json                                      the card: prompt, pooling, maximum length, base, …
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from angle_llm.io import json_text, write_folder, write_json
from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.layers.lora import is_adapted, without_adapter
from angle_llm.model.layers.quantized_layers import Bits
from angle_llm.model.source.backbone import BackboneLocation, load_backbone, load_tokenizer, state_sizes
from angle_llm.model.source.checks import ArtifactError, check_loaded, is_saved_encoder, read_json
from angle_llm.model.source.composite import COMPOSITE
from angle_llm.model.source.dense import read_dense, write_dense
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.gguf_base import header_read_once
from angle_llm.model.source.resolve import ModelSource
from angle_llm.model.source.saved_adapter import (
    LoraAdapter,
    fitted,
    read_adapter,
    read_peft_adapter,
    write_composite_names,
)
from angle_llm.model.source.sentence_transformers_folder import (
    SentenceTransformersFolder,
    library_prompts,
    tokenizer_config,
    write_library_files,
    write_library_refusal,
)
from angle_llm.model.source.tokenizer import SentenceTokenizer, Tokenizer, count_positions
from angle_llm.prompts import SIDES, SidePrompts

Filled = TypeVar("Filled")

# transformers imports DeepSpeed to save a model, if it is installed, and DeepSpeed then warns on a machine without a GPU.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def load_parts(
    source: ModelSource,
    *,
    adapter: str | Path | None,
    prompt: SidePrompts | None,
    dtype: str,
    device: torch.device,
    bits: Bits | Literal["auto"] | None,
) -> tuple[dict[str, Any], EncoderCard | None, LoraAdapter | None]:
    """Load the parts of an encoder: arguments of `SentenceEncoder`, its settings, and an adapter that is not applied.

    The settings are from `angle_llm.json` or a sentence-transformers folder; None for a bare backbone. The
    adapter is checked against the base.
    With "auto", `dtype` and `bits` are as in the training of a saved encoder. Other arguments and errors as in
    `SentenceEncoder.from_pretrained`.
    """
    saved = source.card
    if adapter is not None and (saved is not None or source.adapter is not None):
        raise ValueError(
            f"adapter: expected a backbone as its base, but {source.path} is "
            f"{'an adapter' if saved is None else 'a saved encoder'}. Give the path or hub id of the backbone."
        )
    # Settings and adapter, before the weights are loaded.
    library = source.read_library(prompt)
    base, revision = source.base or (source.path, source.revision)
    adapter_folder = source.adapter if adapter is None else Path(adapter).expanduser()
    lora: LoraAdapter | None = None
    if saved is not None:
        dtype = saved.dtype if dtype == "auto" else dtype
        bits = saved.bits if bits == "auto" else bits
        lora = None if adapter_folder is None else read_adapter(adapter_folder)
    elif adapter_folder is not None:
        known = library.prompt if library is not None and adapter is None else None  # of the adapter, not of its base
        lora = read_peft_adapter(adapter_folder, base, prompt or known)
    # Weights and tokenizer, on the device: the probes run where the model will run.
    bits = None if bits == "auto" else bits
    with header_read_once(source.backbone.gguf_file):
        backbone = load_backbone(source.backbone, dtype=dtype, revision=revision, bits=bits, device=device)
        tokenizer = load_tokenizer(*source.tokenizer)
    check_loaded(backbone, tokenizer, source.path)
    dense = read_dense(source.dense, state_sizes(backbone)[0])
    card = saved if library is None else card_of(library, tokenizer, backbone, dtype)
    parts: dict[str, Any] = {"backbone": backbone, "tokenizer": tokenizer, "dense": dense}
    parts |= {"base": base, "base_revision": revision}
    if lora is None or adapter_folder is None:
        return parts, card, None
    # The adapter must fit the base.
    fingerprint = weights_fingerprint(backbone)
    if saved is not None:
        saved.check_base(fingerprint, dtype, adapter_folder)
    return parts | {"base_fingerprint": fingerprint}, card, fitted(lora, adapter_folder, backbone, base)


def card_of(
    library: SentenceTransformersFolder, tokenizer: Tokenizer, backbone: nn.Module, dtype: str = "auto"
) -> EncoderCard:
    """Return pooling, prompts, maximum length and normalization of a sentence-transformers folder as an `EncoderCard`.

    Raises:
        ArtifactError: if this package would tokenize texts differently from sentence-transformers.
    """
    length = library.length_for(tokenizer, count_positions(backbone))
    return EncoderCard(
        library.prompt, library.pooling, length, dtype, base=None, normalize=library.normalize, dense=len(library.dense)
    )


def save_parts(
    folder: str | Path, backbone: Any, tokenizer: Tokenizer, card: EncoderCard, dense: nn.Sequential | None = None
) -> None:
    """Save an encoder in a folder: its adapter or all weights, and its Dense modules.

    The folder is written completely or not at all.
    """
    if not is_adapted(backbone):
        card = replace(card, base=None, base_revision=None, base_fingerprint=None, layers=None)

    def fill(target: Path) -> None:
        # Otherwise peft would query the hub for a resized vocabulary.
        arguments = {"save_embedding_layers": False} if is_adapted(backbone) else {}
        with _without_bars():
            backbone.save_pretrained(target, **arguments)
        write_dense(target, dense)
        tokenizer.save_pretrained(target)
        (target / "README.md").unlink(missing_ok=True)  # the empty model card of peft
        card.write(target)
        if is_adapted(backbone):
            composite = getattr(without_adapter(backbone), COMPOSITE, None)
            if composite is not None:
                write_composite_names(target, composite)
            write_library_refusal(target)
        else:
            write_read_window(target, backbone.config)
            write_earlier_names(target)
            write_library_form(target, backbone, tokenizer, card)

    write_directory(Path(folder), fill)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of `transformers` inside this context: a run saves its model after many evaluations."""
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging
    shown = bars.is_progress_bar_enabled()
    if shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def write_read_window(folder: Path, config: Any) -> None:
    """Write the window of `config.json` that is read as the window of `config`, the configuration of the saved model.

    For Gemma-3 with bidirectional attention, transformers reads a window W as W // 2 + 1. Earlier versions, such as 5.6,
    write the result, so that a saved model had half the window again.
    """
    from transformers import AutoConfig

    if not getattr(config, "use_bidirectional_attention", False):
        return
    if AutoConfig.from_pretrained(folder).sliding_window != config.sliding_window:
        values = read_json(folder / "config.json") | {"sliding_window": 2 * (config.sliding_window - 1)}
        write_json(folder / "config.json", values)


_EARLIER_THETAS = {
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "modernbert-decoder": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gpt_neox": {"": "rotary_emb_base"},
    "gpt_neox_japanese": {"": "rotary_emb_base"},
}
"""Model type → layer type → name of the key `rope_theta` in transformers 4; layer type "" if all layers share the key."""


_STOPS_VERSION_4: dict[str, list[int]] = {"bidirectional attention needs transformers 5.2": []}
"""Value of `pruned_heads` in the configuration of a bidirectional model. transformers before 5.2 ignores `is_causal`, so the
vectors would be wrong without an error; version 4 stops with an error at this value."""


def write_earlier_names(folder: Path) -> None:
    """Add to `config.json` the keys that transformers 5 moved or renamed, under their names in transformers 4.

    Without the old keys, transformers 4 and other programs silently use defaults. The list of keys comes from a comparison
    of the configuration classes of transformers 4.48, 4.57 and 5.23 for 20 model types. The file is unchanged if the
    installed version of transformers would read other values with the added keys. `architectures` gets a class that vLLM
    knows.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    original = path.read_bytes()
    values = read_json(path)
    before = AutoConfig.from_pretrained(folder).to_dict()
    for config in (values, values.get("text_config") or {}):
        config.update(_earlier_names(config))
    if values.get("architectures"):
        values["architectures"] = before["architectures"] = [_served_class(name) for name in values["architectures"]]
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    try:
        keeps_values = AutoConfig.from_pretrained(folder).to_dict().items() >= before.items()
    except (KeyError, ValueError):
        keeps_values = False
    if not keeps_values:
        path.write_bytes(original)


def _served_class(name: str) -> str:
    """Return the class of a language model for the class of a text model that vLLM does not know, such as Gemma4TextModel."""
    import transformers

    with_head = name.removesuffix("TextModel") + "ForCausalLM"
    known = not name.endswith("TextModel") or name == "Gemma3TextModel"
    return name if known or not hasattr(transformers, with_head) else with_head


def _earlier_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys, with values, that transformers 4 reads and that transformers 5 moved or renamed in `config`."""
    names: dict[str, Any] = {}
    if config.get("dtype"):
        names["torch_dtype"] = config["dtype"]
    if config.get("is_causal") is False:
        names["pruned_heads"] = _STOPS_VERSION_4
    names |= _earlier_rope(config.get("model_type", ""), config.get("rope_parameters") or {})
    return names | _earlier_windows(config.get("layer_types") or [])


def _earlier_rope(model_type: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 for `rope_parameters`: thetas, the share of rotated dimensions, and scaling."""
    names: dict[str, Any] = {}
    # Thetas: one, or one for each type of layer.
    by_layer_type = "full_attention" in rope
    usual = _EARLIER_THETAS["gemma3_text"] if by_layer_type else {"": "rope_theta"}
    keys = _EARLIER_THETAS.get(model_type, usual)
    for layer_type, key in keys.items():
        parameters = (rope.get(layer_type) or {}) if by_layer_type else rope
        if parameters.get("rope_theta"):
            names[key] = parameters["rope_theta"]
    # Rotated dimensions, and scaling.
    scaling = dict(rope.get("full_attention") or rope)
    scaling.pop("rope_theta", None)
    factor = scaling.pop("partial_rotary_factor", None)
    if factor is not None and not by_layer_type:  # vLLM would use it for the layers with sliding windows too
        names |= {"partial_rotary_factor": factor, "rotary_pct": factor}
    # Of the types with a theta for each type of layer, Gemma-3 alone has scaling in transformers 4.
    has_scaling = not by_layer_type or model_type == "gemma3_text"
    if has_scaling and scaling.get("rope_type", "default") != "default":
        names["rope_scaling"] = scaling
    return names


def _earlier_windows(layer_types: list[str]) -> dict[str, Any]:
    """Return the key of transformers 4 for layers with full attention between layers with sliding windows."""
    if not {"full_attention", "sliding_attention"} <= set(layer_types):
        return {}
    first = layer_types.index("full_attention")
    if first > 0:  # as in Gemma-3: every n-th layer has full attention
        return {"sliding_window_pattern": first + 1}
    # As in ModernBERT: layers 0, n, 2n, … have full attention.
    return {"global_attn_every_n_layers": [*layer_types[1:], "full_attention"].index("full_attention") + 1}


_LIBRARY_PROBES = ("A man eats 3 apples.", "Straße, Привет 你好!", "x [SEP] </s> <|im_end|> y", "one two " * 5000)


def write_library_form(folder: Path, backbone: nn.Module, tokenizer: Tokenizer, card: EncoderCard) -> None:
    """Add the configuration files of sentence-transformers to a saved model, if it can compute the same embeddings.

    This needs a prompt that is only text before `{text}`, equal token ids for test texts, a pooling that the library has,
    and all dimensions. Otherwise a `modules.json` is added that stops the library from loading the model.
    """
    path = folder / "tokenizer_config.json"
    original = path.read_bytes() if path.is_file() else b""
    try:
        prompts, default = library_prompts(card.prompt, folder)
        vocabulary: int = backbone.get_input_embeddings().num_embeddings  # type: ignore[operator]
        path.write_text(json_text(tokenizer_config(tokenizer, card.max_length, vocabulary)), encoding="utf-8")
        saved = load_tokenizer(BackboneLocation(str(folder)))
        for side in SIDES:
            expected = SentenceTokenizer(tokenizer, card.prompt.of(side), card.max_length)(_LIBRARY_PROBES)
            texts = [card.prompt.of(side).head + text for text in _LIBRARY_PROBES]
            ids = [saved(text, truncation=True)["input_ids"] for text in texts]
            if ids != expected or card.dimensions is not None:
                raise ArtifactError(f"{folder} would have other token ids or dimensions in sentence-transformers.")
        write_library_files(folder, backbone, card, prompts=prompts, default=default)
    except (ArtifactError, FileNotFoundError, ValueError):  # ValueError: a probe without a token
        if original:
            path.write_bytes(original)
        write_library_refusal(folder)


def check_writable(target: Path, **inputs: str | Path) -> None:
    """Check that an output folder can be replaced: it is missing, empty, or a saved encoder that is not an input.

    Args:
        inputs: paths of the input files and folders; the keyword, such as `base` or `adapter`, is the name in the message.

    Raises:
        ArtifactError: if `target` has content and is not a saved encoder, or if replacing it would delete an input.
    """
    if target.exists() and not (target.is_dir() and (is_saved_encoder(target) or not any(target.iterdir()))):
        raise ArtifactError(
            f"{target} exists and is not a saved encoder, so it is not overwritten. Choose another folder."
        )
    for name, path in inputs.items():
        if path and Path(path).exists() and Path(path).resolve().is_relative_to(target.resolve()):
            raise ArtifactError(f"writing {target} would overwrite the {name}, {path}. Choose another folder.")


def write_directory(target: Path, fill: Callable[[Path], Filled], writer: str | None = None) -> Filled:
    """Write a folder with the function `fill`, complete or not at all (see `io.write_folder`); return its result.

    An existing `target` is replaced only if it is empty or a saved encoder.

    Raises:
        ArtifactError: if `target` has other content.
        FolderError: for a mount or the working directory.
        OSError: if the folder cannot be written, such as on a full disk.
    """
    target = target.expanduser()
    check_writable(target)
    results: list[Filled] = []
    try:
        write_folder(target, lambda folder: results.append(fill(folder)), writer)
    except SafetensorError as error:  # safetensors raises it on a full disk
        raise OSError(f"{target} could not be written: {error}") from error
    return results[0]
