"""The map is true: modules import what the table of docs/ARCHITECTURE.md allows, and heavy packages have one door each."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import angle_llm

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "angle_llm"
MODULES = sorted(PACKAGE.rglob("*.py"))
FRONT_DOOR = PACKAGE / "__init__.py"  # names the public things and loads them on first use

DOORS = {
    "accelerate": ("training/", "run.py"),
    "bitsandbytes": ("modeling/",),
    "deepspeed": ("training/",),
    "datasets": ("data/files.py", "evaluation/tasks.py"),
    "mteb": ("evaluation/mteb_",),
    "faiss": ("mining/search.py",),
    "huggingface_hub": ("modeling/hub.py", "export/push.py"),
    "peft": ("modeling/adapters.py",),
    "requests": ("web.py",),
    "pyarrow": ("corpus/", "data/files.py", "data/store.py"),
    "scipy": ("evaluation/", "experiments/", "mining/pairs.py"),
    "sklearn": ("evaluation/transfer",),
    "transformers": ("modeling/",),
}
HEAVY = {*DOORS, "torch", "pydantic", "pandas"}


def where(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(module: Path) -> Iterator[str]:
    """Everything a module imports, inside functions and for type checkers too: `angle_llm.data`, `torch.nn`, …"""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where(module)}:{node.lineno}: relative imports hide where a name comes from"
            assert node.module is not None
            # `from angle_llm import data` imports a room, `from angle_llm import __version__` a name.
            yield from (
                (f"angle_llm.{alias.name}" for alias in node.names) if node.module == "angle_llm" else [node.module]
            )


def table() -> dict[str, set[str]]:
    """Room → rooms it may import, from the table of docs/ARCHITECTURE.md."""
    allowed: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines():
        row = re.fullmatch(r"\|(.+?)\|.*\|(.+?)\|", line)
        names = re.findall(r"`([\w/.]+)`", row[1]) if row else []
        if row is None or not names:
            continue
        third = re.sub(r"\(.*?\)", "", row[2]).strip()
        above = set(allowed)
        for name in names:
            room = name.removesuffix(".py").rstrip("/")
            everything = third in {"everything", "everything above"}
            allowed[room] = above if everything else set(re.findall(r"\w+", third))
    return allowed


def test_the_table_and_the_disk_name_the_same_rooms() -> None:
    outside = {"recipes", "eval"}
    assert set(table()) - outside == {room_of(module) for module in MODULES} - {"__init__"}
    assert all((ROOT / name).is_dir() for name in outside)


def test_the_table_says_what_it_seems_to_say() -> None:
    """Else a reworded column would allow nothing, or everything."""
    rooms = table()
    assert rooms["errors"] == set()
    assert rooms["modeling"] == {"errors", "progress", "settings", "prompts", "artifact"}
    assert "training" in rooms["cli"]
    assert "cli" not in rooms["run"]
    assert set().union(*rooms.values()) <= set(rooms)


@pytest.mark.parametrize("module", [module for module in MODULES if module != FRONT_DOOR], ids=where)
def test_a_module_imports_only_what_the_table_allows(module: Path) -> None:
    room = room_of(module)
    allowed = table()[room] | {room, "__version__"}
    used = {name.split(".")[1] for name in imports(module) if name.startswith("angle_llm.")}
    assert used <= allowed, (
        f"{where(module)} imports {sorted(used - allowed)}; docs/ARCHITECTURE.md allows {sorted(allowed)}"
    )


def test_training_and_evaluation_are_strangers() -> None:
    assert "evaluation" not in table()["training"]
    assert "training" not in table()["evaluation"]


@pytest.mark.parametrize("package", DOORS)
def test_a_heavy_package_is_imported_at_its_door_only(package: str) -> None:
    users = [where(module) for module in MODULES if package in {name.split(".")[0] for name in imports(module)}]
    assert all(user.startswith(DOORS[package]) for user in users), users


@pytest.mark.parametrize("name", ["angle_llm", "angle_llm.settings", "angle_llm.prompts", "angle_llm.cli"])
def test_importing_is_light(name: str) -> None:
    code = f"import sys, {name}; print(*{{module.split('.')[0] for module in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY.intersection(loaded)


def test_every_public_name_is_there() -> None:
    assert {name for name in angle_llm.__all__ if getattr(angle_llm, name, None) is None} == set()
    assert dir(angle_llm) == angle_llm.__all__
    with pytest.raises(AttributeError, match="no attribute 'SentenceEncodr'"):
        _ = angle_llm.SentenceEncodr
