"""What all settings share: the error for those that cannot be used, and the refusal of unknown names."""

from __future__ import annotations

from typing import Any, ClassVar


class SettingsError(ValueError):
    """Settings that cannot be used, with what to change."""


def require(holds: bool, message: str) -> None:
    """Raises SettingsError with the message unless it holds."""
    if not holds:
        raise SettingsError(message)


class Checked:
    """Makes pydantic refuse unknown keys when it reads a settings dataclass."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
