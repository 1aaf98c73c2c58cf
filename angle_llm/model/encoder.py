"""`SentenceEncoder`: maps texts to vectors, one row per text.

Legend: N texts, D dimensions, C columns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, overload

import numpy as np
import torch
from torch import nn

from angle_llm.io import progress_bar
from angle_llm.model.layers import lora
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.layers.quantized_layers import patch_bitsandbytes
from angle_llm.model.layout.attention import attention_kernels
from angle_llm.model.layout.micro_batches import EncodeStats, Plan, plan_micro_batches
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.memory.allocator import bound_kernel_caches, keep_freed_memory
from angle_llm.model.memory.out_of_memory import encode_planned
from angle_llm.model.pooling import EmbeddingModel, checked_pooling
from angle_llm.model.source.artifact import check_savable, load_parts, save_parts
from angle_llm.model.source.backbone import (
    absolute_name,
    is_causal,
    torch_device,
    use_capped_attention,
    weights_fingerprint,
)
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, as_artifact_error, check_states, evaluating
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.quantization import bits_of, without_outliers
from angle_llm.model.source.resolve import ModelSource, resolve_model
from angle_llm.model.tokenizer import SideTokenizers, Tokenizer, check_texts, checked_length
from angle_llm.prompts import PromptChoice, PromptTemplate, Side, SidePrompts, load_prompts
from angle_llm.settings.train import LoraSettings


class SentenceEncoder:
    """A language model that maps texts to vectors: an adapter folder, a saved whole model, or a plain backbone.

    encoder = SentenceEncoder.from_pretrained("runs/nli/model")
    rows = encoder.encode(["A man is eating.", "Someone eats."])     # (2, D) float32
    encoder.save_pretrained("somewhere")
    """

    def __init__(
        self,
        backbone: nn.Module,
        tokenizer: Tokenizer,
        *,
        prompt: PromptTemplate | SidePrompts | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        normalize: bool = False,
        base: str | None = None,
        base_revision: str | None = None,
    ) -> None:
        """Wrap a loaded backbone. Defaults: prompt `summarize_one_word` and pooling `last` for a causal model, `plain`
        and `mean` for a bidirectional one. With `normalize`, vectors have length 1. `base` is the name of the backbone,
        with which an adapter is saved.

        Raises:
            ValueError: for an unknown or impossible pooling, or a `max_length` beyond the positions of the backbone.
        """
        bound_kernel_caches()
        patch_bitsandbytes(backbone)  # both before its first forward pass
        use_capped_attention(backbone)
        causal = is_causal(backbone)
        pooling = checked_pooling(pooling, backbone, causal=causal)
        max_length = checked_length(max_length, backbone)
        with without_outliers(backbone):  # for the probes
            self.model = EmbeddingModel(backbone, pooling, causal, normalize=normalize)
            self.layouts = probe_layouts(backbone, pooling, causal=causal)
        self.tokenizer = tokenizer
        prompts = load_prompts(prompt or ("summarize_one_word" if causal else "plain"))
        self.tokenizers = SideTokenizers.of(tokenizer, prompts, max_length)
        self.base = None if base is None else absolute_name(base)
        self.base_revision = base_revision
        self.base_fingerprint: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path | ModelSource,
        *,
        adapter: str | Path | None = None,
        prompt: PromptChoice | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        bits: int | Literal["auto"] | None = "auto",
        dimensions: int | None = None,
        layers: int | None = None,
    ) -> SentenceEncoder:
        """Load an encoder: a folder of `save_pretrained` or sentence-transformers, or a backbone (folder, `.gguf` file,
        hub id or ID@REVISION, `package:NAME/path`). The network is used for a hub id only.

        Args:
            adapter: a folder written by peft or angle-emb, for the backbone; needs `prompt` (see `peft_adapter`).
            prompt: name, YAML file or template, or {"query": …, "document": …}. None: as saved, as a folder of
                sentence-transformers says, or as in the constructor; likewise `pooling`, `max_length`.
            dtype: "auto": of training for a saved folder, as stored for a backbone.
            device: None: the GPU if there is one.
            revision: of a hub id.
            bits: 4 or 8: quantize the weights (see `quantization`). "auto": as in training, else None.
            dimensions, layers: keep only the first ones (see `truncated`); None: as saved.

        Raises:
            FileNotFoundError: if there is no model at the path, or no adapter.
            ArtifactError: for a damaged folder, or another base than in the training of the adapter.
            ValueError: for an adapter without a prompt, too many dimensions or layers, or a device that does not exist.
            QuantizationError: if the weights cannot be quantized.
        """
        device = torch_device(device)
        prompts = None if prompt is None else load_prompts(prompt)
        source = path_or_id if isinstance(path_or_id, ModelSource) else resolve_model(str(path_or_id), revision)
        parts = load_parts(source, adapter=adapter, prompt=prompts, dtype=dtype, device=device, bits=bits)
        card = parts.card
        with as_artifact_error(parts.folder):
            encoder = cls(
                parts.backbone,
                parts.tokenizer,
                prompt=prompts or (card.prompt if card else None),
                pooling=pooling or (card.pooling if card else None),
                max_length=card.max_length if card and max_length is None else max_length,
                normalize=card is not None and card.normalize,
                base=parts.base,
                base_revision=parts.base_revision,
            )
        encoder.base_fingerprint = parts.base_fingerprint
        if card and (card.dimensions or card.layers):
            try:
                encoder = encoder.truncated(dimensions=card.dimensions, layers=card.layers)
            except ValueError as error:
                raise ArtifactError(f"{parts.folder}: {CARD_NAME} does not fit the weights: {error}") from error
        if parts.adapter is not None:
            with as_artifact_error(parts.folder):
                encoder.model.backbone = lora.apply_lora(encoder.model.backbone, parts.adapter)
                check_states(encoder.model.backbone)
        if dimensions is not None or layers is not None:
            encoder = encoder.truncated(dimensions=dimensions, layers=layers)
        encoder.model.to(device)
        return encoder

    def probe_layouts(self, device: torch.device) -> None:
        """Choose layouts for a device to which the weights move later. The device may be missing here if it has no index."""
        self.layouts = probe_layouts(self.model.backbone, self.pooling, causal=self.model.causal, device=device)

    def with_prompt(self, prompt: PromptChoice) -> SentenceEncoder:
        """Return the encoder with another prompt (as in `from_pretrained`) on the same weights."""
        other = copy.copy(self)
        other.tokenizers = SideTokenizers.of(self.tokenizer, load_prompts(prompt), self.max_length)
        return other

    def for_side(self, side: Side) -> SentenceEncoder:
        """Return the encoder whose `encode` reads all texts as queries or as documents, on the same weights."""
        other = copy.copy(self)
        other.tokenizers = replace(self.tokenizers, side=side)
        return other

    def truncated(self, *, dimensions: int | None = None, layers: int | None = None) -> SentenceEncoder:
        """Return the encoder of the first `layers` layers and `dimensions` dimensions, sharing weights; None keeps all.

        It can be saved and trained. An encoder that was trained for it (`nested` in the settings) loses little; any
        other can lose much. `encode_complex` uses halves of the kept dimensions.

        Raises:
            ValueError: for more than there are, or a backbone that gives other states without its last layers.
        """
        short = copy.copy(self)
        short.model = self.model.truncated(dimensions, layers)
        return short

    @property
    def prompts(self) -> SidePrompts:
        """The prompts of queries and of documents."""
        return self.tokenizers.prompts

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt around each text. Raises `ValueError` if queries and documents have different prompts."""
        return self.tokenizers.selected.prompt

    @property
    def side(self) -> Side | None:
        """`query` or `document` in an encoder made by `for_side`, else None."""
        return self.tokenizers.side

    @property
    def pooling(self) -> str:
        """Name of the pooling."""
        return self.model.pooling

    @property
    def normalize(self) -> bool:
        """Whether vectors have length 1."""
        return self.model.normalize

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text, with prompt and special tokens."""
        return self.tokenizers.query.max_length

    @property
    def dimensions(self) -> int:
        """D, the length of a vector."""
        return self.model.width

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(LayerStack.of(self.model.backbone).layers)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base weights; for quantized weights, of their products."""
        backbone: Any = lora.without_adapter(self.model.backbone)
        return cast(torch.dtype, backbone.dtype)

    @property
    def bits(self) -> int | None:
        """Bits of the base weights, None if they are not quantized."""
        return bits_of(self.model.backbone)

    @property
    def pad_id(self) -> int:
        """Token id of padding. It changes no vector: padding is masked, or follows the last token of a causal model."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    def add_lora(self, settings: LoraSettings) -> None:
        """Add a LoRA adapter and freeze all other weights."""
        if lora.is_adapted(self.model.backbone):
            raise ValueError(f"this encoder already has an adapter. Start from its base, {self.base}.")
        self.base_fingerprint = weights_fingerprint(self.model.backbone)
        self.model.backbone = lora.add_lora(self.model.backbone, settings)

    @overload
    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = ..., show_progress: bool = ...
    ) -> Rows: ...

    @overload
    def encode(
        self, texts: Sequence[str], *, return_stats: Literal[True], micro_batch_tokens: int | None = ...,
        show_progress: bool = ...,
    ) -> tuple[Rows, EncodeStats]: ...  # fmt: skip

    def encode(
        self,
        texts: Sequence[str],
        *,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
        return_stats: bool = False,
    ) -> Rows | tuple[Rows, EncodeStats]:
        """Return the vectors of the texts, (N, D) float32, in order; with `return_stats`, also counts and time.

        Repeated texts and shared prefixes of a causal model are computed once. Micro-batches have at most
        `micro_batch_tokens` tokens with padding (default: 2,048 on a CPU, 16,384 elsewhere; half as many each time
        memory runs out). The vector of a text does not depend on the other texts, up to rounding.

        Raises:
            TypeError, ValueError: for a text that is not a string or is empty, with its position; for two prompts.
        """
        with self.model.reading(()):
            rows_ND, stats = encode_texts(self, texts, micro_batch_tokens, show_progress)
        return (rows_ND, stats) if return_stats else rows_ND

    def encode_query(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> Rows:
        """Encode texts as queries, the first texts of training pairs; return (N, D) float32."""
        return self.for_side("query").encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=show_progress)

    def encode_document(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> Rows:
        """Encode texts as documents, the second texts of training pairs; return (N, D) float32."""
        return self.for_side("document").encode(
            texts, micro_batch_tokens=micro_batch_tokens, show_progress=show_progress
        )

    def encode_layers(
        self,
        texts: Sequence[str],
        layers: Sequence[int],
        *,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
    ) -> Rows:
        """Return the vectors after several numbers of layers, from one forward pass: (N, len(layers), D) float32.
        `encode_layers(texts, [m])[:, 0]` equals `truncated(layers=m).encode(texts)`. `layers` can contain the last one.

        Raises:
            ValueError: for layers that do not exist or are repeated, or a backbone without known states between layers.
        """
        inner = [layer for layer in layers if layer != self.layers]
        if len(set(layers)) < len(layers):
            raise ValueError(f"layers: expected different numbers, got {list(layers)}.")
        with self.model.reading(inner):
            rows_NC, _ = encode_texts(self, texts, micro_batch_tokens, show_progress)
        place = [0 if layer == self.layers else 1 + inner.index(layer) for layer in layers]
        return rows_NC.reshape(len(texts), 1 + len(inner), self.dimensions)[:, place]

    def encode_complex(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> np.ndarray[Any, np.dtype[np.complex64]]:
        """Return the vectors as (N, D/2) complex64: first half real, second half imaginary, as in the angle loss."""
        rows_ND = self.encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=show_progress)
        real, imaginary = np.split(rows_ND, 2, axis=1)
        return np.asarray(real + 1j * imaginary, dtype=np.complex64)

    def tokenize(self, texts: Sequence[str], first: int = 0) -> list[list[int]]:
        """Return the token ids of each text, with prompt and special tokens; errors count positions from `first`."""
        return self.tokenizers.selected(texts, first)

    def plan(self, texts: Sequence[str], token_budget: int, processes: int = 1) -> Plan:
        """Plan a batch: its micro-batches, the process of each, and their layout with the reason."""
        return self.plan_ids(self.tokenize(texts) if len(texts) else [], token_budget, processes)

    def plan_ids(self, ids: Sequence[Sequence[int]], token_budget: int, processes: int = 1) -> Plan:
        """Plan a batch that is given as token ids."""
        return plan_micro_batches(ids, token_budget, self.pad_id, self.layouts, processes)

    def check_savable(self, folder: str | Path) -> None:
        """Raise the errors that `save_pretrained` would raise, before the work."""
        check_savable(folder, self.model.backbone, self.base)

    def save_pretrained(self, folder: str | Path, check: Callable[[Path], None] | None = None) -> None:
        """Write a folder that `from_pretrained` reads back exactly; whole or not at all.

        An adapted encoder is saved as its adapter and the name of its base, any other as the whole backbone. `check`
        gets the written folder before it replaces the target, and raises to prevent this. Errors as in
        `artifact.check_savable`.
        """
        self.check_savable(folder)
        card = EncoderCard(
            prompt=self.prompts,
            pooling=self.pooling,
            max_length=self.max_length,
            dtype=str(self.dtype).removeprefix("torch."),
            base=self.base,
            base_revision=self.base_revision,
            base_fingerprint=self.base_fingerprint,
            bits=self.bits,  # type: ignore[arg-type]
            dimensions=self.model.dimensions,
            layers=self.model.cut_to,
            normalize=self.normalize,
        )
        save_parts(folder, self.model.backbone, self.tokenizer, card, check)


TEXTS_PLANNED = 32_768
"""Texts that are planned together and can share prefixes; bounds the memory for a corpus of any size."""

Rows = np.ndarray[Any, np.dtype[np.float32]]


def encode_texts(
    encoder: SentenceEncoder, texts: Sequence[str], micro_batch_tokens: int | None, show_progress: bool
) -> tuple[Rows, EncodeStats]:
    """Encode any number of texts: rows (N, C) and counts. C = D columns, plus D for each inner layer."""
    started = time.perf_counter()
    check_texts(texts)
    model, on_cpu = encoder.model, encoder.device.type == "cpu"
    budget = micro_batch_tokens or (2048 if on_cpu else 16384)
    columns = encoder.dimensions * (1 + len(model.inner_layers))
    rows_NC = np.empty((len(texts), columns), dtype=np.float32)
    plans: list[Plan] = []
    bar = progress_bar("encode", len(texts), "text", enabled=show_progress, transient=True)
    memory = keep_freed_memory() if on_cpu else nullcontext()
    with evaluating(model), attention_kernels(encoder.device), memory, bar as progress:
        for first in range(0, len(texts), TEXTS_PLANNED):
            make_plan = partial(encoder.plan_ids, encoder.tokenize(texts[first : first + TEXTS_PLANNED], first))
            plan, rows_UC = encode_planned(model, make_plan, budget, columns, progress.update)
            budget = plan.token_budget
            rows_NC[first : first + TEXTS_PLANNED] = rows_UC.numpy()[plan.row_of]
            plans.append(plan)
    return rows_NC, EncodeStats.of(plans, time.perf_counter() - started)
