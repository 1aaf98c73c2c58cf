"""Declare settings, read them from YAML files and flags, and write them; used by all commands and recipes.

pydantic checks types and ranges; an unknown key or flag raises an error that names the nearest known one.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, field, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

Settings = TypeVar("Settings")
STRICT = ConfigDict(extra="forbid")
# The keys of these mappings are not settings: they are names that the user chooses, or sides.
_FREE_KEYS = ("columns", "where", "parts", "prompt")
_PAIRS = {
    "columns": "FIELD COLUMN, such as text1 question text2 answer",
    "where": "COLUMN VALUE, such as language en",
    "parts": "NAME SHARE, such as valid 0.1 test 0.1",
}
"""Last word of a flag that takes pairs of values → form of a pair, for error messages."""
Positive = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]


class SettingsError(ValueError):
    """Error for settings that cannot be used; the message names the setting and what to change."""


class _FlagError(Exception):
    """Error for invalid values of flags. Replaces a ValueError, which tyro would print in another format."""

    def __init__(self, kind: Any, problems: Sequence[Any]) -> None:
        super().__init__()
        self.kind, self.problems = kind, problems


_parses_flags: ContextVar[bool] = ContextVar("parses_flags", default=False)


def parse_flags(kind: Any, arguments: Sequence[str], *, root: type | None = None, **options: Any) -> Any:
    """Parse command line flags with tyro, and return the settings.

    Args:
        kind: Settings class, or union of the settings classes of all commands.
        arguments: Words of the command line.
        root: Settings class of the chosen command, to name flags in error messages; None: `kind`.
        options: Further arguments of `tyro.cli`.

    Raises:
        SettingsError: for an invalid value, and for an unknown flag, with the most similar flag.
    """
    import tyro

    check_pairs(arguments)
    token = _parses_flags.set(True)
    try:
        settings, unknown = tyro.cli(kind, args=arguments, return_unknown_args=True, **options)
    except _FlagError as error:
        prefix = f"--{_flag_prefix(root or kind, error.kind) or ''}"
        raise SettingsError("\n".join(_explain(error.kind, one, prefix) for one in error.problems)) from None
    finally:
        _parses_flags.reset(token)
    if unknown:
        raise SettingsError(unknown_flag(unknown[0], settings))
    return settings


def check_pairs(arguments: Sequence[str]) -> None:
    """Check that every flag that takes pairs of values, such as `--columns`, has an even number of values.

    Raises:
        SettingsError: for an odd number, which happens if another argument, such as FILE, follows the pairs.
    """
    for position, flag in enumerate(arguments):
        form = _PAIRS.get(flag.rpartition(".")[2].removeprefix("--")) if flag.startswith("--") else None
        values = list(
            itertools.takewhile(lambda word: not word.startswith("--") and word != "-h", arguments[position + 1 :])
        )
        if form is not None and len(values) % 2:
            raise SettingsError(
                f"{flag}: expected pairs of {form}; got {len(values)} values: {shlex.join(values)}. Write other arguments, "
                "such as FILE, before the flags."
            )


def _flag_prefix(root: Any, kind: Any) -> str | None:
    """Return the flag prefix of the settings class `kind` nested in the settings class `root`; None if not nested.

    Example: `lora.` for LoraSettings in TrainSettings.
    """
    if root is kind:
        return ""
    for name, hint in get_type_hints(root).items():
        inner = _flag_prefix(hint, kind) if is_dataclass(hint) else None
        if inner is not None:
            return f"{name}.{inner}"
    return None


class MissingLibraryError(RuntimeError):
    """Error for an optional library that is needed but not installed."""


def need_library(module: str, what: str, extra: str) -> None:
    """Raise `MissingLibraryError` if an optional library is not installed.

    Args:
        module: Import name of the library.
        what: Flag or feature that needs the library; the message starts with this text.
        extra: Extra of angle_llm that installs the library.
    """
    if importlib.util.find_spec(module) is None:
        name = module.replace("_", "-")
        raise MissingLibraryError(f"{what}: {name} is not installed; pip install 'angle_llm[{extra}]'.")


def check_new_folder(option: str, folder: Path) -> None:
    """Raise `SettingsError` unless a folder is empty or does not exist; `option` is the flag that names the folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{option} {folder} exists and is not an empty folder. Remove it, or name another folder.")


