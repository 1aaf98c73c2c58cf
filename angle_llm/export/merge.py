"""Merge an adapter into its base, or several encoders into one. The merged model needs neither peft nor the base.

    base, tensor by tensor ──► values of training ──► float32 + update ──► one rounding ──► shards
                                                                                  │
    saved adapter ◄─────────────── verify: equal vectors? ────────────────────────┘

The adapter is merged into the base weights it was trained on: rounded to the dtype in the encoder card, and dequantised
if the base was quantised. With the stored base weights, the result would be another encoder (peft#2321). A base in
safetensors is read tensor by tensor, so that merging needs the memory of one shard and one layer; verification loads
both forms, in turn. The target folder is written atomically, after verification.

Of a multimodal base, the result is the text model alone, or the composite model with all tensors and files of the base
except the weights of the text model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from angle_llm import __version__
from angle_llm.export.card import file_name
from angle_llm.export.comparison import Verification
from angle_llm.export.texts import SENTENCES
from angle_llm.export.verify import VerificationError, VerifyOptions, finish_folder, write_report
from angle_llm.export.weights import MergedWeights, count_differences, open_adapters_base
from angle_llm.io import log, write_json
from angle_llm.model.source.artifact import (
    check_writable,
    write_directory,
    write_earlier_names,
    write_library_form,
    write_read_window,
)
from angle_llm.model.source.backbone import (
    BackboneLocation,
    absolute_name,
    find_composite,
    find_tekken,
    load_tokenizer,
    state_sizes,
    torch_dtype,
)
from angle_llm.model.source.checks import (
    CARD_NAME,
    MERGE_NAME,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    ArtifactError,
    is_saved_encoder,
    model_inside,
    read_json,
)
from angle_llm.model.source.dense import dense_fingerprint, dense_folders, read_dense
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import ModelSource, is_hub_id, locate, resolve_model
from angle_llm.model.source.saved_adapter import LoraAdapter, read_adapter
from angle_llm.model.source.sentence_transformers_folder import write_library_refusal
from angle_llm.model.source.tokenizer import find_special_tokens, plain_ids
from angle_llm.model.source.weights import BaseWeights, find_tensors, model_file, open_base, safetensors_files

SHARD_BYTES = 4_000_000_000
"""Maximum size of a weights file, in bytes."""
_NOT_COMPARED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of a model configuration that do not change the vectors."""


