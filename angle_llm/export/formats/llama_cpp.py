"""A folder of `angle-llm export --to gguf`, opened with llama.cpp.

    encoder.gguf        weights, tokenizer, pooling, BOS and EOS flags: all that llama.cpp reads
    encoder.gguf.json   what the file cannot hold: prompt, edits, maximum length, normalisation

llama.cpp does not add a prompt, so a client formats each text. `Request` is the rule for clients, and `LlamaCppModel`
follows it: it sends the formatted text, or token ids if the text would be cut or read in another way. llama.cpp is
optional (`pip install 'angle_llm[gguf]'`). It runs as its own HTTP server on the loopback interface of this machine.
"""

from __future__ import annotations

import importlib
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from angle_llm import __version__
from angle_llm.export.exported_folder import ProgramModel
from angle_llm.io import write_json
from angle_llm.model.source.checks import ArtifactError, as_artifact_error, read_json
from angle_llm.model.source.tokenizer import SentenceTokenizer, checked_texts
from angle_llm.prompts import SIDES, Side, SidePrompts
from angle_llm.settings.parsing import need_library

GGUF_NAME, USAGE_NAME = "encoder.gguf", "encoder.gguf.json"
_TOGETHER = 64
"""Texts in a request."""
FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7}
"""`general.file_type` by dtype."""
_THREADS = -1
"""Threads of llama.cpp. -1: as many as it chooses."""
_SLOTS = 4
"""Texts that llama.cpp computes at the same time."""


@dataclass(frozen=True)
class Request:
    """Rule by which a client builds the request for a text: the formatted text, or token ids.

    The formatted text is `template` with the edited text. It has the right ids if `as_text` is true and it has at most
    `max_length` tokens. The ids of all texts are `before + tokenize(head + text + merge_span)[:most] + after`, where
    `tokenize` adds no special token and finds no special token in the text (`/tokenize` with its defaults for
    `add_special`, and `"parse_special": false`). So a long text loses its end, and the prompt is kept.
    """

    as_text: bool
    """Whether the formatted text can be sent. False: llama.cpp tokenizes the prompt differently; send ids."""
    before: list[int]
    head: str
    merge_span: str
    most: int
    """Number of kept ids of `head + text + merge_span`."""
    after: list[int]

    @classmethod
    def of(cls, sentences: SentenceTokenizer, special_names: Sequence[str]) -> Request:
        """Create the rule from the tokenizer of an encoder, with the prompt and maximum length of a side.

        `special_names`: as in `Usage`.
        """
        before, head, merge_span, after = sentences.template
        special = sentences.special_tokens
        start, end = [*special.before, *before], [*after, *special.after]
        most = sentences.max_length - len(start) - len(end)
        # llama.cpp finds names of special tokens in the prompt; the encoder reads them as characters.
        prompt = sentences.prompt
        has_name = any(name in prompt.head + prompt.tail for name in special_names)
        return cls(prompt.tokenization == "joined" and not has_name, start, head, merge_span, most, end)


@dataclass(frozen=True)
class Usage:
    """Content of `encoder.gguf.json`: what a client of the file must do."""

    prompt: SidePrompts
    pooling: str
    dtype: str
    """Dtype of the weight matrices."""
    max_length: int
    """Tokens of a text, prompt and special tokens included."""
    normalize: bool
    """Whether vectors have length 1."""
    unicode: Literal["NFC"] | None
    """Unicode normalisation of a text before it is sent, which the tokenizer of the encoder applies and llama.cpp does
    not."""
    special_names: list[str]
    """Names of special tokens, most of which llama.cpp finds in a text. In the encoder they are plain characters: send
    the ids of texts with such a name."""
    requests: dict[Side, Request]

    def write(self, folder: Path) -> None:
        """Write the usage into a folder."""
        values = asdict(self) | {"prompt": self.prompt.to_dict(), "angle_llm": __version__}
        write_json(folder / USAGE_NAME, {"format_version": 1, "form": "gguf", **values})

    @classmethod
    def read(cls, path: str | Path) -> Usage:
        """Read the usage of a folder.

        Raises:
            ArtifactError: for a damaged file.
        """
        file = Path(path).expanduser() / USAGE_NAME
        stored = read_json(file)
        with as_artifact_error(file):
            values = {field.name: stored[field.name] for field in fields(cls)}
            values["prompt"] = SidePrompts.from_dict(stored["prompt"], where=str(file))
            values["requests"] = {side: Request(**stored["requests"][side]) for side in SIDES}
            return cls(**values)

    def described(self) -> str:
        """Return instructions for users of the folder: the command of llama-server, and the text or ids to send."""
        batch = max(512, self.max_length)
        options = f"--embedding --kv-unified -np {_SLOTS} -c {_SLOTS * self.max_length} -b {batch} -ub {batch}"
        lines = [f"    llama-server -m {GGUF_NAME} {options}", ""]
        for side in SIDES if self.prompt.differ else SIDES[:1]:
            prompt = self.prompt.of(side)
            lines.append(f"The file has no prompt. Send each {side if self.prompt.differ else 'text'} as")
            template = prompt.written.replace("\n", "\n    ")
            lines.append(f"    {template}" + (f"   (edits: {', '.join(prompt.edits)})" if prompt.edits else ""))
            if not self.requests[side].as_text:
                lines.append(f"    Send token ids (`requests` in {USAGE_NAME}): llama.cpp tokenizes it differently.")
        lines.append(
            f"Cut a text so that the whole has at most {self.max_length} tokens; the server cuts nothing, or the end of the "
            f"prompt. {USAGE_NAME} has the rule for token ids."
        )
        if self.unicode:
            lines.append(f"Normalise texts to Unicode {self.unicode}.")
        if self.special_names:
            names = ", ".join(self.special_names[:5])
            lines.append(f"Send the token ids of texts with a name in `special_names`, such as {names}.")
        return "\n".join(lines)