def unknown_name(what: str, given: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name, with the most similar known name and all known names.

    `what` is the kind of name, such as "setting".
    """
    names = sorted(known)
    nearest = get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {what} {given!r}.{hint} Known: {', '.join(names)}."


def similar_paths(path: Path) -> str:
    """Return a sentence for error messages with existing paths that are similar to a missing path."""
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either."
    similar = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), n=3)
    if not similar:
        return f"The folder {path.parent} has no similar name."
    return f"Did you mean {' or '.join(str(path.parent / name) for name in similar)}?"


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings_class(kind: type[Settings]) -> type[Settings]:
    """Class decorator for settings: makes a frozen pydantic dataclass that raises `SettingsError` for invalid values.

    An unknown key is invalid too.
    """
    made: Any = dataclass(frozen=True, config=STRICT)(kind)
    construct = made.__init__

    @wraps(construct)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        _construct(made, construct, self, values, named)

    made.__init__ = checked
    return cast(type[Settings], made)


def _construct(kind: Any, construct: Any, made: Any, values: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Call the pydantic constructor `construct` of the settings class `kind` on the new object `made`.

    Raises:
        SettingsError: for invalid values; inside `parse_flags` a `_FlagError` instead.
    """
    # Not inside `checked`: a class of a script is pickled with the functions in it, and a context variable cannot be.
    try:
        construct(made, *values, **named)
    except ValidationError as error:
        if _parses_flags.get():
            raise _FlagError(kind, error.errors()) from None
        raise SettingsError("\n".join(_explain(kind, problem) for problem in error.errors())) from None


def settings_from_dict(kind: type[Settings], values: object, where: str) -> Settings:
    """Create settings from nested plain values (as in YAML); `where` is the origin of the values, for error messages.

    Raises:
        SettingsError: for an invalid value or an unknown key; the message names the key and what was expected.
    """
    if not isinstance(values, dict):
        raise SettingsError(f"{where}: expected a mapping of setting names to values, got {type(values).__name__}.")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise SettingsError("\n".join(f"{where}: {_explain(kind, problem)}" for problem in error.errors())) from error


def _explain(kind: Any, problem: Any, flag_prefix: str = "") -> str:
    """Return an error message for a validation error of pydantic (`problem`) in the settings class `kind`."""
    path = [str(step) for step in problem["loc"]]
    if problem["type"] == "unexpected_keyword_argument":
        owner = kind
        for step in path[:-1]:
            if step.isdigit():
                owner = get_args(owner)[0]
            elif get_origin(owner) is None and step in (hints := get_type_hints(owner)):
                owner = hints[step]
        names = [item.name for item in fields(owner)]
        return f"{unknown_name('setting', path[-1], names)} (in {'.'.join(path[:-1]) or 'the top level'})"
    if problem["type"] == "value_error":  # raised by __post_init__ above; names the setting and the value
        return str(problem["ctx"]["error"])
    name = ".".join(path) or "settings"
    name = f"{flag_prefix}{name}".replace("_", "-") if flag_prefix else name
    return f"{name}: {problem['msg']}, got {problem['input']!r}."


def load_settings(kind: type[Settings], path: str | Path, defaults: Settings | None = None) -> Settings:
    """Read settings from a YAML file, given by path or by the name of a bundled recipe.

    Missing keys get the values of `defaults`, or the defaults of the class `kind`.

    Raises:
        SettingsError: for a missing or malformed file or a setting that is not valid.
    """
    values = _read_yaml(path)
    if defaults is not None and isinstance(values, dict):
        values = merged_settings(settings_to_dict(defaults), values)
    return settings_from_dict(kind, values, where=str(path))


def _read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file, given by path or by the name of a bundled recipe.

    Raises:
        SettingsError: for a missing file, or a file that is not valid YAML in UTF-8.
    """
    recipes = bundled_files("recipes")
    path = recipes.get(str(path)) or Path(path).expanduser()
    if not path.is_file():
        raise SettingsError(
            f"no settings file at {path}. Give the path of a YAML file, or a recipe: {', '.join(recipes)}."
        )
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML in UTF-8: {error}") from error


def bundled(name: str) -> Path:
    """Return the path of a file or folder that is installed with the package: in a wheel, or in a clone."""
    package = Path(__file__).parents[1]
    is_clone = (package.parent / "pyproject.toml").is_file()
    return package.parent / name if is_clone else package / f"bundled_{name}"


def bundled_files(folder: str) -> dict[str, Path]:
    """Return name → path of the YAML files that the package contains; `folder` is `prompts` or `recipes`."""
    return {path.stem: path for path in sorted(bundled(folder).glob("*.yaml"))}


def merged_settings(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return the nested settings `base`, overridden by the nested settings `over`, key by key.

    The mappings `columns`, `where`, `parts` and `prompt` are replaced as a whole. If a mapping in `over`
    contains `sets`, the datasets of a mixture, values that are only in `base` are omitted from this mapping.
    """
    result = {} if over.get("sets") else dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in _FREE_KEYS
        result[key] = merged_settings(base[key], value) if nested else value
    return result


def changed_settings(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names, such as `lora.rank`, of the settings in `after` that differ from `before`."""
    changed = []
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and key not in _FREE_KEYS:
            changed += changed_settings(old, value, f"{prefix}{key}.")
        elif old != value:
            changed.append(f"{prefix}{key}")
    return changed


def flags_of(values: dict[str, Any], prefix: str = "--") -> list[str]:
    """Convert nested settings to command line flags: {"lora": {"rank": 0}} → ["--lora.rank", "0"]; None is omitted."""
    words = []
    for key, value in values.items():
        flag = f"{prefix}{key}".replace("_", "-")
        if value is None or value == {}:
            continue
        if isinstance(value, dict) and key not in _FREE_KEYS:
            words += flags_of(value, f"{flag}.")
            continue
        if isinstance(value, dict):
            value = [word for pair in value.items() for word in pair]
        items = value if isinstance(value, list | tuple) else [value]
        words += [flag, *map(_word, items)]
    return words


def _word(value: object) -> str:
    """Return a value as a word of a command line, floats in a short form: 1e-5 instead of 1e-05."""
    short = f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else ""
    return short if short and float(short) == value else str(value)


def settings_to_dict(settings: Any) -> dict[str, Any]:
    """Return settings as nested dictionaries and lists of plain values, for YAML and JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return {key: plain(value) for key, value in asdict(settings).items()}


def save_settings(settings: Any, path: Path) -> None:
    """Write settings to a YAML file, completely or not at all."""
    from angle_llm.io import write_text

    write_text(path, yaml.safe_dump(settings_to_dict(settings), sort_keys=False, allow_unicode=True), writer="")


def parse_settings(defaults: Settings, arguments: Sequence[str] | None = None, *, description: str = "") -> Settings:
    """Parse a command line: `--config FILE` (YAML), overridden by flags such as `--lora.rank 16`; return the settings.

    Settings that are in neither get the values of `defaults`. Without `arguments`, the command line of the process is
    read. `--help` lists every setting with its default.

    Raises:
        SettingsError: for an invalid value, and for an unknown flag, with the most similar flag.
    """
    settings_type = type(defaults)
    loaded, rest = config_defaults(settings_type, sys.argv[1:] if arguments is None else arguments, defaults)
    settings: Settings = parse_flags(
        settings_type, rest, default=loaded or defaults, description=describe(settings_type, description)
    )
    return settings


def parse_program(kind: type[Settings], *, description: str | None) -> Settings:
    """Parse the command line of a program with required flags: `--config FILE`, overridden by flags.

    Raises:
        SettingsError: for an invalid value, and for an unknown flag, with the most similar flag.
    """
    defaults, rest = config_defaults(kind, sys.argv[1:])
    options: dict[str, Any] = {} if defaults is None else {"default": defaults}
    settings: Settings = parse_flags(kind, rest, description=describe(kind, description or ""), **options)
    return settings


def describe(kind: type, summary: str) -> str:
    """Return the text above the flags in `--help`.

    The text is the summary, the docstring of the settings class without its first paragraph, and a note on `--config`.
    """
    text = "--config FILE reads settings from a YAML file; flags override it."
    if common := getattr(kind, "COMMON_FLAGS", ""):
        text += f" {common}"
    more = (inspect.getdoc(kind) or "").split("\n\n")[1:]
    return "\n\n".join([summary, *more, textwrap.fill(text, 80, break_on_hyphens=False)])


def config_defaults(
    kind: type[Settings], arguments: Sequence[str], defaults: Settings | None = None
) -> tuple[Settings | None, list[str]]:
    """Read the file of `--config FILE` in command line arguments; return the settings and the remaining arguments.

    The settings are None if `--config` is missing. Keys that are not in the file get the values of `defaults`.
    """
    rest = list(arguments)
    for position, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else next(iter(rest[position + 1 :]), "")
            if not path:
                raise SettingsError("--config: expected a YAML file.")
            del rest[position : position + (1 if equals else 2)]
            # Without defaults, flags must give the required settings that the file lacks.
            incomplete = _completed_by_flags(kind, path) if defaults is None else None
            return incomplete or load_settings(kind, path, defaults), rest
    return None, rest


def _completed_by_flags(kind: type[Settings], path: str) -> Settings | None:
    """Read settings from a YAML file that lacks required keys; tyro then requires these keys as flags.

    Returns None if the file has all required keys.
    """
    from tyro import MISSING

    content = _read_yaml(path)
    known: dict[str, Any] = {item.name: item for item in fields(cast(Any, kind))}
    required = {name for name, item in known.items() if item.default is item.default_factory is NO_DEFAULT}
    if not isinstance(content, dict) or not required - content.keys():
        return None
    hints = get_type_hints(kind, include_extras=True)
    made = object.__new__(kind)
    for name in (*known, *content):
        if name not in known:
            raise SettingsError(f"{path}: {unknown_name('setting', str(name), known)}")
        if name in content:
            try:
                value = TypeAdapter(hints[name]).validate_python(content[name])
            except ValidationError as error:
                problems = [{**problem, "loc": (name, *problem["loc"])} for problem in error.errors()]
                raise SettingsError("\n".join(f"{path}: {_explain(kind, one)}" for one in problems)) from None
        else:
            item = known[name]
            value = MISSING if name in required else item.default
            value = item.default_factory() if value is NO_DEFAULT else value
        object.__setattr__(made, name, value)
    return made


def unknown_flag(flag: str, settings: Any) -> str:
    """Return an error message for an unknown flag, with suggestions from the flags of `settings`.

    Suggested are flags with the same last word, with the same initials (`--lr`), or with a similar name.
    """
    if not flag.startswith("--"):
        return f"unexpected argument {flag!r}. Settings are flags, such as --seed 1; --help lists them."

    def flags(values: dict[str, Any], prefix: str) -> Iterable[str]:
        for key, value in values.items():
            nested = isinstance(value, dict) and key not in _FREE_KEYS
            yield from flags(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}".replace("_", "-")]

    known = list(flags(settings_to_dict(settings), ""))
    unknown = flag[2:].partition("=")[0].replace("_", "-")
    if unknown in known:  # a mapping with a value: tyro makes a flag for each of its keys
        return f"--{unknown} is set by --config. Change single values of it with --{unknown}.NAME VALUE."
    last = {name: name.rpartition(".")[2] for name in known}
    similar = [name for name in known if last[name] == unknown.rpartition(".")[2]]
    similar = similar or [name for name in known if "".join(word[:1] for word in last[name].split("-")) == unknown]
    similar = similar or get_close_matches(unknown, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(f'--{name}' for name in similar[:3])}?" if similar else ""
    return f"unknown flag --{unknown}.{hint} --help lists all flags."
