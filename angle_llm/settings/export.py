"""Settings of the commands `angle-llm merge`, `export`, `verify` and `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from angle_llm.settings.parsing import PositiveFloat, SettingsError, settings_class


@settings_class
class MergeSettings:
    """Settings of `angle-llm merge`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The saved adapter: a folder with angle_llm.json, such as runs/nli/model. In a combination, any model of the base."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Output folder. The result of an earlier merge is replaced; a folder with other content is refused."""
    more: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="…")] = ()
    """MODEL MODEL … OUT combines several models of one base: adapters, whole models, or the untrained base. The last path
    is OUT."""
    weights: tuple[float, ...] = ()
    """Weight of each model in a combination, such as 0.7 0.3; they are divided by their sum. Empty: equal weights."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the stored weights. The merge is computed in float32 and rounded once. 1 - cos of the vectors
    before and after is up to 6e-12 in float32, and 1e-5 to 6e-3 in bfloat16, which has half the size and is refused above
    1e-3."""
    composite: bool = False
    """Of a multimodal base, write the whole (composite) model: the text model has the merged weights, and all other tensors
    and the processor are unchanged. Without it, the text model alone is written."""
    verify: bool = True
    """Compare the merged model with the adapter, and keep the merged model only if both give the same vectors. In a
    combination, compare the first encoder alone, then all combined weights. Loads both in float32."""


EXPORT_DTYPES = {
    "sentence-transformers": ("float32", "bfloat16", "float16"),
    "onnx": ("float32", "int8"),
    "gguf": ("float32", "float16", "q8_0"),
}
"""Dtypes of exported weights by target."""


@settings_class
class ExportSettings:
    """Settings of `angle-llm export`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The saved encoder, such as runs/nli/model: an adapter, which is merged first, or a whole model."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Output folder, which must be new or empty."""
    to: Literal["sentence-transformers", "onnx", "gguf"] = "sentence-transformers"
    """sentence-transformers: a folder whose SentenceTransformer(OUT).encode(texts) gives the same vectors, prompt
    included; with two prompts its encode_query and encode_document. onnx: a folder for onnxruntime, onnx/model.onnx and a
    tokenizer with the prompt. gguf: a folder with a GGUF file for llama.cpp and Ollama; the prompt is in
    encoder.gguf.json."""
    side: Annotated[Literal["query", "document"] | None, tyro.conf.arg(name="as")] = None
    """For an encoder with two prompts: export only the prompt of queries or of documents, and use it for all texts."""
    dtype: Literal["float32", "bfloat16", "float16", "q8_0", "int8"] | None = None
    """Dtype of the weights. None: float32. For sentence-transformers, float32, bfloat16 or float16 of a merged adapter; a
    whole model keeps its dtype. For gguf, float32, float16 or q8_0 (8-bit blocks). For onnx, float32 or int8 (8-bit
    blocks of the linear layers)."""
    verify: bool = True
    """Compare the exported folder with MODEL, and keep the folder only if both give the same vectors. Needs the program
    that opens the folder: sentence-transformers, onnxruntime or llama.cpp."""

    def __post_init__(self) -> None:
        possible = EXPORT_DTYPES[self.to]
        if self.dtype is not None and self.dtype not in possible:
            raise SettingsError(f"--dtype with --to {self.to}: expected {', '.join(possible)}; got {self.dtype}.")


@settings_class
class VerifySettings:
    """Settings of `angle-llm verify`."""

    forms: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="A [B …]")]
    """Two or more saved folders (adapter or whole), sentence-transformers folders, or models; all are compared with A.
    A plain model gets the prompt, pooling and maximum length of A."""
    server: tuple[str, ...] = ()
    """URL of a server to compare with A, such as http://127.0.0.1:8000: OpenAI's /v1/embeddings, or /embed of Text
    Embeddings Inference if the URL ends with /embed. A bearer token is read from ANGLE_LLM_SERVER_TOKEN."""
    server_model: str | None = None
    """Model name in requests to the server. None: the first name in /v1/models."""
    send_prompt: bool = False
    """Send each text with the prompt of A, for a server that adds none."""
    base: str | None = None
    """The untrained base of A, if A is a whole model. Without it, `--server` cannot show that A was trained: exit code
    3."""
    texts: Path | None = None
    """A UTF-8 file with the texts to compare, one text per line. None: built-in texts."""
    pairs: str | None = None
    """A file of scored pairs, as in eval sts, such as starter:graded_pairs.tsv, on which Spearman is compared too."""
    side: Annotated[Literal["query", "document"] | None, tyro.conf.arg(name="as")] = None
    """For encoders with two prompts: compare only the vectors of queries or of documents, as for a folder of `export
    --as`."""
    tolerance: PositiveFloat | None = None
    """Largest allowed 1 - cos between the vectors of a text. None: 1e-5 for weights stored in float32, 1e-3 for
    bfloat16 and float16 (1e-4 in llama.cpp), 1e-2 for 8 bits, and every stored weight must equal the merge of the
    adapter. With a tolerance, wrong weights are counted but allowed."""
    json: Path | None = None
    """Also write the report to this JSON file."""

    def __post_init__(self) -> None:
        if len(self.forms) + len(self.server) < 2:
            raise SettingsError(
                "verify: expected two or more folders or models to compare, or one and --server URL; got "
                f"{len(self.forms)}."
            )
        servers = [*self.server, *(form for form in self.forms if form.startswith(("http://", "https://")))]
        if (self.server_model or self.send_prompt) and not servers:
            raise SettingsError("--server-model and --send-prompt belong to --server, which is not set.")
        for url in self.server:
            if not url.startswith(("http://", "https://")):
                raise SettingsError(f"--server: expected an address that starts with http://, got {url!r}.")


@settings_class
class PushSettings:
    """Settings of `angle-llm push`."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A saved encoder: the model folder of a run, a merged model, or an exported folder."""
    repo: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="USER/NAME")]
    """The repository on the hub. It is created if it does not exist. An existing repository must have an encoder of
    angle_llm, whose files are replaced; its other files are kept."""
    run: Path | None = None
    """Run directory whose settings and scores are added to the model card. None: the parent of DIR, if the parent is a
    run directory."""
    results: Path | None = None
    """JSON file of `angle-llm eval sts --json` or `eval retrieval --json`; its scores are added to the model card."""
    public: bool = False
    """Make a new repository public. Default: private."""
    dry_run: bool = False
    """Print the files and the model card without using the network."""
