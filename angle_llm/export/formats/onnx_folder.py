"""Export a saved encoder to ONNX, and encode with onnxruntime and tokenizers alone.

    adapter or whole model ──► sentence-transformers folder ──► tokenizer.json       prompt, truncation, padding
                               (tokenizer, merged weights)      onnx/model.onnx      backbone, pooling, normalization
                                                                modules.json …       for its ONNX backend

Inputs of the graph are `input_ids` and `attention_mask`, (B, T) int64, of any batch size and length up to the maximum
length. Outputs are `sentence_embedding` (B, D) float32, and `last_hidden_state` (B, T, D), which the ONNX backend of
sentence-transformers pools itself. Positions and pooling follow the mask, so padding may be on the left or on the right.

Weights are float32: a model in half precision is converted, which changes no value. With `int8`, onnxruntime then
quantizes the weights of linear layers. `OnnxModel` imports neither torch nor transformers.

Legend: B texts of a batch, T tokens, N texts, D dimensions.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from angle_llm.prompts import Side, SidePrompts
from angle_llm.settings.parsing import need_library

if TYPE_CHECKING:
    from angle_llm.export.exported_folder import ExportFacts

FORM = "onnx"
"""Name of this kind of form."""
GRAPH_NAME = "onnx/model.onnx"
"""The graph, where the ONNX backend of sentence-transformers and transformers.js look for it."""
FACTS_NAME = "angle_llm_export.json"
"""`checks.EXPORT_NAME`, whose module imports torch."""
TEXTS_TOGETHER = 32
"""Default batch size, as in sentence-transformers."""
_LARGEST_FILE = 1_800_000_000
"""Bytes of weights up to which the graph is one file. The limit of a protobuf file is 2 GiB."""
_UNIT_LENGTH = 1e-3
"""Largest deviation from length 1 of a normalized vector: float32 gives 1e-6, int8 weights change only its direction."""

Rows = np.ndarray[Any, np.dtype[np.float32]]


def export_onnx(
    run: str | Path,
    out: str | Path,
    *,
    int8: bool = False,
    side: Side | None = None,
    finish: Callable[[Path], object] | None = None,
) -> None:
    """Export a saved encoder to a folder with an ONNX graph and its tokenizer.

    Args:
        run: folder of the encoder: an adapter, which is merged first, or a whole model.
        out: folder to write.
        int8: quantize the weights of linear layers to 8 bits.
        side: use only the prompt of queries, or only the prompt of documents, for all texts.
        finish: called with the complete folder under its temporary name. If it raises an exception, nothing is written.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is missing.
        ArtifactError: for a model that torch cannot export, prompts, a pooling or dimensions that the folder cannot store,
            or a target that has files or would overwrite its inputs.
        MissingLibraryError: if onnx, onnxscript or onnxruntime is not installed.
    """
    from angle_llm.export.merge import check_target
    from angle_llm.export.sentence_transformers import export_sentence_transformers
    from angle_llm.model.source.artifact import write_directory
    from angle_llm.model.source.checks import ArtifactError, is_saved_encoder
    from angle_llm.model.source.encoder_card import EncoderCard
    from angle_llm.model.source.resolve import locate

    for module in ("onnx", "onnxscript", "onnxruntime"):
        need_library(module, "export --to onnx", "onnx")
    source, target = Path(run).expanduser(), Path(out).expanduser()
    if not is_saved_encoder(source):
        raise FileNotFoundError(f"{source} is not a saved encoder. Give the model folder of a run, or a merged model.")
    if target.is_dir() and any(target.iterdir()):
        raise ArtifactError(f"OUT {target} has files. Name a new folder.")
    check_target(source, locate(EncoderCard.read(source).base or str(source)), target)

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.torch.", dir=folder.parent) as work:
            exported = Path(work) / "exported"
            export_sentence_transformers(source, exported, side=side, check=False)
            _write_graph(exported, folder / GRAPH_NAME)
            for path in exported.iterdir():
                if not path.name.startswith("model") or path.suffix == ".md":
                    shutil.move(path, folder / path.name)
        _adapt_files(folder)
        _record(folder, bits=None)
        if int8:
            quantize_graph(folder)
        if finish is not None:
            finish(folder)

    write_directory(target, fill)


def _write_graph(folder: Path, path: Path) -> None:
    """Write the encoder of an exported sentence-transformers folder as an ONNX graph.

    Raises:
        ArtifactError: for a model that torch cannot export for all batch sizes and lengths; names its type.
    """
    import torch

    from angle_llm.export.exported_folder import ExportFacts
    from angle_llm.model.source.backbone import BackboneLocation, load_backbone
    from angle_llm.model.source.checks import ArtifactError

    facts = ExportFacts.read(folder)
    assert facts is not None  # just written
    backbone = load_backbone(BackboneLocation(str(folder)), dtype="float32")
    ids_BT = torch.full((2, max(2, min(7, facts.max_length))), 1)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, -1] = 0
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=max(3, facts.max_length))}
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(_graph(backbone, facts), (ids_BT, mask_BT), dynamic_shapes=(axes, axes))
            graph: Any = torch.onnx.export(
                program,
                (),
                dynamo=True,
                dynamic_shapes=(axes, axes),  # their names
                input_names=["input_ids", "attention_mask"],
                output_names=["sentence_embedding", "last_hidden_state"],
                verbose=False,
            )
    except Exception as error:  # torch raises errors of many classes
        model_type = getattr(backbone.config, "model_type", type(backbone).__name__)
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"torch.onnx.export cannot export model type {model_type!r} for all batch sizes and lengths: "
            f"{type(error).__name__}: {reason:.200}. Use `export --to sentence-transformers`."
        ) from error
    for node in graph.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, which have paths of this machine
    path.parent.mkdir()
    size = sum(weight.numel() * weight.element_size() for weight in backbone.parameters())
    graph.save(str(path), external_data=size > _LARGEST_FILE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress messages of torch and onnxruntime that no user can act on: missing torchvision, deprecated classes."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _graph(backbone: Any, facts: ExportFacts) -> Any:
    """Return a module from `input_ids` and `attention_mask` to embeddings (B, D) and states (B, T, D)."""
    import torch
    from torch import Tensor, nn

    from angle_llm.model.pooling import pooling_named

    parameters = inspect.signature(backbone.forward).parameters
    # RoBERTa and MPNet count positions from the ids that are not `padding_idx`, which holds for both sides.
    by_ids = any(
        name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        for name, module in backbone.named_modules()
    )
    pool = pooling_named(facts.pooling).function
    # Finite scores at padding: a row that attends to nothing would be NaN in other implementations.
    backbone.set_attn_implementation("eager")

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
            if "position_ids" in parameters and not by_ids:
                options["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
            states_BTD = backbone(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state
            rows_BD = pool(states_BTD, attention_mask)
            return nn.functional.normalize(rows_BD, dim=1) if facts.normalize else rows_BD, states_BTD

    return Graph().eval().to(torch.float32)


def _adapt_files(folder: Path) -> None:
    """Change the files of a sentence-transformers folder for ONNX.

    `tokenizer.json` gets padding on the right, so that `tokenizers` pads a batch without further settings. The arguments
    for classes of transformers are removed, because the ONNX backend passes them to optimum, which refuses them.
    """
    from angle_llm.io import write_json
    from angle_llm.model.source.checks import read_json

    spec, name = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")["pad_token"]
    tokenizer: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    spec["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": tokenizer.token_to_id(name),
        "pad_type_id": 0, "pad_token": name,
    }  # fmt: skip
    write_json(folder / "tokenizer.json", spec)
    options = read_json(folder / "sentence_bert_config.json")
    options.pop("model_args", None)
    write_json(folder / "sentence_bert_config.json", options)


def _record(folder: Path, bits: int | None) -> None:
    """Record the form, and the bits of the weights, in `FACTS_NAME`."""
    from angle_llm.io import write_json
    from angle_llm.model.source.checks import read_json

    write_json(folder / FACTS_NAME, read_json(folder / FACTS_NAME) | {"form": FORM, "bits": bits})


def quantize_graph(folder: Path) -> None:
    """Replace the float32 graph of a folder by a graph whose linear layers have int8 weights, made by onnxruntime.

    Each block of 32 weights has its own scale, and so has each block of activations. Dynamic quantization of onnxruntime
    is smaller and faster, but it has one scale for the activations of a batch: language models have a few activations
    that are far larger than the others, and SmolLM2 falls from 73.8 to 46.5 on STS-B. Embeddings stay in
    float32.
    """
    onnx: Any = importlib.import_module("onnx")
    quantization: Any = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    path = folder / GRAPH_NAME
    size = sum(part.stat().st_size for part in path.parent.iterdir())
    with _quiet():
        config = quantization.DefaultWeightOnlyQuantConfig(
            block_size=32,
            is_symmetric=True,
            accuracy_level=4,
            bits=8,  # level 4: activations in int8
        )
        quantizer = quantization.MatMulNBitsQuantizer(onnx.load(path), algo_config=config)
        quantizer.process()
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    quantizer.model.save_model_to_file(str(path), size > _LARGEST_FILE)
    _record(folder, bits=8)


def is_onnx_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of `export_onnx`. It also looks like a sentence-transformers folder."""
    folder = Path(path).expanduser()
    return (folder / FACTS_NAME).is_file() and (folder / GRAPH_NAME).is_file()


