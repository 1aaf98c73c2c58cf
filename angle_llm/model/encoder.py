"""`SentenceEncoder`: texts in, one row each out.

Legend: B texts of a micro-batch, T tokens, D dimensions, N texts asked for.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import nn

from angle_llm.config import LoraSettings
from angle_llm.io import progress_bar
from angle_llm.model import lora
from angle_llm.model.artifact import EncoderCard, Parts, check_writable, load_parts, save_parts
from angle_llm.model.attention import find_sharing
from angle_llm.model.backbone import FlopsPerToken, absolute_name, count_positions, is_causal, weights_fingerprint
from angle_llm.model.checks import CARD_NAME, ArtifactError, as_artifact_error, check_states
from angle_llm.model.depth import LayerStack
from angle_llm.model.fast_paths import bound_kernel_caches, freed_memory_kept, mend
from angle_llm.model.micro_batches import Plan, plan_micro_batches
from angle_llm.model.pooling import EmbeddingModel, pooling_named
from angle_llm.model.quantization import QuantizationError, bits_of, without_outliers
from angle_llm.model.tokenizer import SentenceTokenizer, Tokenizer, check_texts
from angle_llm.prompts import PromptTemplate, load_prompt

DEFAULT_PROMPT = {True: "summarize_one_word", False: "plain"}
DEFAULT_POOLING = {True: "last", False: "mean"}
DEFAULT_MAX_LENGTH = 512
FIRST_TOKEN_POOLINGS = ("cls",)

TEXTS_PLANNED = 32_768
"""Texts that are planned, and may share prefixes, together: a corpus of any size takes the memory of so many."""

Rows = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class EncodeStats:
    """What one call of `encode` did."""

    texts: int
    unique_texts: int
    """Texts with different ids."""
    logical_tokens: int
    computed_tokens: int
    seconds: float
    """With tokenisation and planning."""
    flops_per_token: float
    """Floating-point operations of the linear layers for one computed token."""
    layout: str
    """trie or padded."""
    reason: str
    """Why this way."""

    @classmethod
    def none(cls, flops_per_token: float) -> EncodeStats:
        """Before the first text."""
        return cls(0, 0, 0, 0, 0.0, flops_per_token, "", "")

    def plus(self, plan: Plan) -> EncodeStats:
        """With the texts of one more plan; way and reason are those of the first."""
        return replace(
            self,
            texts=self.texts + len(plan.row_of),
            unique_texts=self.unique_texts + plan.unique,
            logical_tokens=self.logical_tokens + plan.logical_tokens,
            computed_tokens=self.computed_tokens + plan.computed_tokens,
            layout=self.layout or plan.layout,
            reason=self.reason or plan.reason,
        )

    @property
    def texts_per_second(self) -> float:
        """Texts asked for, repeats counted."""
        return self.texts / self.seconds

    @property
    def flops(self) -> float:
        """Floating-point operations of the linear layers."""
        return self.flops_per_token * self.computed_tokens

    @property
    def computed_share(self) -> float:
        """Computed tokens for each logical one; below 1 where texts share more than padding adds."""
        return self.computed_tokens / max(self.logical_tokens, 1)


class SentenceEncoder:
    """A language model that turns sentences into vectors.

    The same verbs work on an adapter directory, a saved whole model, and an untouched backbone:

        encoder = SentenceEncoder.from_pretrained("runs/nli/model")
        rows = encoder.encode(["A man is eating.", "Someone eats."])     # (2, D) float32
        encoder.save_pretrained("somewhere")
    """

    def __init__(
        self,
        backbone: nn.Module,
        tokenizer: Tokenizer,
        *,
        prompt: PromptTemplate | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        base: str | None = None,
        base_revision: str | None = None,
    ) -> None:
        """Wraps a loaded backbone. What is left out follows from its kind: a causal model is worded with
        `summarize_one_word` and pooled at the last token, a bidirectional one reads the plain text and is averaged.

        `base` names where the backbone came from; an adapter is saved with it, a local path as an absolute one.

        Raises:
            ValueError: for an unknown pooling or one the backbone cannot have, or a `max_length` beyond its positions.
        """
        bound_kernel_caches()
        mend(backbone)  # both before its first forward pass
        causal = is_causal(backbone)
        pooling = pooling or DEFAULT_POOLING[causal]
        dimensions, layer_dimensions = _dimensions(backbone)
        if pooling_named(pooling).averages_first_layer and dimensions != layer_dimensions:
            raise ValueError(
                f"pooling {pooling!r} averages the first and the last layer, but this backbone projects its last from "
                f"{layer_dimensions} to {dimensions} dimensions. Choose another pooling."
            )
        if causal and pooling in FIRST_TOKEN_POOLINGS:
            raise ValueError(
                f"pooling {pooling!r} reads the first token, which in a causal model has seen no other: every text would "
                "get the same vector. Use last, or mean."
            )
        positions = count_positions(backbone)
        if max_length is not None and positions is not None and max_length > positions:
            raise ValueError(
                f"max_length {max_length} is more than the {positions} positions of the backbone. Lower it."
            )
        default_length = min(positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
        with without_outliers(backbone):  # both probe it
            self.model = EmbeddingModel(backbone, pooling, causal)
            self.sharing = find_sharing(backbone, pooling, causal=causal)
        self.tokenizer = tokenizer
        self.sentence_tokenizer = SentenceTokenizer(
            tokenizer, prompt or load_prompt(DEFAULT_PROMPT[causal]), max_length or default_length
        )
        self.base = None if base is None else absolute_name(base)
        self.base_revision = base_revision
        self.base_fingerprint: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        adapter: str | Path | None = None,
        prompt: str | PromptTemplate | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        bits: int | Literal["auto"] | None = "auto",
        dimensions: int | None = None,
        layers: int | None = None,
    ) -> SentenceEncoder:
        """Loads an encoder: a directory written by `save_pretrained`, or a backbone (folder, `.gguf` file, hub id,
        `package:NAME/path`).

        A saved directory knows its prompt, pooling and length; for a backbone they may be named here. `dtype` "auto" is
        the one of training for a saved directory, the stored one for a backbone. `bits` 4 or 8 holds the weights so (see
        `quantized`), None does not; "auto" is as in training for a saved directory, None for a backbone. An adapter
        trained on a quantized base fits no other quite as well. `device` defaults to the GPU if there is one. The network
        is reached only for a hub id, of a saved encoder or of a backbone, at `revision` (see `hub`).

        `adapter` is a folder that plain peft or angle-emb wrote, to be put on the backbone (see `foreign`); it does not say
        how texts were worded, so `prompt` has to be named with it, and pooling and length where they are not the usual ones.

        `dimensions` and `layers` keep the first so many only, see `truncated`; None: as saved.

        Raises:
            FileNotFoundError: if there is no model at the path, or no adapter.
            ArtifactError: for a damaged directory, or a base that is not the one the adapter was trained on.
            ValueError: for an adapter without a prompt, or on a saved directory; for more dimensions or layers than there are.
            QuantizationError: if the weights cannot be held in so many bits.
        """
        device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        template = load_prompt(prompt) if isinstance(prompt, str) else prompt
        parts = load_parts(
            str(path_or_id), adapter=adapter, prompt=template, dtype=dtype, device=device, revision=revision, bits=bits
        )
        encoder = cls._assembled(parts, str(adapter or path_or_id), template, pooling, max_length)
        if dimensions is not None or layers is not None:
            encoder = encoder.truncated(dimensions=dimensions, layers=layers)
        encoder.model.to(device)
        return encoder

    @classmethod
    def _assembled(
        cls, parts: Parts, place: str, prompt: PromptTemplate | None, pooling: str | None, max_length: int | None
    ) -> SentenceEncoder:
        """The encoder of loaded parts; arguments that are None are taken from the card, if there is one."""
        card = parts.card
        saved = (None, None, None) if card is None else (card.prompt, card.pooling, card.max_length)
        with as_artifact_error(place):
            encoder = cls(
                parts.backbone,
                parts.tokenizer,
                prompt=prompt or saved[0],
                pooling=pooling or saved[1],
                max_length=max_length or saved[2],
                base=parts.base,
                base_revision=parts.base_revision,
            )
        encoder.base_fingerprint = parts.base_fingerprint
        if card is not None and (card.dimensions is not None or card.layers is not None):
            try:
                encoder = encoder.truncated(dimensions=card.dimensions, layers=card.layers)
            except ValueError as error:
                raise ArtifactError(f"{Path(place) / CARD_NAME} does not fit its weights: {error}") from error
        if parts.adapter is not None:
            with as_artifact_error(place):
                encoder.model.backbone = lora.apply_lora(encoder.model.backbone, parts.adapter)
                check_states(encoder.model.backbone)
        return encoder

    def with_prompt(self, prompt: str | PromptTemplate) -> SentenceEncoder:
        """The same encoder under another prompt: a name, a YAML file or a template. It shares its weights with this one."""
        other = copy.copy(self)
        template = load_prompt(prompt) if isinstance(prompt, str) else prompt
        other.sentence_tokenizer = SentenceTokenizer(self.tokenizer, template, self.max_length)
        return other

    def truncated(self, *, dimensions: int | None = None, layers: int | None = None) -> SentenceEncoder:
        """The encoder of the first `layers` layers and the first `dimensions` of a vector; None keeps what there is.

        It computes so many layers only, and can be saved, trained and used like any other. It shares its weights with this
        one, which stays as it is. Vectors of an encoder that was trained for it (`nested` in the settings) lose little;
        those of any other may lose much. `encode_complex` reads halves of what is kept.

        Raises:
            ValueError: for more than there is, or a backbone that gives other states without its last layers.
        """
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise ValueError(
                f"dimensions must be in 1 .. {self.dimensions}, as a vector has so many; got {dimensions}."
            )
        if layers is not None and not 1 <= layers <= self.layers:
            raise ValueError(f"layers must be in 1 .. {self.layers}, as the backbone has so many; got {layers}.")
        short = copy.copy(self)
        short.model = self.model.truncated(
            self.model.dimensions if dimensions in (None, self.dimensions) else dimensions,
            None if layers is None or layers == self.layers else layers,
        )
        return short

    @property
    def prompt(self) -> PromptTemplate:
        """How sentences are worded."""
        return self.sentence_tokenizer.prompt

    @property
    def pooling(self) -> str:
        """Which states make the embedding."""
        return self.model.pooling

    @property
    def max_length(self) -> int:
        """Tokens of a worded sentence, prompt and special tokens included."""
        return self.sentence_tokenizer.max_length

    @property
    def layers(self) -> int:
        """How many layers compute a vector."""
        return len(LayerStack.of(self.model.backbone).layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the base weights, and of products with them if they are quantized."""
        backbone: Any = self.model.backbone
        dtype: torch.dtype = (backbone.get_base_model() if lora.is_adapted(backbone) else backbone).dtype
        return dtype

    @property
    def bits(self) -> int | None:
        """The bits the base is held in, None if it is not quantized."""
        return bits_of(self.model.backbone)

    @property
    def pad_id(self) -> int:
        """The id padding is filled with. It is never looked at: masked, or after the last token a causal model reads."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    def add_lora(self, settings: LoraSettings) -> None:
        """Wraps the backbone with a fresh adapter; only the adapter trains from here on."""
        if lora.is_adapted(self.model.backbone):
            raise ValueError(f"this encoder has an adapter already. Start from its base, {self.base}.")
        self.base_fingerprint = weights_fingerprint(self.model.backbone)
        self.model.backbone = lora.add_lora(self.model.backbone, settings)

    @overload
    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = ..., show_progress: bool = ...
    ) -> Rows: ...

    @overload
    def encode(
        self,
        texts: Sequence[str],
        *,
        micro_batch_tokens: int | None = ...,
        show_progress: bool = ...,
        return_stats: Literal[True],
    ) -> tuple[Rows, EncodeStats]: ...

    def encode(
        self,
        texts: Sequence[str],
        *,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
        return_stats: bool = False,
    ) -> Rows | tuple[Rows, EncodeStats]:
        """Vectors of the texts: (N, D) float32, in the order given; with `return_stats`, also what was computed.

        Repeated texts and, in a causal model, shared beginnings are computed once. Micro-batches hold at most
        `micro_batch_tokens` tokens with padding (by default 2,048 on a CPU, whose caches are small, and 16,384 elsewhere).
        A text's vector does not depend on the texts beside it, up to the rounding of the weights' dtype.

        Raises:
            TypeError, ValueError: for a text that is not a string or is empty; the message gives its position.
        """
        with self.model.reading(()):
            rows_ND, stats = self._rows(texts, micro_batch_tokens, show_progress)
        return (rows_ND, stats) if return_stats else rows_ND

    def encode_layers(
        self,
        texts: Sequence[str],
        layers: Sequence[int],
        *,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
    ) -> Rows:
        """The vectors of encoders of so many layers each, from one pass through all: (N, len(layers), D) float32.

        `encode_layers(texts, [m])[:, 0]` is what `truncated(layers=m).encode(texts)` gives. `layers` may name the last.

        Raises:
            ValueError: for layers that are not there or named twice, or a backbone whose inner states are not understood.
            TypeError, ValueError: for a text, as `encode` does.
        """
        inner = [layer for layer in layers if layer != self.layers]
        if len(set(layers)) < len(layers):
            raise ValueError(f"layers names one twice: {list(layers)}.")
        with self.model.reading(inner):
            rows_NC, _ = self._rows(texts, micro_batch_tokens, show_progress)
        place = [0 if layer == self.layers else 1 + inner.index(layer) for layer in layers]
        return rows_NC.reshape(len(texts), 1 + len(inner), self.dimensions)[:, place]

    @torch.no_grad()  # not inference_mode: weights that ZeRO-3 puts together in it could not be trained after
    def _rows(
        self, texts: Sequence[str], micro_batch_tokens: int | None, show_progress: bool
    ) -> tuple[Rows, EncodeStats]:
        """What the model makes of the texts: (N, C), C columns for what it reads."""
        if isinstance(texts, str):
            raise TypeError("encode takes a sequence of texts, got one string. Put it in a list.")
        started = time.perf_counter()
        check_texts(texts)
        budget = micro_batch_tokens or (2048 if self.device.type == "cpu" else 16384)
        columns = self.dimensions * (1 + len(self.model.inner_layers))
        rows_NC = np.empty((len(texts), columns), dtype=np.float32)
        stats = EncodeStats.none(FlopsPerToken.of(self.model.backbone).forward)
        was_training = self.model.training
        self.model.eval()
        heap = freed_memory_kept() if self.device.type == "cpu" else nullcontext()
        try:
            with (
                heap,
                progress_bar("encode", len(texts), "text", enabled=show_progress, transient=True) as progress,
            ):
                for first in range(0, len(texts), TEXTS_PLANNED):
                    plan = self.plan_ids(self.tokenize(texts[first : first + TEXTS_PLANNED], first), budget)
                    rows_UC = torch.empty(plan.unique, columns)
                    repeats = len(plan.row_of) / max(plan.unique, 1)
                    for micro in plan.micro_batches:
                        rows_UC[micro.rows] = self.model(**micro.inputs(self.device)).float().cpu()
                        progress.update(round(len(micro.rows) * repeats))
                    rows_NC[first : first + TEXTS_PLANNED] = rows_UC.numpy()[plan.row_of]
                    stats = stats.plus(plan)
        finally:
            self.model.train(was_training)
        return rows_NC, replace(stats, seconds=time.perf_counter() - started)

    def tokenize(self, texts: Sequence[str], first: int = 0) -> list[list[int]]:
        """Token ids of each text: prompt, special tokens and truncation included; errors count positions from `first`."""
        return self.sentence_tokenizer(texts, first)

    def plan(self, texts: Sequence[str], token_budget: int, processes: int = 1) -> Plan:
        """How the texts are computed: in which micro-batches, as tries or padded, by which of several processes, and why."""
        return self.plan_ids(self.tokenize(texts) if len(texts) else [], token_budget, processes)

    def plan_ids(self, ids: Sequence[Sequence[int]], token_budget: int, processes: int = 1) -> Plan:
        """The same for texts that are worded and tokenised already."""
        return plan_micro_batches(ids, token_budget, self.pad_id, self.sharing, processes)

    def encode_complex(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> np.ndarray[Any, np.dtype[np.complex64]]:
        """The vectors as the angle objective reads them: (N, D/2) complex64, first half real, second half imaginary."""
        rows_ND: Rows = self.encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=show_progress)
        real, imaginary = np.split(rows_ND, 2, axis=1)
        complex_rows: np.ndarray[Any, np.dtype[np.complex64]] = (real + 1j * imaginary).astype(np.complex64)
        return complex_rows

    @property
    def dimensions(self) -> int:
        """D, how many numbers a vector has."""
        return self.model.dimensions or _dimensions(self.model.backbone)[0]

    def check_savable(self, folder: str | Path) -> None:
        """Raises what `save_pretrained` would refuse, before the work that is to be saved is done."""
        target = Path(folder).expanduser()
        check_writable(target)
        if not lora.is_adapted(self.model.backbone):
            if self.bits is not None:
                raise QuantizationError(
                    f"this encoder is a base held in {self.bits} bits without an adapter, so there is nothing of its own to "
                    "save. Add an adapter, or save the base as it is, loaded with bits=None."
                )
            return
        if self.base is None:
            raise ValueError("the adapter's base has no name. Construct the encoder with base=…, or from_pretrained.")
        base = Path(self.base)
        if base.is_absolute() and base.resolve().is_relative_to(target.resolve()):
            raise ValueError(f"{folder} holds the base of this adapter. Save the adapter in another directory.")

    def save_pretrained(self, folder: str | Path, check: Callable[[Path], None] | None = None) -> None:
        """Writes the encoder as a directory that `from_pretrained` reads back exactly; whole or not at all.

        An adapted encoder is saved as its adapter and the name of its base, any other as the whole backbone. `check` looks at
        the written files before they take their place, and raises if they are not to.

        Raises:
            ValueError: if an adapter's base has no name or would be overwritten, for then nobody could load it again.
            ArtifactError: if the folder holds something that is not a saved encoder.
        """
        self.check_savable(folder)
        adapted = lora.is_adapted(self.model.backbone)
        card = EncoderCard(
            prompt=self.prompt,
            pooling=self.pooling,
            max_length=self.max_length,
            dtype=str(self.dtype).removeprefix("torch."),
            base=self.base if adapted else None,
            base_revision=self.base_revision if adapted else None,
            base_fingerprint=self.base_fingerprint if adapted else None,
            bits=self.bits,
            dimensions=self.model.dimensions,
            layers=self.model.cut_to if adapted else None,
        )
        save_parts(folder, self.model.backbone, self.tokenizer, card, check)


def _dimensions(backbone: nn.Module) -> tuple[int, int]:
    """Lengths of a state after the last layer and between layers; they differ in OPT-350m alone."""
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    between: int = config.hidden_size
    return getattr(config, "word_embed_proj_dim", None) or between, between
