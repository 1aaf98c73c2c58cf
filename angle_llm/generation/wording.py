"""How a generator is asked: a YAML file with a template for each side, `{size}` and `{text}` exactly once in each.

The sentence is put in literally: whatever it contains (braces, quotes, `{size}`), it stays text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import yaml

from angle_llm.config import SettingsError
from angle_llm.errors import unknown

Side = Literal["synonym", "antonym"]
SIDES: tuple[Side, ...] = get_args(Side)
SCORES: dict[Side, int] = {"synonym": 1, "antonym": 0}
"""What a pair of a sentence and a generated one is worth."""

_FOLDER = Path(__file__).parent / "prompts"
_BLANKS = ("{size}", "{text}")


@dataclass(frozen=True)
class Wording:
    """A way of asking.

    Raises:
        SettingsError: for a template that does not hold `{size}` and `{text}` exactly once each.
    """

    name: str
    """Short name; it stands beside every pair."""
    synonym: str
    """Asks for sentences of the same meaning."""
    antonym: str
    """Asks for sentences of the opposite meaning."""
    source: str = ""
    """Where the wording comes from."""

    def __post_init__(self) -> None:
        for side in SIDES:
            for blank in _BLANKS:
                found = self.template(side).count(blank)
                if found != 1:
                    raise SettingsError(
                        f"prompt {self.name!r}: `{side}` needs exactly one {blank}, this one has {found}. Write {{size}} where "
                        "the number of sentences goes, and {text} where the sentence goes."
                    )

    def template(self, side: Side) -> str:
        """The template of a side."""
        return {"synonym": self.synonym, "antonym": self.antonym}[side]

    def ask(self, side: Side, text: str, size: int) -> str:
        """The message for a sentence. One full stop is not written twice, where the template has its own."""
        head, _, tail = self.template(side).partition("{text}")
        if tail.startswith("."):
            text = text.removesuffix(".")
        return head.replace("{size}", str(size)) + text + tail.replace("{size}", str(size))

    def own_words(self, side: Side) -> str:
        """The template without its blanks."""
        return self.template(side).replace("{size}", " ").replace("{text}", " ")

    def fingerprint(self) -> str:
        """Equal for wordings that ask alike."""
        return hashlib.sha256(json.dumps([self.synonym, self.antonym]).encode()).hexdigest()[:16]


def bundled_wordings() -> dict[str, Path]:
    """Those that come with the package, by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def load_wording(name_or_path: str) -> Wording:
    """A wording by the name of one that comes with the package, or by the path of a YAML file.

    Raises:
        SettingsError: for an unknown name, or a file that cannot be meant.
    """
    bundled = bundled_wordings()
    path = bundled.get(name_or_path) or Path(name_or_path).expanduser()
    if not path.is_file():
        raise SettingsError(f"--prompt: {unknown('prompt', name_or_path, bundled)} A path to your own YAML works too.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML in UTF-8: {error}") from error
    known = [item.name for item in fields(Wording)]
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise SettingsError(f"{path}: a prompt is a mapping of texts: {', '.join(known)}.")
    for key in values:
        if key not in known:
            raise SettingsError(f"{path}: {unknown('key', str(key), known)}")
    for key in ("name", *SIDES):
        if key not in values:
            raise SettingsError(f"{path}: a prompt needs `{key}`; found {', '.join(values) or 'nothing'}.")
    return Wording(**values)