def is_gguf_export(path: str | Path) -> bool:
    """Return whether a path is a folder of `angle-llm export --to gguf`."""
    folder = Path(path).expanduser()
    return (folder / USAGE_NAME).is_file() and (folder / GGUF_NAME).is_file()


class LlamaCppModel(ProgramModel):
    """A folder of `export --to gguf` with the interface of `SentenceEncoder`, computed by llama.cpp on the CPU.

    Keys and values of attention are stored in float32, not in float16 as is the default of llama.cpp.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the folder, and start llama.cpp on a free port of the loopback interface.

        Raises:
            MissingLibraryError: if xllamacpp is not installed.
            ArtifactError: for a damaged folder, or a file that llama.cpp does not open.
        """
        need_library("xllamacpp", "the vectors of a GGUF file", "gguf")
        folder = Path(path).expanduser()
        self.usage = Usage.read(folder)
        self.prompts, self.max_length = self.usage.prompt, self.usage.max_length
        self.dtype, self.pooling, self.normalize = self.usage.dtype, self.usage.pooling, self.usage.normalize
        self._server = _start(folder / GGUF_NAME, self.max_length)
        # Without idle connections, nothing has to be closed; without the environment, no proxy is used.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(
            base_url=self._server.listening_address, timeout=600, limits=limits, trust_env=False
        )

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids that llama.cpp computes for each text, prompt included."""
        return [self._ids(content) for content in self._contents(texts)]

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the embeddings (N, D) in float32. Options of `SentenceEncoder.encode` have no effect."""
        contents = self._contents(texts)
        rows: list[list[float]] = []
        for first in range(0, len(contents), _TOGETHER):
            part = contents[first : first + _TOGETHER]
            answer = self._post("/embedding", {"content": part, "embd_normalize": 2 if self.normalize else -1})
            rows += [row["embedding"][0] for row in sorted(answer, key=lambda row: row["index"])]
        return np.array(rows, dtype=np.float32)

    def _contents(self, texts: Sequence[str]) -> list[str | list[int]]:
        """Return the input of llama.cpp for each text, by the rule of `Request`."""
        texts = checked_texts(texts)
        prompt = self.usage.prompt.of(self.side or "query")
        request = self.usage.requests[self.side or "query"]
        contents: list[str | list[int]] = []
        for text in map(prompt.edit, texts):
            if self.usage.unicode:
                text = unicodedata.normalize(self.usage.unicode, text)
            formatted = prompt.head + text + prompt.tail
            can_be_text = request.as_text and not any(name in formatted for name in self.usage.special_names)
            if can_be_text and len(self._ids(formatted)) <= self.max_length:
                contents.append(formatted)
                continue
            body = {"content": request.head + text + request.merge_span, "parse_special": False}
            ids = self._post("/tokenize", body)["tokens"]
            contents.append([*request.before, *ids[: request.most], *request.after])
        return contents

    def _ids(self, content: str | list[int]) -> list[int]:
        """Return the token ids that the embedding endpoint of llama.cpp makes of an input."""
        if not isinstance(content, str):
            return content
        asked = {"content": content, "add_special": True, "parse_special": True}
        ids: list[int] = self._post("/tokenize", asked)["tokens"]
        return ids

    def _post(self, path: str, values: dict[str, Any]) -> Any:
        """Send a request to llama.cpp and return the answer. Raises `ArtifactError` if llama.cpp refuses it."""
        answer = self._client.post(path, json=values)
        if answer.status_code != 200:
            raise ArtifactError(f"llama.cpp refuses {path}: {answer.text:.300}")
        return answer.json()


def _start(file: Path, max_length: int) -> Any:
    """Start the server of llama.cpp, which ends with the returned object. Raises `ArtifactError` if it fails."""
    library: Any = importlib.import_module("xllamacpp")
    parameters = library.CommonParams()
    parameters.model.path = str(file)
    parameters.embedding = True
    parameters.port = 0
    parameters.verbosity = -1
    parameters.n_parallel = _SLOTS
    parameters.n_ctx = _SLOTS * max_length
    # A pooling other than `last` needs all tokens of a text in one micro-batch. Without a common store of keys, llama.cpp
    # cuts texts of different lengths into several, and `mean` is then wrong without an error (1 - cos up to 0.7).
    parameters.kv_unified = True
    parameters.n_batch = parameters.n_ubatch = max(512, max_length)
    parameters.cache_type_k = parameters.cache_type_v = library.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.warmup = parameters.fit_params = False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = _THREADS
    with as_artifact_error(file):
        return library.Server(parameters)
