"""Prompts: the template around a text, stored in a YAML file and saved with every encoder.

A template has exactly one `{text}`. The text is inserted literally: braces, quotes, format fields and names of special
tokens in it stay text. A text has a side, query or document; the sides can have two prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import yaml

from angle_llm.settings_io import STRICT, SettingsError, bundled_files, settings_from_dict, unknown_name

PLACEHOLDER = "{text}"
TOKENIZATIONS = ("joined", "segments")
Side: TypeAlias = Literal["query", "document"]
SIDES: tuple[Side, ...] = get_args(Side)


class PromptError(SettingsError):
    """A prompt that cannot be used; the message names what to change."""


TEXT_EDITS: dict[str, Callable[[str], str]] = {
    "append_full_stop": lambda text: text if text.endswith((".", "?", '"', "'")) else text + ".",
    "double_quotes_to_single": lambda text: text.replace('"', "'"),
    "final_question_mark_to_full_stop": lambda text: text[:-1] + "." if text.endswith("?") else text,
}
"""Edits of the text by name; a prompt applies them in the order in which it lists them."""


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt. Two prompts give the same token ids exactly if their `fingerprint` is the same.

    Raises:
        PromptError: if the template does not have exactly one `{text}`, or for an unknown edit or tokenization.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    name: str
    """Short name; also the name of the file."""
    template: str
    """The text of the prompt, with exactly one `{text}`."""
    description: str = ""
    """Purpose, in one sentence."""
    source: str = ""
    """Origin: a paper, a repository, or this project."""
    edits: tuple[str, ...] = ()
    """Names of `TEXT_EDITS` that are applied to the text first."""
    tokenization: str = "joined"
    """joined: the formatted prompt is tokenised as one string, as for the published models; the end of the text may
    merge with the tail. segments: head, text and tail are tokenised separately, so that the ids of the prompt do not
    depend on the text. A text that is too long loses its end (with a full stop that an edit added) and, if joined, the
    quote after it; never the rest of the tail."""
    append: Literal["eos"] | None = None
    """eos: the end-of-sequence token of the tokenizer follows the tail, as in E5-Mistral, unless the tokenizer adds it
    itself. It is kept when a text is cut."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", tuple(self.edits))
        found = self.template.count(PLACEHOLDER)
        if found != 1:
            raise PromptError(
                f"prompt {self.name!r}: expected exactly one {PLACEHOLDER} in the template, got {found}: {self.template!r}. "
                f"Write {PLACEHOLDER} once, where the text is inserted."
            )
        try:
            self.template.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"prompt {self.name!r}: the template is not valid Unicode: {error}") from None
        for edit in self.edits:
            if edit not in TEXT_EDITS:
                raise PromptError(f"prompt {self.name!r}: {unknown_name('text edit', edit, TEXT_EDITS)}")
        if self.tokenization not in TOKENIZATIONS:
            raise PromptError(f"prompt {self.name!r}: {unknown_name('tokenization', self.tokenization, TOKENIZATIONS)}")
        if self.append not in (None, "eos"):
            raise PromptError(f"prompt {self.name!r}: append: expected eos or nothing, got {self.append!r}.")

    @property
    def head(self) -> str:
        """The template before the text."""
        return self.template.partition(PLACEHOLDER)[0]

    @property
    def tail(self) -> str:
        """The template after the text."""
        return self.template.partition(PLACEHOLDER)[2]

    def edit(self, text: str) -> str:
        """Return the text after the edits."""
        for name in self.edits:
            text = TEXT_EDITS[name](text)
        return text

    def format(self, text: str) -> str:
        """Return the template with the edited text inserted literally."""
        return self.head + self.edit(text) + self.tail

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what changes the token ids: template, edits, tokenization, and what is appended."""
        appended = [] if self.append is None else [self.append]
        content = json.dumps([self.template, self.edits, self.tokenization, *appended], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON and YAML."""
        values = asdict(self) | {"edits": list(self.edits)}
        if self.append is None:  # earlier versions refuse the key
            del values["append"]
        return values

    @classmethod
    def from_dict(cls, values: object, where: str) -> PromptTemplate:
        """Return a prompt from plain values; `where` names their origin in messages. Raises `PromptError`."""
        try:
            return settings_from_dict(cls, values, where)
        except PromptError:
            raise
        except SettingsError as error:
            raise PromptError(f"{error} A prompt is a mapping with `name` and `template`; text needs quotes.") from None


