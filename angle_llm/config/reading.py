"""Settings from YAML files, command lines and plain values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from angle_llm.config.checked import SettingsError
from angle_llm.errors import unknown
from angle_llm.files import write_text

Settings = TypeVar("Settings")


def settings_from_dict(kind: type[Settings], values: object, where: str) -> Settings:
    """Builds settings from plain values; `where` names their origin in errors.

    Raises:
        SettingsError: naming the key, what it needs, what came, and for an unknown key the nearest known one.
    """
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(values, dict):
        raise SettingsError(f"{where}: settings are a mapping of names to values, got {type(values).__name__}.")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        lines = [f"{where}: {_explain(kind, problem)}" for problem in error.errors()]
        raise SettingsError("\n".join(lines)) from error


def _explain(kind: type, problem: Any) -> str:
    path = [str(step) for step in problem["loc"]]
    if problem["type"] == "unexpected_keyword_argument":
        owner: Any = kind
        for step in path[:-1]:  # of a list, into what it is a list of
            owner = get_args(owner)[0] if step.isdigit() else get_type_hints(owner)[step]
        return f"{unknown('setting', path[-1], _names(owner))} (in {'.'.join(path[:-1]) or 'the top level'})"
    if problem["type"] == "value_error":  # one of ours: it names the field and what came
        return str(problem["ctx"]["error"])
    return f"{'.'.join(path) or 'settings'}: {problem['msg']}, got {problem['input']!r}."


def _names(kind: Any) -> list[str]:
    return [item.name for item in fields(kind)] if is_dataclass(kind) else []


def load_settings(kind: type[Settings], path: str | Path, defaults: Settings | None = None) -> Settings:
    """Reads a YAML file; what it leaves out comes from `defaults`, key by key.

    Raises:
        SettingsError: for a missing or malformed file or a setting that does not fit.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise SettingsError(f"no settings file at {path}. Give the path of a YAML file.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    if defaults is not None and isinstance(values, dict):
        values = merged_settings(settings_to_dict(defaults), values)
    return settings_from_dict(kind, values, where=str(path))


def merged_settings(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested plain values with those of `over` put over them, key by key; `columns` and `where` are replaced whole, and all
    of a `base` that is about one source of data if `over` names the `sets` of a mixture."""
    result = {} if over.get("sets") else dict(base)
    for key, value in over.items():
        both_nested = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in {"columns", "where"}
        result[key] = merged_settings(base[key], value) if both_nested else value
    return result


def changed_settings(
    then: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any] | None = None, under: str = ""
) -> list[str]:
    """The settings that are otherwise now than they were then, by their dotted names.

    What was not known then, for it is older, was as `defaults` say; what those do not name counts as it is now.
    """
    changed = []
    defaults = defaults or {}
    for key, value in now.items():
        if key not in then and key not in defaults:
            continue
        was = then[key] if key in then else defaults[key]
        if isinstance(was, dict) and isinstance(value, dict) and key not in ("where", "columns"):
            inner = defaults.get(key)
            changed += changed_settings(was, value, inner if isinstance(inner, dict) else None, f"{under}{key}.")
        elif was != value:
            changed.append(f"{under}{key}")
    return changed


def settings_to_dict(settings: Any) -> dict[str, Any]:
    """Plain values that YAML and JSON can hold."""
    return {key: _plain(value) for key, value in asdict(settings).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def save_settings(settings: Any, path: Path) -> None:
    """Writes settings as YAML, whole or not at all, even if the power fails."""
    write_text(path, yaml.safe_dump(settings_to_dict(settings), sort_keys=False, allow_unicode=True), by="")


def parse_settings(defaults: Settings, arguments: Sequence[str] | None = None, *, description: str = "") -> Settings:
    """Settings from a command line: `--config FILE` first, then single fields such as `--lora.rank 16`.

    Without arguments the command line of the process is read. `--help` lists every field with its default.
    """
    import sys

    import tyro

    rest = list(sys.argv[1:] if arguments is None else arguments)
    config: str | None = None
    for position, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == "--config":
            config = value if equals else (rest[position + 1] if position + 1 < len(rest) else "")
            del rest[position : position + (1 if equals else 2)]
            break
    kind = type(defaults)
    if config is not None:
        defaults = load_settings(kind, config, defaults)
    description = f"{description}\n\n--config FILE reads a settings YAML first; the options below override it.".strip()
    chosen: Settings = tyro.cli(kind, default=defaults, args=rest, description=description)
    return settings_from_dict(kind, settings_to_dict(chosen), where="command line")
