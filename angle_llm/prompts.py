"""How a sentence is worded before the model reads it.

A prompt is a YAML file with a template that holds exactly one `{text}`. The text is put in literally: whatever it
contains (braces, quotes, format fields, names of special tokens), it stays text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from angle_llm.errors import unknown

PLACEHOLDER = "{text}"
TOKENIZATIONS = ("joined", "segments")


class PromptError(ValueError):
    """A prompt that cannot be used, with what to change."""


def _append_full_stop(text: str) -> str:
    return text if text.endswith((".", "?", '"', "'")) else text + "."


def _double_quotes_to_single(text: str) -> str:
    return text.replace('"', "'")


def _final_question_mark_to_full_stop(text: str) -> str:
    return text[:-1] + "." if text.endswith("?") else text


TEXT_EDITS: dict[str, Callable[[str], str]] = {
    "append_full_stop": _append_full_stop,
    "double_quotes_to_single": _double_quotes_to_single,
    "final_question_mark_to_full_stop": _final_question_mark_to_full_stop,
}
"""Edits a prompt may ask for by name, applied to the text in the order the prompt lists them."""


@dataclass(frozen=True)
class PromptTemplate:
    """A way of wording a sentence; part of every saved encoder.

    Two prompts word and tokenise alike exactly when their `fingerprint` is the same.

    Raises:
        PromptError: if the template has no `{text}` or several, or names an unknown edit or tokenisation.
    """

    name: str
    """Short name; the file is called after it."""
    template: str
    """The wording, with exactly one `{text}`."""
    description: str = ""
    """What it is for, in a sentence."""
    source: str = ""
    """Where the wording comes from: paper, repository, or this project."""
    edits: tuple[str, ...] = ()
    """Names of `TEXT_EDITS` applied to the text before it is worded."""
    tokenization: str = "joined"
    """`joined`: the worded sentence is tokenised as one string, as the published models were; the text's last
    characters may merge with the prompt's tail. `segments`: head, text and tail are tokenised apart, so the prompt's
    ids never depend on the text. A text that is too long loses its end (with a full stop that an edit put there) and,
    `joined`, the quote behind it; never the rest of the tail."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", tuple(self.edits))
        found = self.template.count(PLACEHOLDER)
        if found != 1:
            raise PromptError(
                f"prompt {self.name!r}: a template needs exactly one {PLACEHOLDER}, this one has {found}: "
                f"{self.template!r}. Write {PLACEHOLDER} once, where the sentence goes."
            )
        try:
            self.template.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"prompt {self.name!r}: the template is not valid Unicode: {error}") from None
        for edit in self.edits:
            if edit not in TEXT_EDITS:
                raise PromptError(f"prompt {self.name!r}: {unknown('text edit', edit, TEXT_EDITS)}")
        if self.tokenization not in TOKENIZATIONS:
            raise PromptError(f"prompt {self.name!r}: {unknown('tokenization', self.tokenization, TOKENIZATIONS)}")

    @property
    def head(self) -> str:
        """What stands before the text."""
        return self.template.partition(PLACEHOLDER)[0]

    @property
    def tail(self) -> str:
        """What stands after the text."""
        return self.template.partition(PLACEHOLDER)[2]

    def edit(self, text: str) -> str:
        """The text after the named edits."""
        for name in self.edits:
            text = TEXT_EDITS[name](text)
        return text

    def word(self, text: str) -> str:
        """The worded sentence: edits, then literal replacement."""
        return self.head + self.edit(text) + self.tail

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what changes the token ids: template, edits, tokenisation. Name and comments do not count."""
        meaning = json.dumps([self.template, self.edits, self.tokenization], ensure_ascii=False)
        return hashlib.sha256(meaning.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON and YAML."""
        return asdict(self) | {"edits": list(self.edits)}

    @classmethod
    def from_dict(cls, values: object, where: str) -> PromptTemplate:
        """Reads the fields of a YAML or JSON object; `where` names it in errors."""
        if not isinstance(values, dict):
            raise PromptError(
                f"{where}: a prompt is a mapping with `name` and `template`, got {type(values).__name__}."
            )
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise PromptError(f"{where}: {unknown('key', str(key), known)}")
        for key in ("name", "template"):
            if key not in values:
                raise PromptError(f"{where}: a prompt needs `{key}`; found {', '.join(map(str, values)) or 'nothing'}.")
        for key, value in values.items():
            if key == "edits":
                if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                    raise PromptError(f"{where}: `edits` must be a list of names, got {value!r}.")
            elif not isinstance(value, str):
                raise PromptError(f"{where}: `{key}` must be text, got {value!r}. Put it in quotes.")
        return cls(**values)


def bundled_prompts() -> dict[str, Path]:
    """The prompts that come with the package, by name: from the wheel, or from `prompts/` of a checkout."""
    package = Path(__file__).parent
    folders = (package / "bundled_prompts", package.parent / "prompts")
    folder = next((folder for folder in folders if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # before Python 3.14: a name too long for a path, such as a whole template
        return False


def load_prompt(name_or_path: str | Path) -> PromptTemplate:
    """A prompt by its name (one that comes with the package) or by the path of a YAML file.

    Raises:
        PromptError: for an unknown name, a missing or malformed file, or a template that cannot be used.
    """
    name = str(name_or_path)
    bundled = bundled_prompts()
    path = bundled.get(name) or Path(name).expanduser()
    if not _is_file(path):
        if path.suffix in {".yaml", ".yml"}:
            raise PromptError(
                f"no prompt file at {path}. Give the path of a YAML file, or one of: {', '.join(bundled)}."
            )
        raise PromptError(f"{unknown('prompt', name, bundled)} A path to your own YAML file works too.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} is not valid YAML in UTF-8: {error}") from error
    return PromptTemplate.from_dict(values, where=str(path))
