"""Declare settings, read them from YAML files and flags, and write them; used by all commands and recipes.

pydantic checks types and ranges; an unknown key raises an error that names the nearest known one. tyro reads
flags.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from angle_llm.io import FolderError, check_replaceable, plain, write_text

Settings = TypeVar("Settings")
STRICT = ConfigDict(extra="forbid")
# The keys of these mappings are not settings: they are names that the user chooses, or sides.
_FREE_KEYS = ("columns", "where", "parts", "prompt")
Positive = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]


class SettingsError(ValueError):
    """Error for settings that cannot be used; the message names the setting and what to change."""


class MissingLibraryError(RuntimeError):
    """Error for an optional library that is needed but not installed."""


def need_library(module: str, feature: str, extra: str) -> None:
    """Raise `MissingLibraryError` if an optional library is not installed.

    Args:
        module: Import name of the library.
        feature: Flag or feature that needs the library; the message starts with this text.
        extra: Extra of angle_llm that installs the library.
    """
    if importlib.util.find_spec(module) is None:
        name = module.replace("_", "-")
        raise MissingLibraryError(f"{feature}: {name} is not installed; pip install 'angle_llm[{extra}]'.")


def check_new_folder(option: str, folder: Path) -> None:
    """Raise `SettingsError` unless a folder is empty or does not exist, and can be replaced.

    `option` is the flag that names the folder.
    """
    try:
        check_replaceable(folder)
    except FolderError as error:
        raise SettingsError(f"{option}: {error}") from error
    folder = folder.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{option} {folder} exists and is not an empty folder. Remove it, or name another folder.")


def unknown_name(label: str, name: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name, with the most similar known name and all known names.

    `label` is the kind of name, such as "setting".
    """
    names = sorted(known)
    nearest = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {label} {name!r}.{hint} Known: {', '.join(names)}."


def similar_paths(path: Path) -> str:
    """Return a sentence for error messages with existing paths that are similar to a missing path."""
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either."
    similar = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), n=3)
    if not similar:
        return f"The folder {path.parent} contains no similar name."
    return f"Did you mean {' or '.join(str(path.parent / name) for name in similar)}?"


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings_class(settings_type: type[Settings]) -> type[Settings]:
    """Class decorator for settings: makes a frozen pydantic dataclass that raises `SettingsError` for invalid values.

    An unknown key is invalid too.
    """
    checked_type: Any = dataclass(frozen=True, config=STRICT)(settings_type)
    construct = checked_type.__init__

    @wraps(construct)
    def checked_init(self: Any, *values: Any, **named: Any) -> None:
        try:
            construct(self, *values, **named)
        except ValidationError as error:
            problems = [_explain(checked_type, problem, is_flag=True) for problem in error.errors()]
            raise SettingsError("\n".join(problems)) from None

    checked_type.__init__ = checked_init
    for item in fields(checked_type):
        if is_dataclass(item.default_factory):
            _GROUP_OF.setdefault(item.default_factory, (checked_type, item.name))
    return cast(type[Settings], checked_type)


_GROUP_OF: dict[Any, tuple[Any, str]] = {}
"""Settings class → the class that has it as a group, and the name of the group."""


def _flag_prefix(settings_type: Any) -> str:
    """Return the start of the flags of a settings class, such as `--lora.`; `--` for the settings of a command."""
    if settings_type not in _GROUP_OF:
        return "--"
    owner, group = _GROUP_OF[settings_type]
    return f"{_flag_prefix(owner)}{group}."


def settings_from_dict(settings_type: type[Settings], values: object, where: str) -> Settings:
    """Create settings from nested plain values (as in YAML); `where` is the origin of the values, for error messages.

    Raises:
        SettingsError: for an invalid value or an unknown key; the message names the key and what was expected.
    """
    if not isinstance(values, dict):
        raise SettingsError(f"{where}: expected a mapping of setting names to values, got {type(values).__name__}.")
    try:
        return TypeAdapter(settings_type).validate_python(values)
    except ValidationError as error:
        problems = [f"{where}: {_explain(settings_type, problem)}" for problem in error.errors()]
        raise SettingsError("\n".join(problems)) from error