def merge(
    run: str | Path,
    out: str | Path,
    *,
    others: Sequence[str | Path] = (),
    weights: Sequence[float] = (),
    dtype: str = "float32",
    composite: bool = False,
    check: bool = True,
    device: str | None = None,
) -> Verification | None:
    """Merge a saved LoRA adapter into its base, write the whole model to a folder, and return its comparison with the adapter.

    With `others`, combine models of one base: the sum of w_i W_i (model soups, arXiv 2203.05482), where W_i are the weights
    of model i with its adapter merged, and w_i its number in `weights`, divided by their sum. A mean of LoRA matrices would
    be another model.

    The folder is first compared with the first encoder alone. Then its weights are replaced by the combination and compared.

    Args:
        run: folder of the adapter; with `others`, any of the models.
        out: folder of the merged model.
        others: adapters and whole models with equal base, prompt, pooling, lengths and tokenizer, or the untrained base.
        weights: a number for each model; empty: equal weights.
        dtype: dtype of the merged weights, which are computed in float32 and rounded once.
        composite: of a multimodal base, write the composite model: the merged weights replace the weights of its text model,
            and all other tensors are unchanged. False: the text model alone.
        check: False skips the comparison, for a machine that cannot hold the model. The folder records the omission, and
            the result is None.
        device: device of the comparison; None: the best available.

    Raises:
        FileNotFoundError: if there is no adapter at `run`, or its base is missing.
        ArtifactError: for an adapter that cannot be merged, a base with other weights than in training, a target that
            would overwrite its inputs, or `composite` without a multimodal base.
        VerificationError: if the merged model differs from the adapter; nothing is written.
        ValueError: for `weights` that do not fit the models.
    """
    # What is merged: one adapter, or several models with their shares.
    models = [str(run), *map(str, others)]
    shares = _shares(models, weights)
    sources = [resolve_model(model) for model in models]
    first = next((number for number, source in enumerate(sources) if source.card is not None), None)
    if first is None:
        hint = model_inside(Path(run).expanduser())
        raise ArtifactError(f"merge: expected a saved encoder with {CARD_NAME}, got {' and '.join(models)}.{hint}")
    if not others and sources[0].adapter is None:
        raise ArtifactError(f"merge: expected a saved adapter, got {run}. A whole model needs no merge.")
    parts = _open_parts(sources, sources[first], Path(out).expanduser())
    weights_of_parts = [(part.weights, part.adapter) for part in parts]
    merged = MergedWeights(weights_of_parts, shares)
    encoder_folder = Path(sources[first].location.name)
    skeleton = parts[first].weights.skeleton
    composite_model = _open_composite(parts[first], encoder_folder) if composite else None

    # Where the merged model comes from. An untrained base among the inputs is the base of the result.
    card = next((part for part in parts if part.source.card is None), parts[first]).card
    adapter = parts[first].adapter
    named_parts = [{"name": model, "weight": share} for model, share in zip(models, shares, strict=True)]
    made_from: dict[str, Any] = {"parts": named_parts}
    if not others and adapter is not None:
        options = {key: adapter.config.get(key) for key in ("r", "lora_alpha", "use_rslora", "use_dora")}
        made_from = {"adapter_sha256": adapter.sha256, "adapter": options}
    provenance = {
        "base": card.base,
        "base_revision": card.base_revision,
        "base_fingerprint": card.base_fingerprint,
        "base_dtype": card.dtype,
        "bits": card.bits,
        "layers": card.layers,
        **made_from,
        "dtype": dtype,
        "composite": composite_model and composite_model.model_class,
        "angle_llm": __version__,
    }

    def fill(folder: Path) -> Verification | None:
        # With several models, the first one alone is verified; then its weights are replaced.
        verified = MergedWeights([weights_of_parts[first]]) if check else merged
        _write_weights(folder, skeleton, composite_model, verified, torch_dtype(dtype))
        _write_usage(folder, skeleton, composite_model, encoder_folder, card, dtype)
        write_json(folder / MERGE_NAME, provenance)
        name = f"{out} with the weights of {models[first]} alone" if others else str(out)
        verify_options = VerifyOptions(device=device)
        report = finish_folder(folder, encoder_folder, name, verify_options if check else None)
        if others and report is not None:
            _write_weights(folder, skeleton, composite_model, merged, torch_dtype(dtype))
            written = open_base(BackboneLocation(str(folder)), dtype=dtype)
            count = count_differences(written, skeleton.state_dict(), merged)
            if count.wrong:
                raise VerificationError(f"{out} was not written: {count}; most in {count.worst_tensor}.")
            combination = " and ".join(f"{share:.4g}" for share in shares)
            note = (
                f"The comparison is of {file_name(models[first])} alone. Then the weights were replaced by the combination "
                f"({combination}): {count}."
            )
            report = replace(report, notes=(*report.notes, note))
        write_report(folder, report, str(out))
        return report

    return write_directory(Path(out).expanduser(), fill, writer="")


def _shares(models: Sequence[str], weights: Sequence[float]) -> list[float]:
    """Return the share of each model in a merge: its weight divided by their sum, or equal shares without weights.

    Raises:
        ValueError: for `weights` that do not fit the models.
    """
    if weights and len(models) == 1:
        raise ValueError(
            "--weights: expected several models, got one. To scale an adapter, add its base: merge ADAPTER BASE OUT --weights "
            "0.5 0.5."
        )
    weights = list(weights) or [1.0] * len(models)
    if len(weights) != len(models) or not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"--weights: expected {len(models)} numbers, 0 or larger and not all 0; got {weights}.")
    return [weight / sum(weights) for weight in weights]