@dataclass(frozen=True)
class SidePrompts:
    """The prompts of queries and of documents. The first text of a pair is a query, the second a document.

    One prompt is used for both sides unless the fingerprints differ.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    query: PromptTemplate
    document: PromptTemplate

    @property
    def differ(self) -> bool:
        """Whether a text has other token ids as a query than as a document."""
        return self.query.fingerprint != self.document.fingerprint

    def of(self, side: Side) -> PromptTemplate:
        """Return the prompt of a side."""
        return self.query if side == "query" else self.document

    @property
    def name(self) -> str:
        """Name of the prompt, or both names: that of queries / that of documents."""
        return f"{self.query.name} / {self.document.name}" if self.differ else self.query.name

    def __str__(self) -> str:
        names = [self.query.name, self.document.name]
        return f"prompts {names[0]} (queries) and {names[1]} (documents)" if self.differ else f"prompt {names[0]}"

    def described(self) -> str:
        """Return names and templates."""
        one, other = (f"{each.name} ({each.template!r})" for each in (self.query, self.document))
        return f"prompt of queries {one}, of documents {other}" if self.differ else f"prompt {one}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: those of the one prompt, or of both by side."""
        return {side: self.of(side).to_dict() for side in SIDES} if self.differ else self.query.to_dict()

    @classmethod
    def from_dict(cls, values: object, where: str) -> SidePrompts:
        """Return prompts from the values of `to_dict`; `where` names their origin in messages. Raises `PromptError`."""
        by_side = values if isinstance(values, dict) and set(SIDES) & set(values) else dict.fromkeys(SIDES, values)
        check_sides(by_side, where)
        return cls(**{side: PromptTemplate.from_dict(by_side[side], where) for side in SIDES})


PromptChoice: TypeAlias = str | Path | PromptTemplate | SidePrompts | Mapping[str, str | Path | PromptTemplate]
"""One prompt for both sides, or a prompt by side; a prompt is a template, a name or the path of a YAML file."""


def check_sides(given: Mapping[Any, object], where: str) -> None:
    """Raise `PromptError` unless there is a prompt of each side and no other key."""
    if set(given) != set(SIDES):
        raise PromptError(
            f"{where}: expected one prompt, or one for each of query and document; got "
            f"{', '.join(map(str, given)) or 'none'}."
        )


def load_prompts(choice: PromptChoice) -> SidePrompts:
    """Return the prompts of both sides.

    Raises:
        PromptError: as `load_prompt`, and for other sides than query and document.
    """
    if isinstance(choice, SidePrompts):
        return choice
    by_side = choice if isinstance(choice, Mapping) else dict.fromkeys(SIDES, choice)
    check_sides(by_side, "prompt")
    loaded = {side: one if isinstance(one, PromptTemplate) else load_prompt(one) for side, one in by_side.items()}
    return SidePrompts(**loaded)


def bundled_prompts() -> dict[str, Path]:
    """Return the prompt files of the package, by name."""
    return bundled_files("prompts")


def load_prompt(name_or_path: str | Path) -> PromptTemplate:
    """Return a prompt of the package by name, or from the path of a YAML file.

    Raises:
        PromptError: for an unknown name, a missing or malformed file, or a template that cannot be used.
    """
    name = str(name_or_path)
    bundled = bundled_prompts()
    path = bundled.get(name) or Path(name).expanduser()
    try:
        content = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        if path.suffix in {".yaml", ".yml"}:
            raise PromptError(f"no prompt file at {path}. Give a YAML file, or one of: {', '.join(bundled)}.") from None
        raise PromptError(f"{unknown_name('prompt', name, bundled)} A path to your own YAML file works too.") from None
    try:
        values = yaml.safe_load(content.decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} is not valid YAML in UTF-8: {error}") from error
    return PromptTemplate.from_dict(values, where=str(path))
