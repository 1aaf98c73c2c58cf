"""`SentenceEncoder`: texts in, one row each out.

Legend: B texts of a micro-batch, T tokens, D dimensions, N texts asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from angle_llm.artifact import (
    CARD_NAME,
    ArtifactError,
    EncoderCard,
    check_writable,
    is_saved_encoder,
    write_directory,
)
from angle_llm.modeling import adapters
from angle_llm.modeling.backbone import (
    BackboneLocation,
    count_positions,
    is_causal,
    lasting_name,
    load_backbone,
    load_tokenizer,
    locate,
    weights_fingerprint,
)
from angle_llm.modeling.counters import EncodeStats, FlopsPerToken
from angle_llm.modeling.foreign import on_backbone, open_foreign
from angle_llm.modeling.last_layer import PooledLastLayer
from angle_llm.modeling.microbatches import Plan, plan_micro_batches
from angle_llm.modeling.pooling import last_position, pooling_named
from angle_llm.modeling.quantized import QuantisationError, bits_of, each_token_alone, mend
from angle_llm.modeling.sharing import find_sharing
from angle_llm.modeling.tokenization import SentenceTokenizer, Tokenizer, check_texts
from angle_llm.modeling.trie import Trie, trie_states
from angle_llm.prompts import PromptTemplate, load_prompt
from angle_llm.settings import LoraSettings

DEFAULT_PROMPT = {True: "summarize_one_word", False: "plain"}
DEFAULT_POOLING = {True: "last", False: "mean"}
DEFAULT_MAX_LENGTH = 512
FIRST_TOKEN_POOLINGS = ("cls",)

TEXTS_PLANNED = 32_768
"""Texts that are planned, and may share prefixes, together: a corpus of any size takes the memory of so many."""

_ONE_AT_A_TIME = threading.RLock()
"""A forward puts its trie in force in the backbone; another thread's would meet it there."""

Rows = np.ndarray[Any, np.dtype[np.float32]]


