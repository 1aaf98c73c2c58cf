"""Masked next-token prediction (MNTP): mask tokens of a text, and predict each from the state of the token before it.

Each token of a training text is stored as one integer, its code:

    code = input id + vocabulary · (label + 1)

The label is the id to predict, or -1 if the token is not predicted. Planning and splitting of batches then handle codes
like token ids.

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

from angle_llm.device import evaluating, relative_difference
from angle_llm.model.source.backbone import open_pretrained
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.resolve import ModelSource
from angle_llm.model.source.tokenizer import Tokenizer
from angle_llm.settings.parsing import SettingsError

_REPLACED, _RANDOM = 0.8, 0.1
"""Fraction of the masked tokens that the mask token and a random token replace; the others are unchanged."""
_LOGIT_TOLERANCE = 1e-3
"""Largest relative difference between logits with and without scaling or a soft cap that rounding explains in float32.
Of equal layers it is 0 in any dtype, because both compute the same product."""


@dataclass(frozen=True)
class TokenMasker:
    """Chooses the tokens of texts to predict, and replaces them in the input."""

    vocabulary: int
    """Number of rows of the token embeddings; ids are smaller."""
    random_below: int
    """Number of ids that can replace a token at random: the size of the tokenizer."""
    mask_id: int
    special: frozenset[int]
    """Ids that are not masked: the special tokens and `mask_id`."""
    fraction: float
    """Probability that a token is masked."""
    seed: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocabulary: int, fraction: float, seed: int) -> TokenMasker:
        """Create the masker of a tokenizer.

        It uses the mask token of the tokenizer; without one, the token `_`, as llm2vec does.
        """
        mask_id = tokenizer.mask_token_id
        if mask_id is None:  # without a token `_`, the last token of the text `_` is used
            mask_id = tokenizer.get_vocab().get("_", tokenizer("_", add_special_tokens=False)["input_ids"][-1])
        special = frozenset({*tokenizer.all_special_ids, int(mask_id)})
        return cls(vocabulary, min(len(tokenizer), vocabulary), int(mask_id), special, fraction, seed)

    def codes(self, ids: Sequence[Sequence[int]], epoch: int) -> list[list[int]]:
        """Return the codes of texts with masked tokens; `ids` has the token ids of each text.

        The masks of a text depend on the seed, the epoch and its ids only.
        """
        return [self._codes(np.asarray(text, dtype=np.int64), epoch) for text in ids]

    def _codes(self, ids_T: Any, epoch: int) -> list[int]:
        """Return the codes of a text; `ids_T` has its token ids."""
        digest = hashlib.sha256(ids_T.tobytes()).digest()[:16]
        generator = np.random.default_rng([self.seed, epoch, *np.frombuffer(digest, dtype=np.uint32).tolist()])
        chance_2T, random_T = generator.random((2, len(ids_T))), generator.integers(self.random_below, size=len(ids_T))
        masked_T = (chance_2T[0] < self.fraction) & ~np.isin(ids_T, list(self.special))
        input_T = np.select(
            [chance_2T[1] < _REPLACED, chance_2T[1] < _REPLACED + _RANDOM], [self.mask_id, random_T], ids_T
        )
        label_T = np.where(masked_T, ids_T, -1)
        label_T[:1] = -1  # no token is before the first token
        codes: list[int] = (np.where(masked_T, input_T, ids_T) + self.vocabulary * (label_T + 1)).tolist()
        return codes


class TokenPrediction(nn.Module):
    """Output layer of the language model: predicts a token from the state of the token before it.

    The layer is frozen, unless it shares its weight with the input embeddings and all weights are trained.
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
        # The first token of a text is never predicted, so the state before is of the same text.
        logits_MV = self.output(states_BTD.flatten(0, 1)[place_M - 1])
        loss_M = functional.cross_entropy(
            logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), label[place_M], reduction="none"
        )
        # No scatter operation, which adds in an order that changes on a GPU; no matrix product, which autocast rounds.
        of_text_RM = (text[place_M] == torch.arange(texts, device=text.device)[:, None]).to(loss_M.dtype)
        # 1: the row of a text without a predicted token must not look like a zero embedding (`checked_losses`).
        return torch.stack([(of_text_RM * loss_M).sum(dim=1), of_text_RM.sum(dim=1), of_text_RM.new_ones(texts)], dim=1)


def token_prediction(source: ModelSource, backbone: Any) -> TokenPrediction:
    """Return the output layer of the language model of a backbone.

    `backbone` is the loaded backbone of `source`.

    Raises:
        SettingsError: for a model that scales or caps its logits.
        ArtifactError: for a model that cannot be opened or has no output layer.
    """
    weight = backbone.get_input_embeddings().weight
    dtype = str(weight.dtype).removeprefix("torch.")
    try:
        model = open_pretrained("AutoModelForCausalLM", source.backbone, dtype=dtype, revision=source.backbone_revision)
    except ArtifactError as error:
        raise ArtifactError(
            f"--pretraining.task mntp: expected a language model with its output layer. A whole model that this package saved "
            f"has none: start from the original model, or from an adapter. {error}"
        ) from error
    output = model.get_output_embeddings()
    with evaluating(model):
        ids_BT = torch.arange(3, 8)[None]  # any ids
        plain = output(model.base_model(input_ids=ids_BT).last_hidden_state)
        logits = model(input_ids=ids_BT).logits
    if relative_difference(plain, logits) > _LOGIT_TOLERANCE:
        raise SettingsError(
            f"--pretraining.task mntp: expected logits that are the output of the last layer; {model.config.model_type} changes "
            "them (scaling, a cap, or another layer). Use another model, or --pretraining.task simcse."
        )
    tied = output.weight is model.get_input_embeddings().weight
    output.to(weight).requires_grad_(False)
    if tied:
        output.weight = weight  # trained with the backbone if --lora.rank is 0
    return TokenPrediction(output, len(weight))
