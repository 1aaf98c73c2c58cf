"""Rerankers (cross-encoders), which score a query with a document. sentence-transformers opens them (extra `export`)."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.source.backbone import BackboneLocation, torch_dtype
from angle_llm.model.source.checks import ArtifactError, as_artifact_error, read_json
from angle_llm.model.source.hub import fetch_files
from angle_llm.model.source.resolve import locate, split_revision
from angle_llm.model.source.weights import safetensors_files
from angle_llm.model.vectors import Array, encoder_identity, tokenizer_state
from angle_llm.prompts import InstructedText, split_instructions
from angle_llm.settings.parsing import need_library

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder


def _facts(path_or_id: str) -> tuple[BackboneLocation, str | None, str, str | None]:
    """Return location, revision, class of the weights or "", and the sentence-transformers class that saved a model, or None."""
    name, revision = split_revision(path_or_id)
    location = locate(name, revision)
    folder = Path(location.name) if location.is_local else fetch_files(name, revision)[0]
    config = {} if location.gguf_file else read_json(folder / "config.json")
    saved_by = None
    if (folder / "modules.json").is_file():
        card = folder / "config_sentence_transformers.json"
        saved_by = (read_json(card) if card.is_file() else {}).get("model_type", "SentenceTransformer")
    return location, revision, (config.get("architectures") or [""])[0], saved_by


def is_reranker(path_or_id: str) -> bool:
    """Return whether a model is a reranker by its files: a trained classifier, or saved by `CrossEncoder`.

    A bare language model that answers yes or no does not count, because it can also be the base of an encoder.
    """
    try:
        _, _, architecture, saved_by = _facts(path_or_id)
    except FileNotFoundError:  # an adapter, or no model
        return False
    return saved_by == "CrossEncoder" or architecture.endswith("ForSequenceClassification")


class Reranker:
    """A reranker with raw scores: the value of a classifier, or logit(yes) − logit(no) of a language model.

    Scores equal `CrossEncoder.predict` with `torch.nn.Identity()`; a sigmoid makes all relevant documents nearly equal.
    `max_length` None and `dtype` auto: as saved with the model.

    Raises:
        MissingLibraryError: if sentence-transformers is not installed.
        FileNotFoundError: if there is no model.
        ArtifactError: for a model without a trained score, or with several scores per pair.
    """

    def __init__(
        self, path_or_id: str, *, max_length: int | None = None, dtype: str = "auto", device: str | None = None
    ) -> None:
        need_library("sentence_transformers", f"the reranker {path_or_id}", "export")
        location, revision, architecture, saved_by = _facts(path_or_id)
        self._name = path_or_id
        self._answers = architecture.endswith("ForCausalLM") and saved_by is None  # a language model: yes or no
        if not self._answers and not is_reranker(path_or_id):
            raise ArtifactError(
                f"{path_or_id}: expected a reranker (…ForSequenceClassification, …ForCausalLM, or saved by CrossEncoder), got "
                f"{architecture or 'an unknown class'} without a trained score; sentence-transformers would add a random one."
            )
        library: Any = importlib.import_module("sentence_transformers")
        with as_artifact_error(path_or_id):
            self.model: Any = library.CrossEncoder(
                location.name,
                max_length=max_length,
                activation_fn=torch.nn.Identity(),
                device=device,
                revision=revision,
                local_files_only=location.is_local,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True, "dtype": dtype if dtype == "auto" else torch_dtype(dtype)},
            )
        self._check()
        self._check_head(safetensors_files(location.name, revision))

    def _check_head(self, files: Sequence[Path]) -> None:
        """Raise `ArtifactError` if a classifier has a random head, because the files lack its tensors."""
        backbone = self.model[0].model
        if not type(backbone).__name__.endswith("ForSequenceClassification"):
            return
        opened: list[Any] = [safe_open(path, framework="pt") for path in files]
        stored = {name for file in opened for name in file.keys()}  # noqa: SIM118  # no mapping
        for name, _ in backbone.named_parameters():
            if not name.startswith(f"{backbone.base_model_prefix}.") and name not in stored:
                raise ArtifactError(f"{self._name}: expected the tensor {name}, got none: its score is not trained.")

    def _check(self) -> None:
        """Raise `ArtifactError` if the model has several scores per pair, or lacks the tokens or template of yes and no."""
        if (labels := self.model.num_labels) != 1:
            raise ArtifactError(f"{self._name}: expected one score per pair, got {labels} labels. Name a reranker.")
        tokenizer, last = self.model.tokenizer, self.model[-1]
        if self._answers and tokenizer.unk_token_id in (last.true_token_id, last.false_token_id):
            raise ArtifactError(f"{self._name}: its tokenizer has no tokens yes and no. Name another model.")
        if self._answers and tokenizer.chat_template is None:
            raise ArtifactError(
                f"{self._name}: expected a chat template with the roles query and document, got none, so the model would read "
                "no question. Put it into chat_template.jinja in the folder (docs/losses.md, Rerankers)."
            )

    def scores(self, pairs: Sequence[tuple[InstructedText, str]]) -> Array:
        """Return the raw scores (P,) of P pairs of a query and a document in float32; `ArtifactError` for one not finite.

        Instructions of queries are not used: a reranker has its own, in its template.
        """
        queries, _ = split_instructions(query for query, _ in pairs)
        texts = list(zip(queries, (document for _, document in pairs), strict=True))
        score_P: Array = self.model.predict(texts, show_progress_bar=False)
        if not np.isfinite(score_P).all():
            pair = pairs[int((~np.isfinite(score_P)).argmax())]
            raise ArtifactError(f"{self._name}: the score of {pair!r:.200} is not finite. Set --dtype float32.")
        return score_P


def scorer_identity(scorer: SentenceEncoder | Reranker) -> dict[str, Any]:
    """Return the properties of an encoder or reranker that affect scores, such as weights and prompt, as JSON values."""
    if not isinstance(scorer, Reranker):
        return encoder_identity(scorer)
    model = scorer.model
    state = f"{tokenizer_state(model.tokenizer)}{model.tokenizer.chat_template}"
    return {
        "reranker": weights_fingerprint(model),
        "tokenizer": hashlib.sha256(state.encode()).hexdigest()[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_length": model.max_seq_length,
        "prompt": model.prompts.get(model.default_prompt_name),
    }
