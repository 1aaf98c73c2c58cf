"""The saved folder of an encoder: weights or adapter, tokenizer, and a card with prompt, pooling and base.

adapter_model.safetensors + adapter_config.json     an adapter, on the base that the card names
model.safetensors + config.json                     or a whole backbone
tokenizer.json …                                    the tokenizer
angle_llm.json                                      the card
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from torch import nn

from angle_llm.io import json_text, write_folder
from angle_llm.model import hub
from angle_llm.model.backbone import BackboneLocation, load_backbone, load_tokenizer, locate, weights_fingerprint
from angle_llm.model.checks import (
    CARD_NAME,
    ArtifactError,
    as_artifact_error,
    check_loaded,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.foreign import fitted, no_backbone, read_foreign
from angle_llm.model.library_folder import (
    LibraryFolder,
    library_prompts,
    tokenizer_config,
    write_library_files,
    write_library_refusal,
)
from angle_llm.model.lora import LoraAdapter, is_adapted, read_adapter
from angle_llm.model.quantization import QuantizationError, bits_of
from angle_llm.model.tokenizer import SentenceTokenizer, Tokenizer, count_positions
from angle_llm.prompts import SIDES, SidePrompts
from angle_llm.settings_io import unknown_name

FORMAT_VERSION = 1


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class EncoderCard:
    """How a saved encoder is used."""

    prompt: SidePrompts
    """In JSON: one prompt for both sides, or {"query": …, "document": …}."""
    pooling: str
    max_length: int
    """Tokens of a text, prompt and special tokens included."""
    dtype: str
    """Dtype of the base weights in training."""
    base: str | None
    """The backbone of an adapter, as `locate` reads it; None if the folder holds the whole backbone."""
    base_revision: str | None = None
    """Revision of the base, for a hub id."""
    base_fingerprint: str | None = None
    """`weights_fingerprint` of the base before it was quantized: an adapter on other weights is refused."""
    bits: Literal[4, 8] | None = None
    """Bits of the base in training: 4 (NF4), 8 (int8), None if it was not quantized."""
    dimensions: Annotated[int, Ge(1)] | None = None
    """Number of leading dimensions that are kept; None: all."""
    layers: Annotated[int, Ge(1)] | None = None
    """Number of leading layers of the base that the adapter uses; None: all."""
    normalize: bool = False
    """Whether vectors have length 1."""

    def write(self, folder: Path) -> None:
        """Write the card into a folder."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"prompt": self.prompt.to_dict()}
        if not self.normalize:  # earlier versions refuse the key
            del values["normalize"]
        (folder / CARD_NAME).write_text(json_text({"format_version": FORMAT_VERSION, **values}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> EncoderCard:
        """Read the card of a folder.

        Raises:
            ArtifactError: for a missing or malformed card, or another format version.
            PromptError: for an invalid prompt in it.
        """
        path = folder / CARD_NAME
        try:
            values = read_json(path)
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} has no {CARD_NAME}, so it is not a saved encoder.") from error
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ArtifactError(
                f"{path}: expected format_version {FORMAT_VERSION}, got {version!r:.80}. Upgrade angle_llm, or save the "
                "encoder again with this version."
            )
        if isinstance(values.get("prompt"), dict):
            values["prompt"] = SidePrompts.from_dict(values["prompt"], where=str(path))
        try:
            return cls(**values)
        except ValidationError as error:
            raise ArtifactError(f"{path}: {_explain(cls, error.errors()[0])} Save the encoder again.") from error


def _explain(kind: type[EncoderCard], problem: Any) -> str:
    key = str(problem["loc"][0])
    if problem["type"] == "unexpected_keyword_argument":
        return unknown_name("key", key, [item.name for item in fields(kind)])
    if problem["type"] == "missing":
        return f"`{key}` is missing."
    return f"`{key}`: {problem['msg']}, got {problem['input']!r:.80}."


class Parts(NamedTuple):
    """The loaded parts of an encoder."""

    folder: str | Path
    """What errors name: the saved folder, the adapter or the backbone."""
    backbone: nn.Module
    tokenizer: Tokenizer
    base: str
    base_revision: str | None
    base_fingerprint: str | None = None
    card: EncoderCard | None = None
    """None for a bare backbone; of a folder of sentence-transformers, as it says."""
    adapter: LoraAdapter | None = None
    """Fits the backbone; not applied yet."""


def load_parts(
    path: str,
    *,
    adapter: str | Path | None,
    prompt: SidePrompts | None,
    dtype: str,
    device: torch.device,
    revision: str | None,
    bits: int | Literal["auto"] | None,
) -> Parts:
    """Load a saved folder, here or on the hub, or a backbone. Arguments and errors as in
    `SentenceEncoder.from_pretrained`."""
    other = Path(adapter or "").expanduser()
    foreign = None if adapter is None else read_foreign(other, path, prompt)
    found = hub.find(path, revision)
    library = None if found.library is None else LibraryFolder.read(found.library, prompt)
    if found.folder is not None:
        if foreign is not None:
            raise no_backbone(path)
        return _load_saved(path, found.folder, found.commit, dtype, bits, device)
    revision = found.commit or revision
    location = locate(path)
    # On the device: the probes run where the model will run.
    backbone = load_backbone(
        location, dtype=dtype, revision=revision, bits=None if bits == "auto" else bits, device=device
    )
    tokenizer = load_tokenizer(location, revision)
    with as_artifact_error(path):
        check_loaded(backbone, tokenizer, path)
        card = None if library is None else card_of(library, tokenizer, backbone, dtype)
    if foreign is None:
        return Parts(path, backbone, tokenizer, path, revision, card=card)
    with as_artifact_error(other):
        update = fitted(foreign, other, backbone, path)
    return Parts(other, backbone, tokenizer, path, revision, weights_fingerprint(backbone), card, update)


def card_of(library: LibraryFolder, tokenizer: Tokenizer, backbone: nn.Module, dtype: str = "auto") -> EncoderCard:
    """Return how the encoder in a folder of sentence-transformers is used. Raises `ArtifactError`."""
    length = library.length_for(tokenizer, count_positions(backbone))
    return EncoderCard(library.prompt, library.pooling, length, dtype, None, normalize=library.normalize)


def locate_base(folder: Path, card: EncoderCard) -> BackboneLocation:
    """Return where the weights of a saved encoder are. Raises `FileNotFoundError` for an adapter whose base is missing."""
    try:
        return locate(card.base or str(folder))
    except FileNotFoundError as error:
        hint = f" It is the `base` in {folder / CARD_NAME}; if it moved, change it there." if card.base else ""
        raise FileNotFoundError(f"{error}{hint}") from error


def _load_saved(
    path: str, folder: Path, commit: str | None, dtype: str, bits: int | Literal["auto"] | None, device: torch.device
) -> Parts:
    card = EncoderCard.read(folder)
    dtype = card.dtype if dtype == "auto" else dtype
    bits = card.bits if bits == "auto" else bits
    location = locate_base(folder, card)
    backbone = load_backbone(location, dtype=dtype, revision=card.base_revision, bits=bits, device=device)
    tokenizer = load_tokenizer(BackboneLocation(str(folder)))
    with as_artifact_error(folder):
        check_loaded(backbone, tokenizer, folder)
    if card.base is None:
        base = str(folder) if commit is None else path  # not its path in the cache
        return Parts(folder, backbone, tokenizer, base, commit, card=card)
    fingerprint = weights_fingerprint(backbone)
    # Rounding to float16 and then to the bfloat16 of the fingerprint is not rounding to bfloat16 directly.
    comparable = dtype == card.dtype or "float16" not in (dtype, card.dtype)
    if comparable and card.base_fingerprint not in (None, fingerprint):
        raise ArtifactError(
            f"{folder} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has "
            f"{fingerprint}. Restore the original base, or correct `base` in {folder / CARD_NAME}."
        )
    with as_artifact_error(folder):
        adapter = read_adapter(folder)
        adapter.check_fits(backbone, f"the adapter {folder}", card.base)
    return Parts(folder, backbone, tokenizer, card.base, card.base_revision, fingerprint, card, adapter)


def save_parts(
    folder: str | Path,
    backbone: Any,
    tokenizer: Tokenizer,
    card: EncoderCard,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a saved folder, whole or not at all: an adapted backbone as its adapter, any other with all its weights."""
    if not is_adapted(backbone):
        card = replace(card, base=None, base_revision=None, base_fingerprint=None, layers=None)

    def fill(target: Path) -> None:
        # Otherwise peft would query the hub for a resized vocabulary.
        backbone.save_pretrained(target, **({"save_embedding_layers": False} if is_adapted(backbone) else {}))
        if not is_adapted(backbone):
            write_earlier_names(target)
        tokenizer.save_pretrained(target)
        (target / "README.md").unlink(missing_ok=True)  # the empty model card of peft
        card.write(target)
        if not is_adapted(backbone):
            write_library_form(target, backbone, tokenizer, card)
        else:
            write_library_refusal(target)
        if check is not None:
            check(target)

    write_directory(Path(folder), fill)


_EARLIER_THETAS = {
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gpt_neox": {"": "rotary_emb_base"},
}
"""Model type → layer type → key of `rope_theta` in transformers 4; "" if all layers share it."""


def write_earlier_names(folder: Path) -> None:
    """Add the keys of transformers 4 to `config.json`, which transformers 5 moved or renamed.

    transformers 4 and other programs use defaults for keys that they do not find, without a message. The keys were found
    by comparing the configuration classes of transformers 4.48, 4.57 and 5.23.
    """
    path = folder / "config.json"
    values = read_json(path)
    for config in (values, values.get("text_config") or {}):
        config.update(_earlier_names(config))
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _earlier_names(config: dict[str, Any]) -> dict[str, Any]:
    rope, types = config.get("rope_parameters") or {}, config.get("layer_types") or []
    names: dict[str, Any] = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    nested = "full_attention" in rope
    keys = _EARLIER_THETAS.get(
        config.get("model_type", ""), _EARLIER_THETAS["gemma3_text"] if nested else {"": "rope_theta"}
    )
    for layer_type, key in keys.items():
        if theta := (rope.get(layer_type) or {} if nested else rope).get("rope_theta"):
            names[key] = theta
    scaled = {key: value for key, value in (rope.get("full_attention") or rope).items() if key != "rope_theta"}
    if (factor := scaled.pop("partial_rotary_factor", None)) is not None:
        names |= {"partial_rotary_factor": factor, "rotary_pct": factor}
    if (
        scaled.get("rope_type", "default") != "default" and "global_rope_theta" not in keys.values()
    ):  # ModernBERT has none
        names["rope_scaling"] = scaled
    if "full_attention" in types and "sliding_attention" in types:
        first = types.index("full_attention")  # Gemma-3: every n-th layer; ModernBERT: the layers 0, n, 2n, …
        if first == 0:
            names["global_attn_every_n_layers"] = [*types[1:], "full_attention"].index("full_attention") + 1
        else:
            names["sliding_window_pattern"] = first + 1
    return names


_LIBRARY_PROBES = ("A man eats 3 apples.", "Straße, Привет 你好!", "x [SEP] </s> <|im_end|> y", "one two " * 5000)


def write_library_form(folder: Path, backbone: nn.Module, tokenizer: Tokenizer, card: EncoderCard) -> None:
    """Make the folder of a whole model a folder of sentence-transformers, or write a `modules.json` that it refuses.

    It becomes one if the library computes the token ids of this encoder: the prompt is text before `{text}`.
    """
    path = folder / "tokenizer_config.json"
    original = path.read_bytes() if path.is_file() else b""
    try:
        prompts, default = library_prompts(card.prompt, folder)
        path.write_text(json_text(tokenizer_config(tokenizer, card.max_length)), encoding="utf-8")
        saved = load_tokenizer(BackboneLocation(str(folder)))
        for side in SIDES:
            expected = SentenceTokenizer(tokenizer, card.prompt.of(side), card.max_length)(_LIBRARY_PROBES)
            texts = [card.prompt.of(side).head + text for text in _LIBRARY_PROBES]
            ids = [saved(text, truncation=True)["input_ids"] for text in texts]
            if ids != expected or card.dimensions is not None:
                raise ArtifactError(f"{folder} has other token ids or dimensions in sentence-transformers.")
        write_library_files(
            folder, backbone, card.pooling, card.max_length, normalize=card.normalize, prompts=prompts, default=default
        )
    except (ArtifactError, FileNotFoundError, ValueError):  # ValueError: a probe without a token
        if original:
            path.write_bytes(original)
        write_library_refusal(folder)


def check_savable(folder: str | Path, backbone: nn.Module, base: str | None) -> None:
    """Raise the errors of saving, before the work that is to be saved.

    Raises:
        ValueError: if the base of an adapter has no name.
        QuantizationError: for a quantized base without an adapter.
        ArtifactError: as `check_writable`.
    """
    target = Path(folder).expanduser()
    if not is_adapted(backbone):
        if (bits := bits_of(backbone)) is not None:
            raise QuantizationError(
                f"this encoder is a base in {bits} bits without an adapter, so it has nothing to save. Add an adapter, or save "
                "the base itself, loaded with bits=None."
            )
        check_writable(target)
    elif base is None:
        raise ValueError("the base of the adapter has no name. Construct the encoder with base=…, or from_pretrained.")
    else:
        check_writable(target, base=base if Path(base).is_absolute() else "")


def check_writable(target: Path, **read: str | Path) -> None:
    """Refuse a target that must not be replaced; call it before hours of work, not after.

    Args:
        read: folders and files that are read, by what they are ("base", "adapter").

    Raises:
        ArtifactError: if `target` has content and is not a saved encoder, or if replacing it would delete what is read.
    """
    if target.exists() and not (target.is_dir() and (is_saved_encoder(target) or not any(target.iterdir()))):
        raise ArtifactError(f"{target} exists and is not a saved encoder, so it is left alone. Choose another folder.")
    for what, path in read.items():
        if path and Path(path).exists() and Path(path).resolve().is_relative_to(target.resolve()):
            raise ArtifactError(f"{target} would overwrite the {what}, {path}. Choose another folder.")


def write_directory(target: Path, fill: Callable[[Path], object]) -> None:
    """Write a folder whole or not at all; see `io.write_folder`. Only a saved encoder or an empty folder is replaced.

    Raises:
        ArtifactError: if `target` has other content.
    """
    target = target.expanduser()
    check_writable(target)
    write_folder(target, fill)
