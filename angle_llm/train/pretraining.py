"""Training on texts without labels: masked next-token prediction (MNTP), and two views of each text (SimCSE).

A task makes the loss of a dataset and the head of the model, and checks that the model can be trained with it.
Elsewhere, a task is named by its setting (`settings.train`), its command (`cli`) and `make_losses`
(`train.objectives`). The task of labelled data, with the same methods, is `train.objectives.PairTask`.

MNTP masks tokens of a text, and predicts each from the state of the token before it. Each token of a training text is
stored as one integer, its code:

    code = input id + vocabulary · (label + 1)

The label is the id to predict, or -1 if the token is not predicted. Planning and splitting of batches then handle codes
like token ids.

Source: LLM2Vec (arXiv 2404.05961, section 2.1); masks as `DataCollatorForLanguageModeling` of transformers, which
llm2vec uses.

Shapes: B texts of T tokens, M masked tokens, R texts of a micro-batch, N texts of a batch, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from angle_llm.device import evaluating, relative_difference
from angle_llm.losses import Objective, ObjectiveValue, Relation
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel, Head, ModelInput
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.source.backbone import open_pretrained
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.resolve import ModelSource
from angle_llm.model.source.tokenizer import Tokenizer
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import TrainSettings

_REPLACED, _RANDOM = 0.8, 0.1
"""Fraction of the masked tokens that the mask token and a random token replace; all remaining ones are unchanged."""
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

        It uses the mask token of the tokenizer; without one that has an embedding, the token `_`, as llm2vec does.
        """
        mask_id = tokenizer.mask_token_id
        if mask_id is None or mask_id >= vocabulary:  # without a token `_`, the last token of the text `_` is used
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
        chance_2T = generator.random((2, len(ids_T)))
        random_T = generator.integers(self.random_below, size=len(ids_T))
        masked_T = (chance_2T[0] < self.fraction) & ~np.isin(ids_T, list(self.special))
        input_T = np.select(
            [chance_2T[1] < _REPLACED, chance_2T[1] < _REPLACED + _RANDOM], [self.mask_id, random_T], ids_T
        )
        label_T = np.where(masked_T, ids_T, -1)
        label_T[:1] = -1  # no token is before the first token
        codes: list[int] = (np.where(masked_T, input_T, ids_T) + self.vocabulary * (label_T + 1)).tolist()
        return codes


class TokenPrediction(Head):
    """Head of MNTP: the output layer of the language model predicts a token from the state of the token before it.

    A row is `sums`, not an embedding. The output layer is frozen, unless it shares its weight with the input embeddings
    and all weights are trained.
    """

    unit = "texts"

    def __init__(self, output: nn.Module, masker: TokenMasker) -> None:
        super().__init__()
        self.output = output
        self._masker = masker
        self.logits_per_token = masker.fraction * masker.vocabulary

    def input_ids(self, ids: Sequence[Sequence[int]], epoch: int) -> list[list[int]]:
        """Return the codes of texts with masked tokens."""
        return self._masker.codes(ids, epoch)

    def outputs(self, model: EmbeddingModel, batch: ModelInput) -> list[Tensor]:
        """Return `sums`, as the only entry; `batch` has the codes of the tokens."""
        code_BT, sequence = batch.ids_BT, batch.sequence
        ids_BT, label_BT = code_BT % self._masker.vocabulary, code_BT // self._masker.vocabulary - 1
        states_BTD = model.states(batch._replace(ids_BT=ids_BT)).last_hidden_state
        if sequence is None:
            text_BT = torch.arange(len(ids_BT), device=ids_BT.device)[:, None].expand_as(ids_BT)
            return [self.sums(states_BTD, label_BT, text_BT, len(ids_BT))]
        lengths_R = torch.from_numpy(sequence.lengths_R).to(ids_BT.device)
        text_T = torch.arange(len(lengths_R), device=ids_BT.device).repeat_interleave(lengths_R)
        return [self.sums(states_BTD, label_BT, text_T[None], len(lengths_R))]

    def rows(self, model: EmbeddingModel, outputs: list[Tensor]) -> Tensor:
        return outputs[0]

    def sums(self, states_BTD: Tensor, label_BT: Tensor, text_BT: Tensor, texts: int) -> Tensor:
        """Return (sum of cross-entropies, number of predicted tokens, 1) for each text, (texts, 3), in float32.

        Args:
            states_BTD: states after the last layer.
            label_BT: ids to predict, or -1.
            text_BT: number of the text of each token, from 0.
            texts: number of texts.
        """
        label, text = label_BT.flatten(), text_BT.flatten()
        index_M = (label >= 0).nonzero().squeeze(1)
        # The first token of a text is never predicted, so the state before is of the same text.
        logits_MV = self.output(states_BTD.flatten(0, 1)[index_M - 1])
        loss_M = functional.cross_entropy(
            logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), label[index_M], reduction="none"
        )
        # No scatter operation, which adds in an order that changes on a GPU; no matrix product, which autocast rounds.
        of_text_RM = (text[index_M] == torch.arange(texts, device=text.device)[:, None]).to(loss_M.dtype)
        # 1: the row of a text without a predicted token must not look like a zero embedding (`PendingLosses`).
        return torch.stack([(of_text_RM * loss_M).sum(dim=1), of_text_RM.sum(dim=1), of_text_RM.new_ones(texts)], dim=1)