def _write_usage(
    folder: Path, skeleton: nn.Module, composite: _Composite | None, source: Path, card: EncoderCard, dtype: str
) -> None:
    """Write all files of a merged model except the weights of its backbone: configuration, tokenizer, card, Dense.

    `composite` is the composite model to write, if any. `source` is the folder of the encoder that is merged, and `card` its
    card.
    """
    new_card = replace(card, dtype=dtype, base=None, base_revision=None, base_fingerprint=None, bits=None, layers=None)
    new_card.write(folder)
    for path in dense_folders(source, card.dense):
        shutil.copytree(path, folder / path.name)
    if composite is not None:
        composite.copy_usage(folder, dtype)
        return
    config: Any = skeleton.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the merged model is not quantised, unlike its base
    config.dtype = torch_dtype(dtype)
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(folder)
    write_read_window(folder, config)
    write_earlier_names(folder)
    tokenizer = load_tokenizer(BackboneLocation(str(source)))
    tokenizer.save_pretrained(folder)
    write_library_form(folder, skeleton, tokenizer, new_card)


class _Part(NamedTuple):
    """An input of a merge: a model with its weights."""

    source: ModelSource
    card: EncoderCard
    """Card of the model, with its base if that is known; for an untrained base, the card of an encoder on it."""
    weights: BaseWeights
    adapter: LoraAdapter | None


def _open_parts(sources: Sequence[ModelSource], first: ModelSource, target: Path) -> list[_Part]:
    """Open the inputs of a merge, with bases rounded or quantized as in training.

    A model without a card is the untrained base of `first`, and gets its card.

    Raises:
        ArtifactError: for inputs that do not belong together, or a `target` that would overwrite an input.
    """
    bases = {source.card.base for source in sources if source.card is not None}
    opened: dict[EncoderCard, BaseWeights] = {}
    """Weights of the bases, which are in memory if they are GGUF files."""
    expected: dict[str, tuple[Any, str]] = {}
    parts = list[_Part]()
    for source in sources:
        folder = Path((first if source.card is None else source).location.name)
        check_target(folder, source.backbone, target)
        card = _card_of(source, first)
        if source.card is not None and source.card.base is None:
            weights = open_base(source.location, dtype="float32")
        else:
            if card not in opened:
                opened[card] = open_adapters_base(folder, card)
            weights = opened[card]
        adapter = None if source.adapter is None else read_adapter(folder)
        if adapter is not None:
            adapter.check_fits(weights.skeleton)
        part = _Part(source, card, weights, adapter)
        _check_equal(_facts(part, is_base=absolute_name(source.path) in bases), source.path, expected)
        parts.append(part)
    return parts


def _card_of(source: ModelSource, first: ModelSource) -> EncoderCard:
    """Return the card of a model, with the base of a merged model; for an untrained base, the card of `first` on it."""
    saved = first if source.card is None else source
    card, record_path = saved.card, Path(saved.location.name) / MERGE_NAME
    assert card is not None
    if card.base is None and record_path.is_file():
        record = read_json(record_path)
        known = {key: record.get(key) for key in ("base", "base_revision", "base_fingerprint", "bits", "layers")}
        card = replace(card, dtype=record.get("base_dtype") or card.dtype, **known)
    if source.card is None:
        card = replace(card, base=absolute_name(source.path), base_revision=source.revision)
    return card