def onnx_usage(folder: Path) -> str:
    """Return Python code that encodes texts with onnxruntime and tokenizers, in Markdown."""
    library = json.loads((folder / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    heads = {name: head for name, head in library["prompts"].items() if head}
    texts = "[head + text for text in texts]" if heads else "texts"
    shown = f"head = {next(iter(heads.values()))!r}  # of {', '.join(map(repr, heads))}: {heads}\n" if heads else ""
    return f"""```python
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")  # cuts and pads{"" if heads else ", and adds the prompt"}
session = onnxruntime.InferenceSession("{GRAPH_NAME}")
{shown}found = tokenizer.encode_batch({texts})
ids, mask = (np.array([getattr(one, name) for one in found]) for name in ("ids", "attention_mask"))
(rows,) = session.run(["sentence_embedding"], {{"input_ids": ids, "attention_mask": mask}})
```"""


class OnnxModel:
    """An exported ONNX folder with the interface of `SentenceEncoder`, computed by onnxruntime on the CPU."""

    dtype = "float32"
    """Dtype of activations, and of weights unless `bits` is 8."""

    def __init__(self, path: str | Path, *, texts_together: int = TEXTS_TOGETHER, threads: int = 0) -> None:
        """Open the folder. `texts_together` is the batch size; `threads` 0: one thread per core.

        Raises:
            MissingLibraryError: if onnxruntime is not installed.
            ValueError: for a damaged folder.
        """
        need_library("onnxruntime", "an ONNX folder", "onnx")
        runtime: Any = importlib.import_module("onnxruntime")
        folder = Path(path).expanduser()
        try:
            facts = json.loads((folder / FACTS_NAME).read_text(encoding="utf-8"))
            library = json.loads((folder / "config_sentence_transformers.json").read_text(encoding="utf-8"))
            self.prompts = SidePrompts.from_dict(facts["prompt"], where=str(folder / FACTS_NAME))
            """Prompts of queries and documents."""
            self.pooling, self.bits = str(facts["pooling"]), facts["bits"]
            self._heads: dict[str, str] = dict(library["prompts"])
            self._default = str(library["default_prompt_name"])
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            self.session: Any = runtime.InferenceSession(
                str(folder / GRAPH_NAME), options, providers=["CPUExecutionProvider"]
            )
            tokenizers: Any = importlib.import_module("tokenizers")
            self.tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.max_length = int(self.tokenizer.truncation["max_length"])
        except Exception as error:  # onnxruntime and tokenizers raise errors of many classes
            raise ValueError(f"{folder} is not a complete ONNX folder ({error}). Export the encoder again.") from error
        self.texts_together = texts_together
        self.side: Side | None = None
        lengths = np.linalg.norm(self.encode(["a", "Someone is eating."]), axis=1)
        self.normalize = bool(np.abs(lengths - 1).max() < _UNIT_LENGTH)
        """Whether vectors have length 1, measured: a cosine does not show it."""

    def for_side(self, side: Side) -> OnnxModel:
        """Return a model that encodes all texts as queries, or as documents."""
        other = copy.copy(self)
        other.side = side
        return other

    @property
    def _head(self) -> str:
        """The prompt that is sent with each text; empty if the tokenizer adds it."""
        return self._heads.get(self.side or "", self._heads.get(self._default, ""))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, prompt included, padding excluded."""
        return [
            [number for number, real in zip(found.ids, found.attention_mask, strict=True) if real]
            for text in texts
            for found in (self.tokenizer.encode(self._head + text),)
        ]

    def encode(self, texts: Sequence[str], **_: Any) -> Rows:
        """Return the embeddings (N, D) in float32. Options of `SentenceEncoder.encode` have no effect.

        Batches hold texts with similar numbers of characters, and are padded as `tokenizer.json` says.
        """
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        rows: list[Rows] = [np.empty(0, np.float32)] * len(texts)
        for first in range(0, len(order), self.texts_together):
            numbers = order[first : first + self.texts_together]
            batch = self.tokenizer.encode_batch([self._head + texts[number] for number in numbers])
            inputs = {
                "input_ids": np.array([found.ids for found in batch], dtype=np.int64),
                "attention_mask": np.array([found.attention_mask for found in batch], dtype=np.int64),
            }
            (found_BD,) = self.session.run(["sentence_embedding"], inputs)
            for number, row_D in zip(numbers, found_BD, strict=True):
                rows[number] = row_D
        return np.stack(rows) if rows else np.empty((0, self.session.get_outputs()[0].shape[1]), np.float32)