@dataclass(frozen=True)
class MaskedTokenLoss(Objective):
    """Mean cross-entropy of the masked tokens of a batch.

    The input (N, 3) is made by `TokenPrediction.sums`: sum of the cross-entropies of a text, number of its predicted
    tokens, and 1, which is not used here.
    """

    embeddings_per_text: int = 0

    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss; `relation` is not used. Without a masked token, loss and gradient are 0."""
        loss = embeddings[:, 0].sum() / embeddings[:, 1].detach().sum().clamp(min=1)
        return ObjectiveValue(loss, {"mntp": loss.detach()})

    def cosines(self, embeddings: Tensor, relation: Relation, /) -> dict[str, Tensor]:
        """Return nothing: a row has no embedding."""
        return {}


def output_layer(source: ModelSource, backbone: Any) -> nn.Module:
    """Return the output layer of the language model of a backbone, frozen unless it shares a trained weight.

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
    output: nn.Module = model.get_output_embeddings()
    with evaluating(model):
        ids_BT = torch.arange(3, 8)[None]  # any ids
        expected_logits = output(model.base_model(input_ids=ids_BT).last_hidden_state)
        logits = model(input_ids=ids_BT).logits
    if relative_difference(expected_logits, logits) > _LOGIT_TOLERANCE:
        raise SettingsError(
            f"--pretraining.task mntp: expected logits that are the output of the last layer; {model.config.model_type} changes "
            "them (scaling, a cap, or another layer). Use another model, or --pretraining.task simcse."
        )
    tied = output.weight is model.get_input_embeddings().weight
    output.to(weight).requires_grad_(False)
    if tied:
        output.weight = weight  # trained with the backbone if --lora.rank is 0
    return output


@dataclass(frozen=True)
class MaskedTokenTask:
    """MNTP: predict masked tokens. Needs bidirectional attention. For the methods, see also `objectives.PairTask`."""

    settings: TrainSettings
    partition_problem: ClassVar[str | None] = "train with --pretraining.task mntp. Use ZeRO-2"

    def loss(self, _: Objective) -> Objective:
        """Return the loss of a dataset; the settings of the objective are not used."""
        return MaskedTokenLoss()

    def head(self, encoder: SentenceEncoder, source: ModelSource) -> Head:
        """Return the head for an encoder that was loaded from `source`; its Dense modules are frozen.

        Raises:
            SettingsError: for causal attention, or a model that scales or caps its logits.
            ArtifactError: for a model that cannot be opened or has no output layer.
        """
        self._check(encoder)
        encoder.model.dense.requires_grad_(False)  # not used
        backbone: Any = without_adapter(encoder.model.backbone)
        return self._head(encoder, output_layer(source, backbone), backbone)

    def planned_head(self, encoder: SentenceEncoder, backbone: Any) -> Head:
        """Return the head for a forecast; `backbone` is on the meta device, and `encoder` is a small copy.

        Raises:
            SettingsError: for causal attention.
        """
        self._check(encoder)
        bare: Any = without_adapter(backbone)
        table_VD = bare.get_input_embeddings().weight
        vocabulary, width = table_VD.shape
        output = nn.Linear(width, vocabulary, bias=False, device="meta", dtype=table_VD.dtype).requires_grad_(False)
        if bare.config.tie_word_embeddings:
            output.weight = table_VD
        return self._head(encoder, output, bare)

    def _head(self, encoder: SentenceEncoder, output: nn.Module, backbone: Any) -> Head:
        vocabulary = len(backbone.get_input_embeddings().weight)
        fraction = self.settings.pretraining.mask_fraction
        return TokenPrediction(output, TokenMasker.of(encoder.tokenizer, vocabulary, fraction, self.settings.seed))

    @staticmethod
    def _check(encoder: SentenceEncoder) -> None:
        if encoder.model.options.causal:
            raise SettingsError(
                "--pretraining.task mntp: expected bidirectional attention, got causal attention. Set --model.attention "
                "bidirectional."
            )


