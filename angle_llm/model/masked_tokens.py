"""Masked next-token prediction (MNTP): mask tokens of a text, and predict each from the state of the token before it.

A masked token is written as a single number that has the id in the input and the id to predict,

    code = id + vocabulary · (label + 1),   label = -1 for a token that is not predicted,

so that batches, their order and their split over processes are the same as for token ids.

Source: LLM2Vec (arXiv 2404.05961, section 2.1); masks as `DataCollatorForLanguageModeling` of transformers, which
llm2vec uses.

Shapes: B texts of T tokens, M masked tokens, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from angle_llm.model.source.backbone import open_pretrained
from angle_llm.model.source.checks import evaluating, relative_difference
from angle_llm.model.source.resolve import ModelSource
from angle_llm.model.tokenizer import Tokenizer
from angle_llm.settings.parsing import SettingsError

_REPLACED, _RANDOM = 0.8, 0.1
"""Fraction of the masked tokens that the mask token and a random token replace; the others are unchanged."""
_LOGIT_TOLERANCE = 1e-3
"""Largest relative difference between logits with and without scaling or a soft cap that rounding explains in float32."""


@dataclass(frozen=True)
class TokenMasker:
    """Chooses the tokens of texts to predict, and replaces them in the input."""

    vocabulary: int
    """Number of rows of the token embeddings; ids are smaller."""
    random_below: int
    """Number of ids that can replace a token at random: the size of the tokenizer."""
    mask_id: int
    special: frozenset[int]
    """Ids of special tokens, which are not masked."""
    fraction: float
    """Probability that a token is masked."""
    seed: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocabulary: int, fraction: float, seed: int) -> TokenMasker:
        """Create the masker of a tokenizer. The mask token is the one of the tokenizer, or `_`, as in llm2vec."""
        mask_id = tokenizer.mask_token_id
        if mask_id is None:  # without a token `_`, the last token of the text `_` is used
            mask_id = tokenizer.get_vocab().get("_", tokenizer("_", add_special_tokens=False)["input_ids"][-1])
        special = frozenset(tokenizer.all_special_ids)
        return cls(vocabulary, min(len(tokenizer), vocabulary), int(mask_id), special, fraction, seed)

    def codes(self, ids: Sequence[Sequence[int]], epoch: int) -> list[list[int]]:
        """Return the codes of texts with masked tokens; `ids` has the token ids of each text.

        The masks of a text depend on the seed, the epoch and its ids only.
        """
        return [self._codes(np.asarray(text, dtype=np.int64), epoch) for text in ids]

    def _codes(self, ids_T: Any, epoch: int) -> list[int]:
        digest = hashlib.sha256(ids_T.tobytes()).digest()[:16]
        generator = np.random.default_rng([self.seed, epoch, *np.frombuffer(digest, dtype=np.uint32).tolist()])
        chance_2T, random_T = generator.random((2, len(ids_T))), generator.integers(self.random_below, size=len(ids_T))
        masked_T = (chance_2T[0] < self.fraction) & ~np.isin(ids_T, list(self.special))
        input_T = np.where(chance_2T[1] < _REPLACED, self.mask_id, ids_T)
        input_T = np.where((chance_2T[1] >= _REPLACED) & (chance_2T[1] < _REPLACED + _RANDOM), random_T, input_T)
        label_T = np.where(masked_T, ids_T, -1)
        label_T[:1] = -1  # no token is before the first token
        codes: list[int] = (np.where(masked_T, input_T, ids_T) + self.vocabulary * (label_T + 1)).tolist()
        return codes


class TokenPrediction(nn.Module):
    """Predicts tokens from the states before them, with the output layer of the language model, which is not trained.

    If input and output embeddings are one matrix, it is trained with the backbone.
    """

    def __init__(self, output: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.output = output
        self.vocabulary = vocabulary
        """Number of rows of the token embeddings (see `TokenMasker`)."""

    def decode(self, code_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token ids of the input, and the ids to predict or -1; both (B, T)."""
        return code_BT % self.vocabulary, code_BT // self.vocabulary - 1

    def sums(self, states_BTD: Tensor, label_BT: Tensor, text_BT: Tensor, texts: int) -> Tensor:
        """Return (sum of cross-entropies, number of predicted tokens, 1) for each text, (texts, 3), in float32.

        Args:
            states_BTD: states after the last layer.
            label_BT: ids to predict, or -1.
            text_BT: number of the text of each token, from 0.
            texts: number of texts.
        """
        label, text = label_BT.flatten(), text_BT.flatten()
        place_M = (label >= 0).nonzero().squeeze(1)
        logits_MV = self.output(states_BTD.flatten(0, 1)[place_M - 1])
        loss_M = functional.cross_entropy(
            logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), label[place_M], reduction="none"
        )
        # A product: scatter operations add in an order that changes on a GPU.
        of_text_RM = (text[place_M] == torch.arange(texts, device=text.device)[:, None]).to(loss_M.dtype)
        return torch.stack(
            [of_text_RM @ loss_M, of_text_RM.sum(dim=1), torch.ones_like(of_text_RM[:, :1]).sum(dim=1)], 1
        )


def token_prediction(source: ModelSource, backbone: Any) -> TokenPrediction:
    """Return the output layer of the language model of a backbone.

    `backbone` is the loaded backbone of `source`.

    Raises:
        SettingsError: for a model without an output layer, or one that scales or caps its logits.
        ArtifactError: if the model cannot be opened.
    """
    embeddings = backbone.get_input_embeddings()
    model = open_pretrained(
        "AutoModelForCausalLM", source.backbone, dtype="float32", revision=source.backbone_revision
    ).eval()
    output = model.get_output_embeddings()
    with evaluating(model), torch.no_grad():
        ids_BT = torch.arange(5)[None] + 3
        states = model.base_model(input_ids=ids_BT).last_hidden_state
        plain, found = output(states), model(input_ids=ids_BT).logits
    if relative_difference(plain, found) > _LOGIT_TOLERANCE:
        raise SettingsError(
            f"pretraining.task mntp: {model.config.model_type} changes the logits of its output layer (scaling or a soft cap), "
            "which is not supported."
        )
    if output.weight is model.get_input_embeddings().weight:
        tokens, dimensions = embeddings.weight.shape
        tied = nn.Linear(dimensions, tokens, bias=False, device="meta")
        tied.weight = embeddings.weight
        return TokenPrediction(tied, len(embeddings.weight))
    output.to(embeddings.weight).requires_grad_(False)
    return TokenPrediction(output, len(embeddings.weight))