class EmbeddingModel(nn.Module):
    """Backbone and pooling: a micro-batch in, float32 rows out. This is what training wraps and calls.

    The inputs of a micro-batch come in one of two forms (see `microbatches`). A causal backbone gets no mask for padding:
    on the right it lies after every real token, which cannot see it, and without a mask attention may take its fast path.
    """

    def __init__(self, backbone: nn.Module, pooling: str, causal: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.causal = causal
        self._last_layer = PooledLastLayer.find(backbone) if causal and pooling == "last" else None
        self.train(backbone.training)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None, trie: Trie | None = None) -> Tensor:
        """Rows (B, D) of right-padded texts, given `mask_BT`; or rows (R, D) of the texts of a trie."""
        with _ONE_AT_A_TIME:
            if trie is not None:
                rows = self._states_at(trie.end_R, lambda: trie_states(self.backbone, ids_BT, trie))
            else:
                assert mask_BT is not None, "a micro-batch is padded texts with a mask, or a trie"
                if self.causal and self.pooling == "last":
                    rows = self._states_at(last_position(mask_BT), lambda: self._causal_states(ids_BT))
                else:
                    rows = self._padded_rows(ids_BT, mask_BT)
        return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows

    def _states_at(self, end_R: Tensor, states: Callable[[], Tensor]) -> Tensor:
        """The states (R, D) at some positions, by the shorter way if the last layer has it."""
        if self._last_layer is None:
            return states().flatten(0, 1)[end_R]
        with self._last_layer.pooled(end_R):
            return states()

    def _causal_states(self, ids_BT: Tensor) -> Tensor:
        states_BTD: Tensor = self.backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        return states_BTD

    def _padded_rows(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        pooling = pooling_named(self.pooling)
        output = self.backbone(
            input_ids=ids_BT,
            attention_mask=None if self.causal else mask_BT,
            output_hidden_states=pooling.averages_first_layer,
            **({"use_cache": False} if self.causal else {}),
        )
        states_BTD = output.last_hidden_state
        if pooling.averages_first_layer:
            states_BTD = (output.hidden_states[1] + states_BTD) / 2
        rows_BD: Tensor = pooling.function(states_BTD, mask_BT)
        return rows_BD


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
        mend(backbone)  # before its first forward pass
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
        with each_token_alone(backbone):  # both probe it
            self.model = EmbeddingModel(backbone, pooling, causal)
            self.sharing = find_sharing(backbone, pooling, causal=causal)
        self.tokenizer = tokenizer
        self.sentences = SentenceTokenizer(
            tokenizer, prompt or load_prompt(DEFAULT_PROMPT[causal]), max_length or default_length
        )
        self.base = None if base is None else lasting_name(base)
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
    ) -> SentenceEncoder:
        """Loads an encoder: a directory written by `save_pretrained`, or a backbone (folder, `.gguf` file, hub id,
        `package:NAME/path`).

        A saved directory knows its prompt, pooling and length; for a backbone they may be named here. `dtype` "auto" is
        the one of training for a saved directory, the stored one for a backbone. `bits` 4 or 8 holds the weights so (see
        `quantized`), None does not; "auto" is as in training for a saved directory, None for a backbone. An adapter
        trained on a quantised base fits no other quite as well. `device` defaults to the GPU if there is one. The network
        is reached only for a hub id that is not in the local cache.

        `adapter` is a folder that plain peft or angle-emb wrote, to be put on the backbone (see `foreign`); it does not say
        how texts were worded, so `prompt` has to be named with it, and pooling and length where they are not the usual ones.

        Raises:
            FileNotFoundError: if there is no model at the path, or no adapter.
            ArtifactError: for a damaged directory, or a base that is not the one the adapter was trained on.
            ValueError: for an adapter without a prompt, or on a saved directory.
            QuantisationError: if the weights cannot be held in so many bits.
        """
        path = str(path_or_id)
        if isinstance(prompt, str):
            prompt = load_prompt(prompt)
        device = torch.device(device) if device is not None else _default_device()
        foreign = None if adapter is None else open_foreign(Path(adapter).expanduser(), path, prompt)
        if is_saved_encoder(path):
            folder = Path(path).expanduser()
            card = EncoderCard.read(folder)
            dtype = card.dtype if dtype == "auto" else dtype
            bits = card.bits if bits == "auto" else bits
            encoder = _load_saved(cls, folder, card, prompt, pooling, max_length, dtype, bits, device)
        else:
            location = locate(path)
            bits = None if bits == "auto" else bits
            # On the device: it is probed where it will run.
            backbone = load_backbone(location, dtype=dtype, revision=revision, bits=bits, device=device)
            commit: str | None = getattr(backbone.config, "_commit_hash", None)
            encoder = cls(
                backbone,
                load_tokenizer(location, revision),
                prompt=prompt,
                pooling=pooling,
                max_length=max_length,
                base=path,
                base_revision=commit or revision,
            )
            if foreign is not None:
                encoder.base_fingerprint = weights_fingerprint(backbone)
                encoder.model.backbone = adapters.apply_lora(backbone, on_backbone(foreign, backbone, path))
        encoder.model.to(device)
        return encoder

    @property
    def prompt(self) -> PromptTemplate:
        """How sentences are worded."""
        return self.sentences.prompt

    @property
    def pooling(self) -> str:
        """Which states make the embedding."""
        return self.model.pooling

    @property
    def max_length(self) -> int:
        """Tokens of a worded sentence, prompt and special tokens included."""
        return self.sentences.max_length

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the base weights, and of products with them if they are quantised."""
        return _base_dtype(self.model.backbone)

    @property
    def bits(self) -> int | None:
        """The bits the base is held in, None if it is not quantised."""
        return bits_of(self.model.backbone)

    @property
    def pad_id(self) -> int:
        """The id padding is filled with. It is never looked at: masked, or after the last token a causal model reads."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    def add_lora(self, settings: LoraSettings) -> None:
        """Wraps the backbone with a fresh adapter; only the adapter trains from here on."""
        if adapters.is_adapted(self.model.backbone):
            raise ValueError(f"this encoder has an adapter already. Start from its base, {self.base}.")
        self.base_fingerprint = weights_fingerprint(self.model.backbone)
        self.model.backbone = adapters.add_lora(self.model.backbone, settings)

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

    @torch.no_grad()  # not inference_mode: weights that ZeRO-3 puts together in it could not be trained after
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
        from tqdm import tqdm

        if isinstance(texts, str):
            raise TypeError("encode takes a sequence of texts, got one string. Put it in a list.")
        started = time.perf_counter()
        check_texts(texts)
        budget = micro_batch_tokens or (2048 if self.device.type == "cpu" else 16384)
        rows_ND = np.empty((len(texts), self.dimensions), dtype=np.float32)
        stats = EncodeStats.none(FlopsPerToken.of(self.model.backbone).forward)
        was_training = self.model.training
        self.model.eval()
        try:
            with tqdm(total=len(texts), desc="encode", unit="text", disable=not show_progress, leave=False) as progress:
                for first in range(0, len(texts), TEXTS_PLANNED):
                    plan = self.plan(texts[first : first + TEXTS_PLANNED], budget)
                    rows_UD = torch.empty(plan.unique, self.dimensions)
                    repeats = len(plan.row_of) / max(plan.unique, 1)
                    for micro in plan.micro_batches:
                        rows_UD[micro.rows] = self.model(**micro.on(self.device)).float().cpu()
                        progress.update(round(len(micro.rows) * repeats))
                    rows_ND[first : first + TEXTS_PLANNED] = rows_UD.numpy()[plan.row_of]
                    stats = stats.plus(plan)
        finally:
            self.model.train(was_training)
        if not return_stats:
            return rows_ND
        return rows_ND, replace(stats, seconds=time.perf_counter() - started)

    def plan(self, texts: Sequence[str], token_budget: int, processes: int = 1) -> Plan:
        """How the texts are computed: in which micro-batches, as tries or padded, by which of several processes, and why."""
        return self.plan_ids(self.sentences(texts) if len(texts) else [], token_budget, processes)

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
        """D, the length of a vector."""
        return _dimensions(self.model.backbone)[0]

    def check_savable(self, folder: str | Path) -> None:
        """Raises what `save_pretrained` would refuse, before the work that is to be saved is done."""
        target = Path(folder).expanduser()
        check_writable(target)
        if not adapters.is_adapted(self.model.backbone):
            if self.bits is not None:
                raise QuantisationError(
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
        backbone: Any = self.model.backbone
        adapted = adapters.is_adapted(backbone)
        card = EncoderCard(
            prompt=self.prompt,
            pooling=self.pooling,
            max_length=self.max_length,
            dtype=str(_base_dtype(backbone)).removeprefix("torch."),
            base=self.base if adapted else None,
            base_revision=self.base_revision if adapted else None,
            base_fingerprint=self.base_fingerprint if adapted else None,
            bits=self.bits,
        )

        def fill(target: Path) -> None:
            # peft would ask the hub whether the vocabulary was resized; nothing here resizes it.
            backbone.save_pretrained(target, **({"save_embedding_layers": False} if adapted else {}))
            self.tokenizer.save_pretrained(target)
            (target / "README.md").unlink(missing_ok=True)  # peft's empty model card
            card.write(target)
            if check is not None:
                check(target)

        write_directory(Path(folder), fill)


def _load_saved(
    cls: type[SentenceEncoder],
    folder: Path,
    card: EncoderCard,
    prompt: PromptTemplate | None,
    pooling: str | None,
    max_length: int | None,
    dtype: str,
    bits: int | None,
    device: torch.device,
) -> SentenceEncoder:
    try:
        location = locate(card.base or str(folder))
    except FileNotFoundError as error:
        hint = f" {folder / CARD_NAME} names it as the base; if it moved, change it there." if card.base else ""
        raise FileNotFoundError(f"{error}{hint}") from error
    backbone = load_backbone(location, dtype=dtype, revision=card.base_revision, bits=bits, device=device)
    encoder = cls(
        backbone,
        load_tokenizer(BackboneLocation(str(folder))),
        prompt=prompt or card.prompt,
        pooling=pooling or card.pooling,
        max_length=max_length or card.max_length,
        base=card.base or str(folder),
        base_revision=card.base_revision,
    )
    if card.base is not None:
        fingerprint = weights_fingerprint(backbone)
        # Rounding to float16 and then on to the fingerprint's bfloat16 is not rounding to bfloat16 at once.
        comparable = dtype == card.dtype or "float16" not in (dtype, card.dtype)
        if comparable and card.base_fingerprint not in (None, fingerprint):
            raise ArtifactError(
                f"{folder} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has "
                f"{fingerprint}. Put the original base there, or name the right one in {folder / CARD_NAME}."
            )
        encoder.base_fingerprint = fingerprint
        encoder.model.backbone = adapters.load_lora(backbone, folder)
    return encoder


def _dimensions(backbone: nn.Module) -> tuple[int, int]:
    """Lengths of a state after the last layer and between layers; they differ in OPT-350m alone."""
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    between: int = config.hidden_size
    return getattr(config, "word_embed_proj_dim", None) or between, between


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _base_dtype(backbone: Any) -> torch.dtype:
    dtype: torch.dtype = (backbone.get_base_model() if adapters.is_adapted(backbone) else backbone).dtype
    return dtype
