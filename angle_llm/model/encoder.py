"""`SentenceEncoder`: maps texts to embeddings, a row per text.

Legend: N texts, U unique texts, D dimensions.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, cast, overload

import numpy as np
import torch
from torch import nn

from angle_llm.device import bound_kernel_caches, limit_memory
from angle_llm.io import progress_bar, uses_windows_driver
from angle_llm.model.heads import EmbeddingModel, EmbeddingOptions
from angle_llm.model.layers import lora
from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.layers.quantization import QuantizationError, bits_of, without_outliers
from angle_llm.model.layers.quantized_layers import Bits, bits_text, patch_bitsandbytes
from angle_llm.model.layers.replacements import replace_layers_of_encoder
from angle_llm.model.layout.micro_batches import EncodeStats, LayoutSupport, Plan, plan_micro_batches
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.pipeline import Rows, encode_blocks
from angle_llm.model.pooling import checked_pooling
from angle_llm.model.source.artifact import check_writable, load_parts, save_parts
from angle_llm.model.source.backbone import (
    absolute_name,
    is_made_bidirectional,
    probes_as_causal,
    tokenizer_config_of,
    torch_device,
    use_equal_states,
)
from angle_llm.model.source.bidirectional import check_and_simplify_bidirectional
from angle_llm.model.source.checks import check_states
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import ModelSource, resolve_model
from angle_llm.model.source.saved_adapter import apply_lora
from angle_llm.model.source.tokenizer import (
    Instructions,
    SideTokenizers,
    Tokenizer,
    checked_length,
    checked_texts,
    warn_of_other_tokens,
)
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.prompts import SIDES, PromptChoice, PromptTemplate, Side, SidePrompts, load_prompts
from angle_llm.settings.parsing import unknown_name
from angle_llm.settings.train import LoraSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack

TEXTS_PLANNED = 32_768
"""Maximum number of texts that are split into micro-batches together and can share prefixes; limits the memory."""
Instruction: TypeAlias = str | Instructions | None


class EncodeOptions(TypedDict, total=False):
    """Options of `SentenceEncoder.encode`, described there."""

    instruction: Instruction
    normalize: bool
    micro_batch_tokens: int | None
    show_progress: bool


class SentenceEncoder:
    """Maps texts to embeddings with a language model: backbone with optional LoRA adapter, prompt and pooling.

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
        dense: nn.Sequential | None = None,
        base: str | None = None,
        base_revision: str | None = None,
        base_fingerprint: str | None = None,
        layout: Literal["auto", "padded"] = "auto",
    ) -> None:
        """Create an encoder from a loaded backbone and tokenizer.

        Args:
            prompt: None: `summarize_one_word` for a causal model, `plain` for a bidirectional model.
            pooling: None: `last` for a causal model, `mean` for a bidirectional model.
            max_length: maximum number of tokens of a text, with prompt; None: 512, or fewer if the backbone has fewer
                positions.
            normalize: scale embeddings to length 1.
            dense: Dense modules that are applied to the pooled state (`read_dense`); None: no Dense modules.
            base: path or hub id of the backbone, which is saved with an adapter.
            base_revision: revision of `base` on the hub.
            base_fingerprint: hash of the weights of the base; None: unknown, until an adapter is added.

        Raises:
            ValueError: for an unknown or impossible pooling, or a `max_length` beyond the positions of the backbone.
        """
        bound_kernel_caches()
        patch_bitsandbytes(backbone)  # both before its first forward pass
        use_equal_states(backbone)
        with without_outliers(backbone):  # for the probes
            if is_made_bidirectional(backbone):
                check_and_simplify_bidirectional(backbone)
            causal = probes_as_causal(backbone)
            pooling = checked_pooling(pooling, causal=causal)
            max_length = checked_length(max_length, backbone)
            self.model = EmbeddingModel(backbone, EmbeddingOptions(pooling, causal, normalize=normalize), dense)
            if layout == "padded":
                self.layouts = LayoutSupport("padded", "as requested", requested=True)
            else:
                self.layouts = probe_layouts(backbone, pooling, causal=causal)
        self.tokenizer = tokenizer
        prompts = load_prompts(prompt or ("summarize_one_word" if causal else "plain"))
        self.tokenizers = SideTokenizers.of(tokenizer, prompts, max_length)
        self.base = None if base is None else absolute_name(base)
        self.base_revision = base_revision
        self.base_fingerprint = base_fingerprint

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
        bits: Bits | Literal["auto"] | None = "auto",
        dimensions: int | None = None,
        layers: int | None = None,
        layout: Literal["auto", "padded"] = "auto",
        attention: Literal["bidirectional"] | None = None,
        instruction: str | None = None,
    ) -> SentenceEncoder:
        """Load a saved encoder, a sentence-transformers model, a backbone, or an adapter of peft with the base it names.

        The network is used for a hub id only.

        Args:
            path_or_id: folder, `.gguf` file, hub id, ID@REVISION, or `package:NAME/path` in a Python package.
            adapter: folder written by peft or angle-emb, with an adapter for the backbone; needs `prompt`.
            prompt: name, YAML file or `PromptTemplate`, or {"query": …, "document": …}. None: the prompt of the saved encoder or
                sentence-transformers model; for a backbone, the default of the constructor.
            pooling: name of the pooling; None: as for `prompt`.
            max_length: maximum number of tokens of a text; None: as for `prompt`.
            dtype: "auto": the dtype in training for a saved encoder, the stored dtype for other models.
            device: None: the GPU if there is a GPU, else the CPU.
            revision: revision of a hub id.
            bits: 4, 8 or fp8: quantize the weights (see `quantization`). "auto": as in training for a saved encoder, else None.
            dimensions: keep only the first dimensions (see `truncated`); None: as saved, else all.
            layers: keep only the first layers; None: as saved, else all.
            layout: "auto": texts share the computation of common prefixes or are packed, if possible and faster. "padded":
                usual batches.
            attention: "bidirectional": tokens of a decoder-only model attend to later tokens too, as in LLM2Vec
                (arXiv 2404.05961). None: as saved with the encoder, else as the architecture.
            instruction: default instruction, if the prompt of queries has `{instruction}`; None: the default of the prompt.

        Raises:
            FileNotFoundError: if the model or the adapter does not exist.
            ArtifactError: for a damaged folder, another base or attention than in the training of the adapter, or a model
                that does not support bidirectional attention.
            ValueError: for an adapter of peft without a prompt, too many dimensions or layers, or a device that does not exist.
            QuantizationError: if the weights cannot be quantized.
        """
        # Stored parts of the model.
        device = torch_device(device)
        if uses_windows_driver():
            limit_memory(device)
        prompts = None if prompt is None else load_prompts(prompt)
        source = (
            path_or_id if isinstance(path_or_id, ModelSource) else resolve_model(str(path_or_id), revision, attention)
        )
        if attention not in (None, source.attention):
            raise ValueError(f"attention={attention!r} cannot be set with a ModelSource. Pass it to resolve_model.")
        parts, card, lora = load_parts(source, adapter=adapter, prompt=prompts, dtype=dtype, device=device, bits=bits)
        # Encoder, with the usage in the card unless an argument replaces it.
        encoder = cls(
            **parts,
            prompt=prompts or (card.prompt if card else None),
            pooling=pooling or (card.pooling if card else None),
            max_length=card.max_length if card and max_length is None else max_length,
            normalize=card is not None and card.normalize,
            layout=layout,
        )
        if instruction is not None:
            encoder = encoder.with_prompt(encoder.prompts.with_instruction(instruction))
        warn_of_other_tokens(encoder.tokenizers, tokenizer_config_of(*source.tokenizer))
        # Dimensions and layers in the card, then the adapter, then the arguments.
        if card and (card.dimensions or card.layers):
            encoder = encoder.truncated(dimensions=card.dimensions, layers=card.layers)
        if lora is not None:
            encoder.model.backbone = apply_lora(encoder.model.backbone, lora)
            check_states(encoder.model.backbone)
            encoder.model.dense.requires_grad_(False)  # frozen, as the loaded adapter is
        if dimensions is not None or layers is not None:
            encoder = encoder.truncated(dimensions=dimensions, layers=layers)
        encoder.model.to(device)
        replace_layers_of_encoder(encoder.model, in_one_sequence=encoder.layouts.layout != "padded")
        return encoder

    def __repr__(self) -> str:
        backbone: Any = lora.without_adapter(self.model.backbone)
        adapter = ", LoRA adapter" if lora.is_adapted(self.model.backbone) else ""
        bits = "" if self.bits is None else f", {bits_text(self.bits)}"
        return (
            f"SentenceEncoder({backbone.config.model_type}{adapter}, {self.layers} layers, {self.dimensions} dimensions; "
            f"prompt {self.prompts.name}, pooling {self.pooling}, max_length {self.max_length}, normalize {self.normalize}; "
            f"{str(self.dtype).removeprefix('torch.')}{bits} on {self.device}; texts: {self.layouts.layout})"
        )

    def changed(self, **attributes: Any) -> SentenceEncoder:
        """Return an encoder with other attributes, such as `layouts` or `tokenizers`, and the same weights, without a copy."""
        encoder = copy.copy(self)
        vars(encoder).update(attributes)
        return encoder

    def with_prompt(self, prompt: PromptChoice) -> SentenceEncoder:
        """Return an encoder with another prompt and the same weights, without a copy; `prompt` as in `from_pretrained`."""
        return self.changed(tokenizers=SideTokenizers.of(self.tokenizer, load_prompts(prompt), self.max_length))

    def for_side(self, side: Side) -> SentenceEncoder:
        """Return an encoder that encodes all texts as queries or as documents, with the same weights, without a copy."""
        if side not in SIDES:
            raise ValueError(unknown_name("side", side, SIDES))
        return self.changed(tokenizers=replace(self.tokenizers, side=side))

    def truncated(self, *, dimensions: int | None = None, layers: int | None = None) -> SentenceEncoder:
        """Return an encoder that uses only the first `layers` and the first `dimensions`; None keeps all.

        The result shares its weights and can be saved and trained. Embeddings lose little quality if the encoder was
        trained for truncation (setting `nested`); otherwise they can lose much.

        Raises:
            ValueError: if the encoder has fewer layers or dimensions, or if its first layers compute other states without
                the last layers.
        """
        return self.changed(model=self.model.truncated(dimensions, layers))

    @property
    def prompts(self) -> SidePrompts:
        """The prompt of queries and the prompt of documents."""
        return self.tokenizers.prompts

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt of all texts. Raises `ValueError` if prompts of queries and documents differ and `side` is None."""
        return self.tokenizers.selected.prompt

    @property
    def side(self) -> Side | None:
        """`query` or `document` if the encoder reads all texts as queries or documents (see `for_side`), else None."""
        return self.tokenizers.side

    @property
    def pooling(self) -> str:
        """Name of the pooling, such as `last` or `mean`."""
        return self.model.options.pooling

    @property
    def attention(self) -> Literal["bidirectional"] | None:
        """Attention of a decoder-only model that was made bidirectional; None: the attention of the architecture."""
        return "bidirectional" if is_made_bidirectional(self.model.backbone) else None

    @property
    def normalize(self) -> bool:
        """Whether embeddings are scaled to length 1."""
        return self.model.options.normalize

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text, prompt and special tokens included; longer texts are truncated."""
        return self.tokenizers.query.max_length

    @property
    def dimensions(self) -> int:
        """Number of dimensions of an embedding, D."""
        return self.model.width

    @property
    def layers(self) -> int:
        """Number of layers of the backbone."""
        backbone: Any = lora.without_adapter(self.model.backbone)
        return int(backbone.config.get_text_config().num_hidden_layers)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base weights; for quantized weights, the dtype of matrix products."""
        backbone: Any = lora.without_adapter(self.model.backbone)
        return cast(torch.dtype, backbone.dtype)

    @property
    def bits(self) -> Bits | None:
        """Bits of the quantized base weights, 4, 8 or fp8; None if they are not quantized."""
        return bits_of(self.model.backbone)

    def to(self, device: str | torch.device) -> SentenceEncoder:
        """Move the weights to a device, and return the encoder. Layouts of texts are chosen again for another device type."""
        target = torch_device(device)
        changes_type = target.type != self.device.type
        self.model.to(target)
        if changes_type and not self.layouts.requested:
            self.layouts = probe_layouts(self.model.backbone, self.pooling, causal=self.model.options.causal)
        replace_layers_of_encoder(self.model, in_one_sequence=self.layouts.layout != "padded")
        return self

    def add_lora(self, settings: LoraSettings) -> None:
        """Add a new LoRA adapter and freeze all other weights; `settings.train_dense` keeps Dense modules trainable.

        Raises:
            ValueError: if the encoder already has an adapter, or a target is not the name of a layer.
        """
        if lora.is_adapted(self.model.backbone):
            raise ValueError(f"this encoder already has an adapter. Start from its base, {self.base}.")
        self.base_fingerprint = weights_fingerprint(self.model.backbone)
        self.model.backbone = lora.add_lora(self.model.backbone, settings)
        self.model.dense.requires_grad_(settings.train_dense)

    @overload
    def encode(self, texts: Sequence[str], **options: Unpack[EncodeOptions]) -> Rows: ...

    @overload
    def encode(
        self, texts: Sequence[str], *, return_stats: Literal[True], **options: Unpack[EncodeOptions]
    ) -> tuple[Rows, EncodeStats]: ...

    def encode(
        self,
        texts: Sequence[str],
        *,
        instruction: Instruction = None,
        normalize: bool = False,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
        return_stats: bool = False,
    ) -> Rows | tuple[Rows, EncodeStats]:
        """Return the embeddings of N texts in order, (N, D) float32; with `return_stats`, also counts and duration.

        Repeated texts, and common prefixes of texts in a causal model, are computed once. The embedding of a text does not
        depend on any other text, up to rounding. Forward passes in other threads wait until the end.

        Args:
            instruction: instruction for a prompt with `{instruction}`: one for all texts, or a list with the instruction of
                each text. None, also in a list: the default of the prompt.
            normalize: scale embeddings to length 1, also if the encoder does not (`SentenceEncoder.normalize`).
            micro_batch_tokens: maximum number of tokens in a micro-batch, padding included. None: 2,048 on a CPU, 16,384
                on other devices. It is halved after every out-of-memory error.
            show_progress: show a progress bar.
            return_stats: also return counts of texts and tokens, and the duration.

        Raises:
            TypeError: if a text is not a string; the message gives its position.
            ValueError: if a text is empty or has no tokens, if queries and documents have different prompts (use
                `encode_query` and `encode_document`), or for an instruction that is too long or has no place in the prompt.
            FloatingPointError: if an embedding is not finite, as after an overflow in float16.
        """
        started = time.perf_counter()
        texts = checked_texts(texts)
        instruction = () if instruction is None else instruction
        instructions = [instruction] * len(texts) if isinstance(instruction, str) else list(instruction)
        if instructions and len(instructions) != len(texts):
            raise ValueError(f"instruction: expected one per text, {len(texts)}, got {len(instructions)}.")
        rows_ND = np.empty((len(texts), self.dimensions), dtype=np.float32)
        plans: list[Plan] = []

        def blocks() -> Iterator[tuple[slice, list[list[int]]]]:
            for first in range(0, len(texts), TEXTS_PLANNED):
                planned = slice(first, first + TEXTS_PLANNED)
                yield planned, self.tokenize(texts[planned], first, instructions[planned])

        def store(planned: slice, block_ND: Rows) -> None:
            for row in np.flatnonzero(~np.isfinite(block_ND).all(axis=1)):
                raise FloatingPointError(
                    f"the embedding of {texts[planned][row][:80]!r} is not finite. Load the model in bfloat16 or float32, or "
                    "check its weights."
                )
            rows_ND[planned] = block_ND

        with progress_bar("encode", len(texts), "text", enabled=show_progress, transient=True) as progress:
            encode_blocks(
                self.model,
                self.plan_ids,
                blocks(),
                store,
                micro_batch_tokens=micro_batch_tokens,
                progress=progress.update,
                overlap=len(texts) > TEXTS_PLANNED,
                plans=plans if return_stats else None,  # plans have the token ids of all texts
            )
        seconds = time.perf_counter() - started
        rows_ND = unit_rows(rows_ND, np.float32) if normalize else rows_ND
        return (rows_ND, EncodeStats.of(plans, seconds)) if return_stats else rows_ND

    def encode_query(self, texts: Sequence[str], **options: Unpack[EncodeOptions]) -> Rows:
        """Return the embeddings of N texts with the prompt of queries (first texts of training pairs), (N, D) float32."""
        return self.for_side("query").encode(texts, **options)

    def encode_document(self, texts: Sequence[str], **options: Unpack[EncodeOptions]) -> Rows:
        """Return the embeddings of N texts with the prompt of documents (second texts of pairs), (N, D) float32."""
        return self.for_side("document").encode(texts, **options)

    @staticmethod
    def similarity(left: Rows, right: Rows) -> Rows:
        """Return the cosines of all pairs of embeddings, (N, M) float32 for embeddings (N, D) and (M, D).

        A single embedding (D,) is a matrix (1, D). Lists and CPU tensors are embeddings too.
        """
        left_ND, right_MD = (unit_rows(np.atleast_2d(rows), np.float32) for rows in (left, right))
        cosines: Rows = left_ND @ right_MD.T
        return cosines

    def tokenize(self, texts: Sequence[str], first: int = 0, instructions: Instructions = ()) -> list[list[int]]:
        """Return the token ids of each text, with prompt and special tokens; arguments as in `SentenceTokenizer`."""
        return self.tokenizers.selected(texts, first, instructions)

    def plan(self, texts: Sequence[str], token_budget: int, processes: int = 1) -> Plan:
        """Split a batch of texts into micro-batches of at most `token_budget` tokens, distributed over processes."""
        return self.plan_ids(self.tokenize(texts) if len(texts) else [], token_budget, processes)

    def plan_ids(self, ids: Sequence[Sequence[int]], token_budget: int, processes: int = 1) -> Plan:
        """Split a batch of tokenized texts into micro-batches of at most `token_budget` tokens, as `plan` does."""
        return plan_micro_batches(ids, token_budget, self.layouts, processes)

    def check_savable(self, folder: str | Path) -> None:
        """Raise the errors that `save_pretrained` would raise; call before training, so that errors come early."""
        target = Path(folder).expanduser()
        if not lora.is_adapted(self.model.backbone):
            if self.bits is not None:
                raise QuantizationError(
                    f"this encoder is a base in {bits_text(self.bits)} without an adapter, so it has nothing to save. Add an "
                    "adapter; or load the base with bits=None, and save that."
                )
            check_writable(target)
        elif self.base is None:
            raise ValueError(
                "the base of the adapter has no name. Construct the encoder with base=…, or from_pretrained."
            )
        else:
            check_writable(target, base=self.base if Path(self.base).is_absolute() else "")
        if self.model.options.cut_to and any(
            "per_layer_model_projection.lora_" in name for name, _ in self.model.named_parameters()
        ):
            raise ValueError(
                "the adapter on per_layer_model_projection has outputs for the first layers only, so it would not fit its base. "
                "Omit this LoRA target, or merge the encoder with all layers (angle-llm merge) and open the result with `layers`."
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the encoder in a folder from which `from_pretrained` loads the same encoder.

        An encoder with an adapter is saved as the adapter and the name of the base. Other encoders are saved with all
        weights. The folder is written completely or not at all.

        Raises:
            ValueError: if the encoder has an adapter and `base` is None, or an adapter that does not fit the whole base.
            QuantizationError: if the encoder is quantized and has no adapter.
            ArtifactError: if `folder` has content and is not a saved encoder, or contains the base.
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
            bits=self.bits,
            dimensions=self.model.options.dimensions,
            layers=self.model.options.cut_to,
            normalize=self.normalize,
            attention=self.attention,
            dense=len(self.model.dense),
        )
        save_parts(folder, self.model.backbone, self.tokenizer, card, self.model.dense)