def _facts(part: _Part, *, is_base: bool) -> dict[str, Any]:
    """Return the facts of a model that must be equal in all inputs of a merge, by name.

    `is_base`: an adapter was trained on the model, so that the model has another base than the adapter.
    """
    source, card, skeleton = part.source, part.card, part.weights.skeleton
    config: Any = skeleton.config
    tokenizer = load_tokenizer(source.location, source.revision)
    facts: dict[str, Any] = {}
    if card.base_fingerprint and not is_base:
        # Rounding to float16 changes the fingerprint.
        rounded = " in float16" if card.dtype == "float16" else ""
        facts[f"fingerprint of the base{rounded}"] = card.base_fingerprint
    facts["prompt"] = [prompt.fingerprint for prompt in vars(card.prompt).values()]
    for name in ("pooling", "max_length", "dimensions", "normalize", "attention"):
        facts[name] = getattr(card, name)
    facts["Dense modules"] = dense_fingerprint(read_dense(source.dense, state_sizes(skeleton)[0])).hex()
    facts["shapes of the weights"] = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    facts["tokenizer"] = (tokenizer.get_vocab(), plain_ids(tokenizer, SENTENCES), find_special_tokens(tokenizer))
    settings = {key: value for key, value in config.to_dict().items() if key not in _NOT_COMPARED}
    return facts | {f"{key} in config.json": value for key, value in settings.items()}


def _check_equal(facts: Mapping[str, Any], model: str, expected: dict[str, tuple[Any, str]]) -> None:
    """Compare the facts of a model with the earlier models of a merge. Raises `ArtifactError` for a difference.

    `expected` has the value of each fact and the model that it was first read from. New facts are added.
    """
    for name, value in facts.items():
        first_value, first_model = expected.setdefault(name, (value, model))
        if first_value != value:
            is_short = isinstance(value, str | int | float | bool | None)
            difference = f": expected {first_value}, got {value}" if is_short else ""
            raise ArtifactError(
                f"{model} and {first_model} do not belong together: {name}{difference}. Combine encoders that "
                "were trained from one base with equal settings of the model."
            )


def check_paths(run: str | Path, out: str | Path) -> tuple[Path, Path, EncoderCard]:
    """Return the folder of a saved encoder, the folder to write, and the card of the encoder.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is missing.
        ArtifactError: if `out` has files, or would overwrite the encoder or its base.
    """
    source, target = Path(run).expanduser(), Path(out).expanduser()
    if not is_saved_encoder(source):
        raise FileNotFoundError(
            f"{source} is not a saved encoder. Give the model folder of a run.{model_inside(source)}"
        )
    if target.is_dir() and any(target.iterdir()):
        raise ArtifactError(f"OUT {target} has files. Name a new folder.")
    check_target(source, resolve_model(str(source)).backbone, target)
    return source, target, EncoderCard.read(source)


def check_target(source: Path, base: BackboneLocation, target: Path) -> None:
    """Check that a target folder does not overwrite, and is not inside, a saved encoder (`source`) or its base.

    Raises:
        ArtifactError: with the path that would be overwritten.
    """
    # A GGUF base is one file: a target in the folder of the file does not change the file.
    read = {"adapter": source, "base": Path(base.name) / (base.gguf_file or "")}
    check_writable(target, **read)
    if is_saved_encoder(target) and not (target / MERGE_NAME).is_file():
        raise ArtifactError(
            f"{target} is not the result of a merge, so it is not replaced. Choose another folder, and name it last."
        )
    for name, path in read.items():
        if path.exists() and target.resolve().is_relative_to(path.resolve()):
            raise ArtifactError(f"{target} is in the folder of the {name}, {path}. Choose another folder.")


