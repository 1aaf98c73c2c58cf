"""Prompts: the template around a text, stored in a YAML file and saved with every encoder.

A template has exactly one `{text}`. The text is inserted literally: braces, quotes, format fields and names of special
tokens in the text stay text. A text is embedded as a query or as a document; queries and documents can have different
prompts. A template can have `{instruction}` before `{text}`; a text without an instruction gets the default of the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from angle_llm.io import log, plain
from angle_llm.settings.parsing import SettingsError, read_yaml, settings_class, settings_from_dict, unknown_name

PLACEHOLDER = "{text}"
INSTRUCTION = "{instruction}"
Side: TypeAlias = Literal["query", "document"]
SIDES: tuple[Side, ...] = get_args(Side)
InstructedText: TypeAlias = str | tuple[str, str]
"""A text, or a text with its instruction."""


TEXT_EDITS: dict[str, Callable[[str], str]] = {
    "append_full_stop": lambda text: text if text.endswith((".", "?", '"', "'")) else text + ".",
    "double_quotes_to_single": lambda text: text.replace('"', "'"),
    "final_question_mark_to_full_stop": lambda text: text[:-1] + "." if text.endswith("?") else text,
}
"""Edit name → function that edits a text before the text is inserted into a prompt.

A prompt applies its edits in the order of its field `edits`."""


def instructed(text: str, instruction: str | None) -> InstructedText:
    """Return a text with its instruction; None or a blank instruction: the text."""
    return (text, instruction) if instruction and instruction.strip() else text


def split_instructions(texts: Iterable[InstructedText]) -> tuple[list[str], list[str | None]]:
    """Return the texts, and their instructions; None for a text without one."""
    pairs = [(text, None) if isinstance(text, str) else text for text in texts]
    return [text for text, _ in pairs], [instruction for _, instruction in pairs]


def usable_instructions(prompt: PromptTemplate, instructions: Sequence[str | None]) -> Sequence[str | None]:
    """Return the instructions; none, with a warning, if the prompt has no place for them."""
    if any(instructions) and not prompt.takes_instruction:
        log(f"warning: prompt {prompt.name!r} has no {INSTRUCTION}, so the instructions of texts are not used")
        return ()
    return instructions


@settings_class
class PromptTemplate:
    """A prompt: the template around a text, and how the result is tokenized.

    Two prompts give equal token ids for every text exactly if their `fingerprint` is equal.

    Raises:
        SettingsError: if the template does not have exactly one `{text}`, for an instruction without a place before it, or
            the reverse, or for a value of another type.
    """

    name: str
    """Short name of the prompt; also the name of the YAML file."""
    template: str
    """The text of the prompt, with exactly one `{text}`, and optionally `{instruction}` before it."""
    description: str = ""
    """Purpose of the prompt, in one sentence."""
    source: str = ""
    """Origin of the prompt: a paper, a repository, or this project."""
    edits: tuple[str, ...] = ()
    """Names of edits (keys of `TEXT_EDITS`) that are applied in order to a text before the text is inserted."""
    tokenization: Literal["joined", "segments", "chat"] = "joined"
    """How a prompt with a text is tokenized: "joined", "segments" or "chat".

    joined: the formatted prompt is tokenized as one string, as for the published models; the end of the text may merge
    with the tail (the template after the text) into one token. segments: head, text and tail are tokenized separately,
    so the ids of the prompt do not depend on the text. chat: names of special tokens in head and tail, such as
    <|im_start|>, are these tokens; between them as joined; the tokenizer adds no other special tokens. A text that is
    too long loses its end, including a full stop that an edit added. With joined and chat, a quote after the text is
    lost too; the rest of the tail is always kept.
    """
    append: Literal["eos"] | None = None
    """eos: the end-of-sequence token is appended after the prompt, as in E5-Mistral, unless the tokenizer appends it.

    The token is kept when a text is cut. None: no token is appended.
    """
    instruction: str = ""
    """Instruction of texts without one of their own; required if the template has `{instruction}`."""
    chat_template: Literal["message", "generation_prompt"] | None = None
    """Use the chat template of the tokenizer, in which `template` is the message of the user; None: not.

    message: the prompt ends after the message. generation_prompt: the prompt ends with the start of the answer. When an
    encoder is opened, the chat template becomes the head and tail of a prompt with the tokenization `chat`, which is
    saved with the encoder.
    """
    system: str = ""
    """System message for `chat_template`; empty: the default of the chat template."""

    def __post_init__(self) -> None:
        count = self.template.count(PLACEHOLDER)
        if count != 1:
            raise SettingsError(
                f"prompt {self.name!r}: expected exactly one {PLACEHOLDER} in the template, got {count}: {self.template!r}. "
                f"Write {PLACEHOLDER} once, where the text is inserted."
            )
        instructions = self.template.count(INSTRUCTION)
        has_default = bool(self.instruction.strip())
        if instructions > 1 or INSTRUCTION in self.tail or (instructions == 1) != has_default:
            raise SettingsError(
                f"prompt {self.name!r}: expected {INSTRUCTION} once before {PLACEHOLDER} and a default `instruction`, or "
                f"neither; got the template {self.template!r} and the instruction {self.instruction!r:.80}."
            )
        for edit in self.edits:
            if edit not in TEXT_EDITS:
                raise SettingsError(f"prompt {self.name!r}: {unknown_name('text edit', edit, TEXT_EDITS)}")
        if self.system and self.chat_template is None:
            raise SettingsError(
                f"prompt {self.name!r}: `system` is a message for the chat template. Set `chat_template`, too."
            )
        if self.takes_instruction and (self.chat_template or self.tokenization == "chat"):
            raise SettingsError(f"prompt {self.name!r}: a prompt with a chat template cannot have {INSTRUCTION}.")

    @property
    def takes_instruction(self) -> bool:
        """Whether the template has the placeholder `{instruction}`."""
        return INSTRUCTION in self.template

    def with_instruction(self, instruction: str) -> PromptTemplate:
        """Return the prompt with another default instruction; raise `SettingsError` if blank or without a place."""
        if not self.takes_instruction:
            raise SettingsError(
                f"prompt {self.name!r} has no {INSTRUCTION} for the instruction {instruction!r:.80}. Omit the instruction, or "
                "choose another prompt, such as e5_mistral_query."
            )
        return replace(self, instruction=instruction)

    @property
    def head(self) -> str:
        """Text of the template before the placeholder `{text}`, with the default instruction."""
        return self.template.partition(PLACEHOLDER)[0].replace(INSTRUCTION, self.instruction)

    @property
    def tail(self) -> str:
        """Text of the template after the placeholder `{text}`."""
        return self.template.partition(PLACEHOLDER)[2]

    @property
    def written(self) -> str:
        """The template with the default instruction, for messages and for users of other programs."""
        return self.head + PLACEHOLDER + self.tail

    def edit(self, text: str) -> str:
        """Apply the `edits` of the prompt to a text, and return the result."""
        for name in self.edits:
            text = TEXT_EDITS[name](text)
        return text

    def format(self, text: str) -> str:
        """Return the string that is tokenized: the template with the edited text inserted literally."""
        return self.head + self.edit(text) + self.tail

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the prompt fields that affect token ids."""
        added: list[Any] = [] if self.append is None else [self.append]
        added += [{"instruction": self.instruction}] if self.takes_instruction else []
        added += [] if self.chat_template is None else [{self.chat_template: self.system}]
        content = json.dumps([self.template, self.edits, self.tokenization, *added], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the prompt as plain values, for JSON and YAML; `from_dict` reads them."""
        values: dict[str, Any] = plain(self)
        return values

    @classmethod
    def from_dict(cls, values: object, where: str) -> PromptTemplate:
        """Create a prompt from the values of `to_dict`; `where` is the origin of the values, for error messages.

        Raises:
            SettingsError: for a value that is missing, unknown, or of another type.
        """
        return settings_from_dict(cls, values, where)


@dataclass(frozen=True)
class SidePrompts:
    """Two prompts of an encoder: for queries and for documents.

    The first text of a pair is a query, the second text a document. Prompts with equal fingerprints count as one
    prompt.
    """

    query: PromptTemplate
    document: PromptTemplate

    @property
    def differ(self) -> bool:
        """Whether the same text has different token ids as a query and as a document."""
        return self.query.fingerprint != self.document.fingerprint

    def of(self, side: Side) -> PromptTemplate:
        """Return the prompt of queries or of documents."""
        return self.query if side == "query" else self.document

    def with_instruction(self, instruction: str) -> SidePrompts:
        """Return the prompts with another default instruction of queries; one prompt for all texts stays one prompt."""
        query = self.query.with_instruction(instruction)
        return SidePrompts(query, self.document if self.differ else query)

    @property
    def name(self) -> str:
        """Name of the prompt; `QUERY NAME / DOCUMENT NAME` if the two prompts differ."""
        return f"{self.query.name} / {self.document.name}" if self.differ else self.query.name

    def __str__(self) -> str:
        names = [self.query.name, self.document.name]
        return f"prompts {names[0]} (queries) and {names[1]} (documents)" if self.differ else f"prompt {names[0]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the prompts as plain values, for JSON.

        Two different prompts: {"query": values, "document": values}. Equal prompts: the values of the prompt.
        """
        return {side: self.of(side).to_dict() for side in SIDES} if self.differ else self.query.to_dict()

    @classmethod
    def from_dict(cls, values: object, where: str) -> SidePrompts:
        """Create prompts from the values of `to_dict`; `where` is the origin of the values, for error messages.

        Raises:
            SettingsError: for a value that is missing, unknown, or of another type.
        """
        by_side = values if isinstance(values, dict) and set(SIDES) & set(values) else dict.fromkeys(SIDES, values)
        check_sides(by_side, where)
        return cls(**{side: PromptTemplate.from_dict(by_side[side], where) for side in SIDES})


PromptChoice: TypeAlias = str | Path | PromptTemplate | SidePrompts | Mapping[str, str | Path | PromptTemplate]
"""A prompt for all texts, or a mapping with the keys `query` and `document` and a prompt for each key.

A prompt is a `PromptTemplate`, the name of a bundled prompt, or the path of a YAML file."""


def check_sides(given: Mapping[Any, object], where: str) -> None:
    """Raise `SettingsError` unless the keys are exactly `query` and `document`; `where` is the start of the message."""
    if set(given) != set(SIDES):
        raise SettingsError(
            f"{where}: expected one prompt, or a prompt for query and a prompt for document; got "
            f"{', '.join(map(str, given)) or 'none'}."
        )


def load_prompts(choice: PromptChoice) -> SidePrompts:
    """Load the prompts of queries and documents; `choice` is described at `PromptChoice`.

    Raises:
        SettingsError: as in `load_prompt`, and for a mapping whose keys are not `query` and `document`.
    """
    if isinstance(choice, SidePrompts):
        return choice
    by_side = choice if isinstance(choice, Mapping) else dict.fromkeys(SIDES, choice)
    check_sides(by_side, "prompt")
    return SidePrompts(**{side: load_prompt(prompt) for side, prompt in by_side.items()})


def load_prompt(name_or_path: str | Path | PromptTemplate) -> PromptTemplate:
    """Load a bundled prompt by name, or a prompt from the path of a YAML file; a `PromptTemplate` is returned.

    Raises:
        SettingsError: for an unknown name, a missing or malformed file, or a template that cannot be used.
    """
    if isinstance(name_or_path, PromptTemplate):
        return name_or_path
    return PromptTemplate.from_dict(read_yaml(name_or_path, "prompts"), where=str(name_or_path))