def _explain(settings_type: Any, problem: Any, *, is_flag: bool = False) -> str:
    """Return an error message for a validation error of pydantic (`problem`) in the settings class `settings_type`.

    `is_flag` is whether the message names the setting as a flag, such as `--lora.rank`.
    """
    path = [str(step) for step in problem["loc"]]
    if path and path[0].isdigit():  # a positional argument
        path[0] = [item.name for item in fields(settings_type) if not item.kw_only][int(path[0])]
    if problem["type"] == "unexpected_keyword_argument":
        # The settings class that has no such key: the path goes through groups, and lists of groups.
        owner = settings_type
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
    name = f"{_flag_prefix(settings_type)}{name}".replace("_", "-") if is_flag else name
    return f"{name}: {problem['msg']}, got {problem['input']!r}."


def load_settings(settings_type: type[Settings], path: str | Path, defaults: Settings | None = None) -> Settings:
    """Read settings from a YAML file, given by path or by the name of a bundled recipe.

    Missing keys get the values of `defaults`, or the defaults of the class `settings_type`.

    Raises:
        SettingsError: for a missing or malformed file or a setting that is not valid.
    """
    values = read_yaml(path, "recipes")
    if defaults is not None and isinstance(values, dict):
        values = merged_settings(settings_to_dict(defaults), values)
    return settings_from_dict(settings_type, values, where=str(path))


def read_yaml(name: str | Path, folder: str) -> Any:
    """Return the content of a YAML file, given by path or by the name of a bundled file; `folder` as in `bundled_files`.

    Raises:
        SettingsError: for a missing file, or a file that is not valid YAML in UTF-8.
    """
    known = bundled_files(folder)
    path = known.get(str(name)) or Path(name).expanduser()
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        unknown = unknown_name(Path(folder).name.removesuffix("s"), str(name), known)
        raise SettingsError(f"{unknown} The path of a YAML file works too; it could not be read ({error}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML in UTF-8: {error}") from error


def bundled(name: str) -> Path:
    """Return the path of a file or folder that is installed with the package: in a wheel, or in a clone."""
    package = Path(__file__).parents[1]
    installed = package / f"bundled_{name}"
    return installed if installed.exists() else package.parent / name


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
    values: dict[str, Any] = plain(settings)
    return values


PASSED = "# Passed in Python, and not in this file: "
"""Start of the first line of a settings file, if a program passed a loss or callbacks."""


def save_settings(settings: Any, path: Path, passed: str = "") -> None:
    """Write settings to a YAML file, completely or not at all; `passed` is what a program passed in addition."""
    text = yaml.safe_dump(settings_to_dict(settings), sort_keys=False, allow_unicode=True)
    write_text(path, (f"{PASSED}{passed}\n" if passed else "") + text, writer="")