def _write_weights(
    folder: Path, skeleton: nn.Module, composite: _Composite | None, weights: MergedWeights, dtype: torch.dtype
) -> None:
    """Write the tensors of the merged model to one safetensors file, or to several files with an index.

    Tensors have the names that `save_pretrained` gives them, those in `skeleton`; in a composite model, the names in its
    files. `dtype` is the dtype of the merged tensors.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    state = skeleton.state_dict()
    name_of_key = {name: name for name in state} if composite is None else composite.names
    kept = {} if composite is None else composite.kept
    meta_tensors = {key: tensor.to("meta") for key, tensor in kept.items()}
    for key, name in name_of_key.items():
        meta_tensors[key] = state[name].to("meta", dtype if state[name].is_floating_point() else None)

    def tensor_of(key: str) -> torch.Tensor:
        if key in kept:
            return kept[key]
        tensor, _ = weights.tensor(name_of_key[key])
        return tensor.to(meta_tensors[key].dtype).contiguous()

    split = split_torch_state_dict_into_shards(meta_tensors, max_shard_size=SHARD_BYTES)
    for file, keys in split.filename_to_tensors.items():
        save_file({key: tensor_of(key) for key in keys}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


class _Composite(NamedTuple):
    """The composite model that a merge writes: the multimodal base with other weights in its text model."""

    base: str
    revision: str | None
    model_class: str
    names: dict[str, str]
    """Name of a tensor in the files of the base → its name in the text model."""
    kept: dict[str, torch.Tensor]
    """Tensors that are not in the text model, in memory-mapped files, by their names in the files of the base."""

    def copy_usage(self, folder: Path, dtype: str) -> None:
        """Copy configuration, processor and tokenizer of the base into a folder with merged weights of a dtype."""
        from huggingface_hub import try_to_load_from_cache

        def in_cache(name: str) -> Any:  # a path; None if unknown; else an object: the base has no such file
            return try_to_load_from_cache(self.base, name, revision=self.revision) if is_hub_id(self.base) else False

        unknown: list[str] = []
        for name in ("config.json", *PROCESSOR_FILES, *TOKENIZER_FILES):
            path = in_cache(name)
            if not isinstance(path, str):  # ask a hub that does not answer only once: it takes half a minute
                path = None if unknown else model_file(self.base, name, self.revision)
            if path is not None:
                shutil.copyfile(path, folder / name)
            elif in_cache(name) is None:
                unknown.append(name)
        if unknown:
            log(
                f"warning: without the hub, it is unknown whether {self.base} has {', '.join(unknown)}. Merge again with a "
                "connection, or copy them into the folder."
            )
        if (tekken := find_tekken(BackboneLocation(self.base), self.revision)) is not None:
            shutil.copyfile(tekken, folder / "tekken.json")
        # With another dtype, transformers would round merged weights; version 4 reads the dtype of each part.
        config = read_json(folder / "config.json")
        dtypes = {"dtype": dtype, "torch_dtype": dtype}
        changed = json.loads(  # also in nested objects
            json.dumps(config), object_hook=lambda part: part | {key: dtype for key in dtypes if part.get(key)}
        )
        if changed != config or not (config.get("dtype") or config.get("torch_dtype")):
            write_json(folder / "config.json", changed | dtypes)
        write_library_refusal(folder)


def _open_composite(part: _Part, folder: Path) -> _Composite:
    """Open the multimodal base of `part`, an input of a merge; `folder` is the folder of this input.

    Raises:
        ArtifactError: if the base is not a multimodal model, if the composite model would have other vectors than the
            encoder, or if transformers changes tensors of the base while loading.
    """
    from safetensors import safe_open

    card = part.card
    location = None if card.base is None else locate(card.base, card.base_revision)
    composite = None if location is None else find_composite(location, card.base_revision)
    if location is None or composite is None:
        raise ArtifactError(
            f"--composite: expected an encoder on a multimodal base, got {folder} on {card.base or 'an unknown base'}. Merge "
            "it without --composite."
        )
    if card.attention is not None or card.layers is not None:
        reason = "is bidirectional" if card.attention is not None else f"uses the first {card.layers} layers"
        raise ArtifactError(
            f"--composite: {folder} {reason}, which a composite model cannot compute. Merge it without --composite."
        )
    files: list[Any] = [
        safe_open(path, framework="pt") for path in safetensors_files(location.name, card.base_revision)
    ]
    stored = find_tensors(files, part.weights.skeleton)
    if stored is None:
        raise ArtifactError(
            f"--composite: transformers renames or packs tensors of {card.base} while loading, so its files cannot be written "
            "again. Merge it without --composite."
        )
    names = {key: name for name, (_, key) in stored.items()}
    kept = {key: file.get_tensor(key) for file in files for key in file.keys() if key not in names}  # noqa: SIM118
    return _Composite(location.name, card.base_revision, composite.model_class, names, kept)
