"""Model card (README.md) of a saved or exported encoder: `model_card.md`, filled from the files in its folder.

`merge` and `export` write the card; `push` adds results and settings. The card says which values are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from angle_llm import __version__
from angle_llm.export.exported_folder import LIBRARY, ExportFacts
from angle_llm.export.formats.llama_cpp import Usage, is_gguf_export
from angle_llm.export.formats.onnx_folder import is_onnx_folder, onnx_usage
from angle_llm.export.programs import program_notes
from angle_llm.model.source.checks import MERGE_NAME, ArtifactError, is_saved_encoder, model_inside, read_json
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import is_hub_id
from angle_llm.model.source.sentence_transformers_folder import OUR_POOLINGS, opens_in_library
from angle_llm.prompts import SIDES

REPORT_NAME = "verification.json"
"""Name of the file with the report that compares a merged or exported encoder with the encoder it was made from."""

_TASK_TYPES = {
    "spearman": "sentence-similarity",
    "pearson": "sentence-similarity",
    "accuracy": "text-classification",
    "main_score": "feature-extraction",
}
"""Metric → type of its task on the hub; other metrics are text-retrieval."""


@dataclass(frozen=True)
class CardFacts:
    """Facts about a saved or exported encoder for its model card, read from the files in its folder."""

    form: str
    """adapter, whole, or the target of an export."""
    usage: EncoderCard | ExportFacts | Usage
    """Prompt, pooling, normalisation and maximum length of the encoder."""
    base: str | None
    """Name of the base model; None if it is unknown."""
    revision: str | None
    """Revision of the base model; None if it is unknown."""
    origin: dict[str, Any]
    """Content of merge.json; empty for an encoder that was not merged."""
    report: dict[str, Any]
    """Content of verification.json; empty without this file."""
    opens_in_library: bool = False
    """Whether sentence-transformers opens the folder unchanged and gives the same vectors."""
    notes: Sequence[str] = ()
    """Notes for users of other programs, from `program_notes`."""
    instructions: str = ""
    """How to use a folder that no library for models opens, in Markdown; empty for other forms."""

    @classmethod
    def read(cls, folder: Path) -> CardFacts:
        """Read the facts from the folder of a saved or exported encoder.

        Raises:
            ArtifactError: if the folder has no encoder, or is damaged.
        """
        origin = _read_optional(folder / MERGE_NAME)
        common: dict[str, Any] = {"origin": origin, "report": _read_optional(folder / REPORT_NAME)}
        of_merged = common | {"base": origin.get("base"), "revision": origin.get("base_revision")}
        # Exported encoders.
        if is_gguf_export(folder):
            gguf_usage = Usage.read(folder)
            return cls(form="gguf", usage=gguf_usage, instructions=gguf_usage.described(), **of_merged)
        exported = ExportFacts.read(folder)
        if exported is not None and is_onnx_folder(folder):
            return cls(form="onnx", usage=exported, instructions=onnx_usage(folder), **of_merged)
        if exported is not None:
            notes = program_notes(folder, exported)
            return cls(form=LIBRARY, usage=exported, opens_in_library=True, notes=notes, **of_merged)
        # Saved encoders.
        if not is_saved_encoder(folder):
            raise ArtifactError(f"{folder} is neither a saved encoder nor an exported encoder.{model_inside(folder)}")
        card = EncoderCard.read(folder)
        if card.base is None:
            return cls(form="whole", usage=card, opens_in_library=opens_in_library(folder), **of_merged)
        return cls(form="adapter", usage=card, base=card.base, revision=card.base_revision, **common)


def _read_optional(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is no file."""
    return read_json(path) if path.is_file() else {}


def model_card(
    facts: CardFacts,
    repo: str,
    *,
    license: str | None = None,
    settings: Mapping[str, Any] | None = None,
    scores: Sequence[tuple[str, str, float]] = (),
) -> str:
    """Return the model card of an encoder in Markdown, with the metadata that the hub reads.

    Args:
        repo: name of the repository or folder in the code examples of the card.
        license: license of the base model; None if it is unknown.
        settings: settings of the training run; None if they are unknown.
        scores: task, metric (such as spearman) and value × 100 of each evaluation.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    # Metadata for the hub. In `EvalResult`, a task is also the type and the name of its dataset.
    name = repo.rpartition("/")[2]
    results = []
    for task, metric, score in scores:
        task_type = _TASK_TYPES.get(metric, "text-retrieval")
        results.append(EvalResult(task_type, task, task, metric, score, metric_name=f"{metric} x 100"))
    data = ModelCardData(
        library_name=LIBRARY if facts.form == LIBRARY else "angle_llm",
        pipeline_tag="sentence-similarity",
        tags=["sentence-embeddings", "angle_llm"],
        base_model=facts.base if is_hub_id(facts.base) else None,
        license=license,
        model_name=name if results else None,
        eval_results=results or None,
    )
    # Values of the template.
    values = {
        **vars(facts),
        "name": name,
        "repo": repr(repo),
        "plain_repo": repo,
        "version": __version__,
        "shown_base": facts.base and file_name(facts.base),
        "template": facts.usage.prompt.query.template,
        "prompts": [facts.usage.prompt.of(side) for side in (SIDES if facts.usage.prompt.differ else SIDES[:1])],
        "license": license,
        "parts": [f"{part['weight']:.4g} × `{file_name(part['name'])}`" for part in facts.origin.get("parts", ())],
        "scores": scores,
        "poolings": OUR_POOLINGS,
        "settings": yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True) if settings else "",
    }
    template = str(Path(__file__).with_name("model_card.md"))
    return str(ModelCard.from_template(data, template_path=template, **values)) + "\n"


def file_name(name: str) -> str:
    """Return the last part of an absolute path; return any other name unchanged."""
    return PurePath(name).name if name.startswith("~") or PurePath(name).is_absolute() else name