def parse_settings(
    defaults: Any, arguments: Sequence[str] | None = None, *, description: str = "", prog: str | None = None
) -> Any:
    """Parse a command line: `--config FILE` (YAML), overridden by flags such as `--lora.rank 16`; return the settings.

    Settings that are in neither get the values of the settings `defaults`. If `defaults` is a settings class, its fields
    without a default are required flags. Without `arguments`, the command line of the process is read. `--help` lists
    every setting with its default, below `description`; `prog` is the name of the program. For an invalid value or an
    unknown flag, tyro prints a message, and the process exits with code 2.

    Raises:
        SettingsError: for a flag with several values that is given twice.
    """
    import tyro

    settings_type: Any = defaults if isinstance(defaults, type) else type(defaults)
    values = None if isinstance(defaults, type) else defaults
    loaded, rest = config_defaults(settings_type, sys.argv[1:] if arguments is None else arguments, values)
    names = [argument.partition("=")[0].replace("_", "-") for argument in rest]
    default = values if loaded is None else loaded
    for flag in [] if default is None else list(_mapping_flags(default)):
        if flag in names:  # it replaces the whole mapping
            default = _without_mapping(default, flag.removeprefix("--").replace("-", "_").split("."))
    options: dict[str, Any] = {} if default is None else {"default": default}
    text = describe(settings_type, description)
    settings: Any = tyro.cli(settings_type, prog=prog, args=rest, description=text, **options)
    for flag in {name for name in names if name.startswith("--") and names.count(name) > 1}:
        value: Any = settings
        for name in flag.removeprefix("--").replace("-", "_").split("."):
            value = getattr(value, name, None)
        if isinstance(value, tuple | list | dict):  # tyro would keep the values of the last flag
            raise SettingsError(f"{flag} is given twice. Give all its values after one flag: {flag} A B.")
    # An incomplete file has another type, without checks, until flags complete it (`_load_incomplete`).
    return settings if type(settings) is settings_type else settings_type(**vars(settings))


def _without_mapping(settings: Any, names: Sequence[str]) -> Any:
    """Return settings with an empty mapping; `names` are the names of its groups and its own name."""
    name, *rest = names
    changed = copy(settings)  # `replace` would check the values, and a required value may still be missing
    object.__setattr__(changed, name, _without_mapping(getattr(settings, name), rest) if rest else {})
    return changed


def _mapping_flags(settings: Any, prefix: str = "--") -> Iterator[str]:
    """Yield the flags of the mappings that are not empty. In place of these flags, tyro has a flag for each key."""
    hints = get_type_hints(type(settings))
    for item in fields(settings):
        value = getattr(settings, item.name)
        flag = f"{prefix}{item.name}".replace("_", "-")
        if is_dataclass(value):
            yield from _mapping_flags(value, f"{flag}.")
        elif value and get_origin(hints[item.name]) is dict:
            yield flag


def describe(settings_type: type, summary: str) -> str:
    """Return the text above the flags in `--help`.

    The text is the summary, the docstring of the settings class without its first paragraph, and a note on `--config`.
    """
    text = "--config FILE reads settings from a YAML file; flags override it."
    if common := getattr(settings_type, "COMMON_FLAGS", ""):
        text += f" {common}"
    more = (inspect.getdoc(settings_type) or "").split("\n\n")[1:]
    return "\n\n".join([summary, *more, textwrap.fill(text, 80, break_on_hyphens=False)])


def config_defaults(
    settings_type: type[Settings], arguments: Sequence[str], defaults: Settings | None = None
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
                raise SettingsError("--config: expected a YAML file, got none.")
            del rest[position : position + (1 if equals else 2)]
            if defaults is None:
                return _load_incomplete(settings_type, path), rest
            return load_settings(settings_type, path, defaults), rest
    return None, rest


def _load_incomplete(settings_type: type[Settings], path: str) -> Settings:
    """Read settings from a YAML file; required keys that the file lacks become required flags.

    The value of such a key is tyro's MISSING. The settings then have a subclass of `settings_type`, without checks across fields.
    """
    from tyro import MISSING

    content = read_yaml(path, "recipes")
    all_fields = fields(cast(Any, settings_type))
    required = [item.name for item in all_fields if item.default is item.default_factory is NO_DEFAULT]
    if isinstance(content, dict) and not content.keys() >= set(required):
        hints = get_type_hints(settings_type, include_extras=True)
        namespace = {
            **dict.fromkeys(required, MISSING),  # the values of the file replace these defaults
            "__annotations__": {name: hints[name] for name in required},
            "__post_init__": lambda _: None,
            "__module__": settings_type.__module__,  # where tyro reads the help texts
        }
        unchecked = settings_class(cast(type[Settings], type(settings_type.__name__, (settings_type,), namespace)))
        return settings_from_dict(unchecked, content, where=path)
    return settings_from_dict(settings_type, content, where=path)