@dataclass(frozen=True)
class TwoViews(Objective):
    """A loss on two embeddings of each text that differ by dropout: unsupervised SimCSE (arXiv 2104.08821, eq. 4).

    A row (N, 2D) has both embeddings of a text side by side. They are a positive pair with score 1 for `plain`, and the
    embeddings of other texts are negatives. The pairs of the dataset are not used.
    """

    plain: Objective
    embeddings_per_text: int = 2

    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss. Only `relation.text` is used."""
        return self.plain(*self.views(embeddings, relation))

    def cosines(self, embeddings: Tensor, relation: Relation, /) -> dict[str, Tensor]:
        """Return mean cosines of the views; the two views of a text are a positive pair."""
        return self.plain.cosines(*self.views(embeddings, relation))

    def views(self, x_N2D: Tensor, relation: Relation) -> tuple[Tensor, Relation]:
        """Return the embeddings (2N, D), first views first, and their positive pairs."""
        rows = len(x_N2D)
        first_N = torch.arange(rows, device=relation.left.device)
        text_N = relation.text_numbers(rows)
        views = Relation(first_N, first_N + rows, torch.ones(rows), text=torch.cat((text_N, text_N)))
        return torch.cat(x_N2D.chunk(2, dim=1)), views


class TwoViewsHead(Head):
    """Head of SimCSE: a row has two embeddings of the text, side by side, with two dropout masks."""

    passes = 2
    unit = "texts"

    def outputs(self, model: EmbeddingModel, batch: ModelInput) -> list[Tensor]:
        return [model.pooled(batch), model.pooled(batch)]

    def without_weights(self) -> Head:
        return TwoViewsHead()


@dataclass(frozen=True)
class TwoViewsTask:
    """Unsupervised SimCSE: the two embeddings of a text are a positive pair. Needs dropout."""

    settings: TrainSettings
    partition_problem: ClassVar[str | None] = "train with --pretraining.task simcse. Use ZeRO-2"

    def loss(self, plain: Objective) -> Objective:
        """Return the loss of a dataset; `plain` is computed on the pairs of embeddings."""
        return TwoViews(plain)

    def head(self, encoder: SentenceEncoder, _: ModelSource) -> Head:
        """Return the head for an encoder.

        Raises:
            SettingsError: see `planned_head`.
        """
        return self.planned_head(encoder, encoder.model.backbone)

    def planned_head(self, _: SentenceEncoder, backbone: Any) -> Head:
        """Return the head for a forecast.

        Raises:
            SettingsError: for a backbone without dropout.
        """
        if not any(module.p for module in backbone.modules() if isinstance(module, nn.Dropout)):
            raise SettingsError(
                "--pretraining.task simcse: expected dropout above 0, got 0: both embeddings of a text would be equal. Set "
                "--lora.dropout 0.1 with --lora.rank above 0."
            )
        return TwoViewsHead()


TASKS: dict[str, type[MaskedTokenTask | TwoViewsTask]] = {"mntp": MaskedTokenTask, "simcse": TwoViewsTask}
"""Value of the setting `pretraining.task` → task."""
