"""`SentenceEncoder` as a model for the package `mteb` (its `EncoderProtocol`, mteb 2 or later).

    import mteb
    model = MtebEncoder(SentenceEncoder.from_pretrained("runs/nli/model"), name="me/my-model")
    mteb.evaluate(model, mteb.get_tasks(tasks=["STSBenchmark"]), cache=None)

The prompt can depend on the task and side that mteb passes with the texts. The encoder limits batches by tokens, so
mteb's `batch_size` has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from mteb.models import ModelMeta
from mteb.models.abs_encoder import get_prompt_name
from mteb.models.model_meta import ScoringFunction
from mteb.similarity_functions import cos_sim, pairwise_cos_sim
from numpy.typing import NDArray

from angle_llm.evaluate.encoding import encode_usable
from angle_llm.model.encoder import SentenceEncoder


class MtebEncoder:
    """Model for `mteb.evaluate` that encodes texts with a `SentenceEncoder`.

    `prompts` maps keys to prompts (a name or YAML file). A key names the texts that get the prompt. As in mteb, the
    first matching key is used: task and side (`NFCorpus-query`), task (`STSBenchmark`), task type and side
    (`Retrieval-query`, `Retrieval-document`), task type (`STS`, `Classification`, `Clustering`, `PairClassification`,
    `Reranking`, `Summarization`, …), side (`query`, `document`). Without a match, the encoder's prompt for documents is
    used if mteb passes documents, and its prompt for queries otherwise.

    Blank texts, which occur in mteb's corpora, and texts whose characters the tokenizer drops get a zero vector:
    similarity 0 with all texts.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        *,
        name: str,
        revision: str | None = None,
        prompts: Mapping[str, str] | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        """Wrap `encoder` as a model that has the name ORGANISATION/MODEL (`name`) in mteb's results.

        Raises:
            ValueError: for a name without a slash, or a prompt that cannot be read.
        """
        if "/" not in name:
            raise ValueError(f"--name: expected ORGANISATION/MODEL, got {name!r}.")
        self._prompts = dict(prompts or {})
        self._encoder_of = {key: encoder.with_prompt(prompt) for key, prompt in self._prompts.items()}
        self._query_encoder = encoder if encoder.side else encoder.for_side("query")
        self._document_encoder = encoder if encoder.side else encoder.for_side("document")
        self._micro_batch_tokens = micro_batch_tokens
        facts = {
            "name": name,
            "revision": revision,
            "max_tokens": encoder.max_length,
            "embed_dim": encoder.dimensions,
            "similarity_fn_name": ScoringFunction.COSINE,
            "framework": ["PyTorch", "Transformers"],
            "modalities": ["text"],
            "use_instructions": any(
                used.prompt.template != "{text}"
                for used in (self._query_encoder, self._document_encoder, *self._encoder_of.values())
            ),
        }
        # Unknown fields (training data, languages, license, …) stay None.
        self.mteb_model_meta: Any = ModelMeta.create_empty(
            {key: value for key, value in facts.items() if value is not None}
        )
        """Description of the model in mteb's results."""

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> NDArray[np.float32]:
        """Return the embeddings (N, D) of mteb's texts, with the prompt for the task and for queries or documents.

        `inputs` yields batches with N texts in total. `prompt_type` is mteb's "query" or "document", or None. Texts
        without a token get zero vectors. Other arguments of mteb, such as `batch_size`, have no effect, except
        `show_progress_bar`.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        rows_ND: NDArray[np.float32] = encode_usable(
            self.encoder_for(task_metadata, prompt_type),
            texts,
            micro_batch_tokens=self._micro_batch_tokens,
            show_progress=bool(kwargs.get("show_progress_bar", False)),
        )
        return rows_ND

    def encoder_for(self, task_metadata: Any, prompt_type: Any = None) -> SentenceEncoder:
        """Return the encoder with the prompt for a task of mteb and for queries or documents (`prompt_type`).

        `task_metadata` is mteb's `TaskMetadata`. The key that matches first in `prompts` of the class selects the
        prompt.
        """
        key = get_prompt_name(self._prompts, task_metadata, prompt_type) if self._prompts else None
        if key is not None:
            return self._encoder_of[key]
        is_document = prompt_type is not None and getattr(prompt_type, "value", prompt_type) == "document"
        return self._document_encoder if is_document else self._query_encoder

    similarity = staticmethod(cos_sim)
    similarity_pairwise = staticmethod(pairwise_cos_sim)
