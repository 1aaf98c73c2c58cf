"""An encoder as `mteb` asks for it (its `EncoderProtocol`, mteb ≥ 2): the only module that imports mteb.

    import mteb
    model = MtebEncoder(SentenceEncoder.from_pretrained("runs/nli/model"), name="me/my-model")
    mteb.evaluate(model, mteb.get_tasks(tasks=["STSBenchmark"]), cache=None)

mteb hands over texts batch by batch and says what they are for; here a prompt may depend on that. How much is computed
at once is told in tokens, so mteb's `batch_size` does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from mteb.models import ModelMeta
from mteb.models.abs_encoder import get_prompt_name
from mteb.models.model_meta import ScoringFunction
from mteb.similarity_functions import cos_sim, pairwise_cos_sim
from numpy.typing import NDArray

from angle_llm.evaluate.encoding import OpenedEncoder


class PromptedEncoder(OpenedEncoder, Protocol):
    """An encoder that can be had under another prompt, such as `SentenceEncoder`."""

    @property
    def dimensions(self) -> int:
        """D, the length of a vector."""

    def with_prompt(self, prompt: str, /) -> PromptedEncoder:
        """The same weights under the prompt of that name or YAML file."""
        ...


class MtebEncoder:
    """What `mteb.evaluate` takes as a model.

    `prompts` maps what texts are for to a prompt (a name or YAML file). A key is, the first that fits, as in mteb
    itself: task and side (`NFCorpus-query`), task (`STSBenchmark`), task type and side (`Retrieval-query`,
    `Retrieval-document`), task type (`STS`, `Classification`, `Clustering`, `PairClassification`, `Reranking`,
    `Summarization`, …), side (`query`, `document`). Where none fits, the prompt is the encoder's own.

    A text without any visible character gets the zero vector, which has similarity 0 with everything: mteb's corpora
    hold such texts, and there is nothing to embed in them.
    """

    def __init__(
        self,
        encoder: PromptedEncoder,
        *,
        name: str,
        revision: str | None = None,
        prompts: Mapping[str, str] | None = None,
        micro_batch_tokens: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """`name` is ORGANISATION/MODEL, under which mteb files results; `meta` adds to or replaces what is told of the
        model.

        Raises `ValueError` for a name without a slash, or a prompt that cannot be read.
        """
        if "/" not in name:
            raise ValueError(
                f"mteb files results under ORGANISATION/MODEL; found {name!r}. Put an organisation before it."
            )
        self._prompts = dict(prompts or {})
        self._encoder_of = {key: encoder.with_prompt(prompt) for key, prompt in self._prompts.items()}
        self._encoder = encoder
        self._micro_batch_tokens = micro_batch_tokens
        known = {
            "name": name,
            "revision": revision,
            "max_tokens": encoder.max_length,
            "embed_dim": encoder.dimensions,
            "similarity_fn_name": ScoringFunction.COSINE,
            "framework": ["PyTorch", "Transformers"],
            "modalities": ["text"],
            "use_instructions": any(each.prompt.template != "{text}" for each in self._all()),
        }
        # What is not known (training data, languages, licence, …) stays None, which mteb reads as "not said".
        self._meta = ModelMeta.create_empty(
            {key: value for key, value in {**known, **(meta or {})}.items() if value is not None}
        )

    @property
    def mteb_model_meta(self) -> Any:
        """What mteb writes beside the results."""
        return self._meta

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
        """Vectors (N, D) of all texts of all batches, under the prompt for this task and side."""
        texts = [text for batch in inputs for text in batch["text"]]
        rows_ND = np.zeros((len(texts), self._encoder.dimensions), dtype=np.float32)
        full = [place for place, text in enumerate(texts) if text.strip()]
        if full:
            rows_ND[full] = self.encoder_for(task_metadata, prompt_type).encode(
                [texts[place] for place in full],
                micro_batch_tokens=self._micro_batch_tokens,
                show_progress=bool(kwargs.get("show_progress_bar", False)),
            )
        return rows_ND

    def encoder_for(self, task_metadata: Any, prompt_type: Any = None) -> PromptedEncoder:
        """The encoder under the prompt that is used for such texts."""
        key = get_prompt_name(self._prompts, task_metadata, prompt_type) if self._prompts else None
        return self._encoder if key is None else self._encoder_of[key]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosine similarity (N, M) of each with each."""
        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosine similarity (N,) of one with one."""
        return pairwise_cos_sim(embeddings1, embeddings2)

    def _all(self) -> list[PromptedEncoder]:
        return [self._encoder, *self._encoder_of.values()]
