"""Export a saved encoder to ONNX.

    adapter or whole model ──► sentence-transformers folder ──► tokenizer.json       prompt, truncation, padding
                               (tokenizer, merged weights)      onnx/model.onnx      backbone, pooling, normalization
                                                                modules.json …       for its ONNX backend

Inputs of the graph are `input_ids` and `attention_mask`, (B, T) int64, of any batch size and length up to the maximum
length. Outputs are `sentence_embedding` (B, D) float32, and `last_hidden_state` (B, T, D), which the ONNX backend of
sentence-transformers pools itself. Positions and pooling follow the mask, so padding may be on the left or on the right.

Weights are float32: a model in half precision is converted, which changes no value. With dtype `int8`, onnxruntime then
quantizes the weights of linear layers.

Legend: B texts of a batch, T tokens, D dimensions.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from angle_llm.export.comparison import Verification
from angle_llm.export.exported_folder import ExportFacts
from angle_llm.export.formats.onnx_folder import GRAPH_NAME
from angle_llm.export.merge import check_paths
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.export.verify import VerifyOptions, finish_folder
from angle_llm.io import write_json
from angle_llm.model.pooling import pooling_named
from angle_llm.model.source.artifact import write_directory
from angle_llm.model.source.backbone import BackboneLocation, load_backbone, state_sizes
from angle_llm.model.source.checks import EXPORT_NAME, ArtifactError, read_json
from angle_llm.model.source.dense import read_dense
from angle_llm.model.source.sentence_transformers_folder import SentenceTransformersFolder
from angle_llm.prompts import Side
from angle_llm.settings.parsing import need_library

_LARGEST_FILE = 1_500_000_000
"""Bytes of weights up to which the graph is one file, as in torch. The limit of a protobuf file is 2 GiB."""


def export_onnx(
    run: str | Path,
    out: str | Path,
    *,
    dtype: Literal["float32", "int8"] | None = None,
    side: Side | None = None,
    check: bool = True,
) -> Verification | None:
    """Export a saved encoder to a folder with an ONNX graph and its tokenizer; return the comparison of folder and encoder.

    Args:
        run: folder of the encoder: an adapter, which is merged first, or a whole model.
        out: folder to write.
        dtype: "int8" quantizes the weights of linear layers to 8 bits. None: float32.
        side: use only the prompt of queries, or only the prompt of documents, for all texts.
        check: False skips the comparison; the result is then None.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is missing.
        ArtifactError: for a model that torch cannot export, prompts, a pooling or dimensions that the folder cannot store,
            or a target that has files or would overwrite its inputs.
        MissingLibraryError: if onnx, onnxscript or onnxruntime is not installed.
        VerificationError: if the folder differs from the encoder; nothing is written.
    """
    for module in ("onnx", "onnxscript", "onnxruntime"):
        need_library(module, "export --to onnx (Python 3.11 or later)", "onnx")
    source, target, _ = check_paths(run, out)

    def fill(folder: Path) -> Verification | None:
        export_sentence_transformers(source, folder, side=side, check=False)
        _write_graph(folder)
        for path in folder.glob("model*.safetensors*"):  # the weights and their index
            path.unlink()
        if dtype == "int8":
            _quantize_graph(folder / GRAPH_NAME)
        _adapt_files(folder, bits=8 if dtype == "int8" else None)
        return finish_folder(folder, source, str(out), VerifyOptions(side=side) if check else None)

    return write_directory(target, fill, writer="")


def _write_graph(folder: Path) -> None:
    """Write the encoder of an exported sentence-transformers folder as an ONNX graph in the folder.

    Raises:
        ArtifactError: for a model that torch cannot export for all batch sizes and lengths; names its type.
    """
    # Model, and example inputs with free sizes.
    facts = ExportFacts.read(folder)
    assert facts is not None  # just written
    backbone: Any = load_backbone(BackboneLocation(str(folder)), dtype="float32")
    dense = read_dense(SentenceTransformersFolder.read(folder).dense, state_sizes(backbone)[0])
    ids_BT = torch.ones((2, min(7, facts.max_length)), dtype=torch.int64)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, -1] = 0
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=facts.max_length)}
    # Graph.
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(
                _Graph(backbone, facts, dense).eval(), (ids_BT, mask_BT), dynamic_shapes=(axes, axes)
            )
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
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"torch.onnx.export cannot export model type {backbone.config.model_type!r} for all batch sizes and lengths: "
            f"{type(error).__name__}: {reason:.200}. Use `export --to sentence-transformers`."
        ) from error
    # File.
    for node in graph.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, which have paths of this machine
    (folder / GRAPH_NAME).parent.mkdir()
    size = sum(weight.nbytes for weight in backbone.parameters())
    graph.save(folder / GRAPH_NAME, external_data=size > _LARGEST_FILE)


class _Graph(nn.Module):
    """A module from `input_ids` and `attention_mask` (B, T) to embeddings (B, D) and states (B, T, D)."""

    def __init__(self, backbone: Any, facts: ExportFacts, dense: nn.Sequential) -> None:
        super().__init__()
        # Other implementations add operators against NaN in rows that attend to nothing.
        backbone.set_attn_implementation("eager")
        self.dense = dense
        self.backbone = backbone
        self.pool = pooling_named(facts.pooling).function
        self.normalize = facts.normalize
        parameters = inspect.signature(backbone.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in parameters else {}
        # RoBERTa and MPNet count positions from the ids that are not `padding_idx`, which holds for both sides.
        by_ids = any(
            name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
            for name, module in backbone.named_modules()
        )
        self.has_positions = "position_ids" in parameters and not by_ids

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = dict(self.options)
        if self.has_positions:
            options["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        states_BTD = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state
        rows_BD = self.dense(self.pool(states_BTD, attention_mask))
        return nn.functional.normalize(rows_BD, dim=1) if self.normalize else rows_BD, states_BTD


def _quantize_graph(path: Path) -> None:
    """Replace a float32 graph by a graph whose linear layers have int8 weights, made by onnxruntime.

    Each block of 32 weights has its own scale, and so has each block of activations. Dynamic quantization of onnxruntime
    is smaller and faster, but it has one scale for the activations of a batch: language models have a few activations
    that are far larger than most, and SmolLM2 falls from 73.8 to 46.5 on STS-B. Embeddings stay in float32.
    """
    onnx: Any = importlib.import_module("onnx")
    quantization: Any = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    has_data_file = len(list(path.parent.iterdir())) > 1
    # accuracy_level 4: activations in int8
    config = quantization.DefaultWeightOnlyQuantConfig(bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
    with _quiet():
        quantizer = quantization.MatMulNBitsQuantizer(onnx.load(path), algo_config=config)
        quantizer.process()
    # The folder onnx/ has only the graph and its data file. Both are in memory now.
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    quantizer.model.save_model_to_file(str(path), use_external_data_format=has_data_file)


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


def _adapt_files(folder: Path, bits: int | None) -> None:
    """Change the files of a sentence-transformers folder for ONNX.

    `tokenizer.json` gets padding on the right, so that `tokenizers` pads a batch without further settings. The arguments
    for classes of transformers are removed, because the ONNX backend passes them to optimum, which refuses them.
    """
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = read_json(folder / "tokenizer_config.json")["pad_token"]
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(name), pad_token=name)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = read_json(folder / "sentence_bert_config.json")
    options.pop("model_args", None)
    write_json(folder / "sentence_bert_config.json", options)
    write_json(folder / EXPORT_NAME, read_json(folder / EXPORT_NAME) | {"form": "onnx", "bits": bits})
