"""Structure of the package: which package may import which, no import cycle, and heavy libraries in few places."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from faults import FAULTS, ROOT, place

import angle_llm

PACKAGE = Path(__file__).parent.parent / "angle_llm"
MODULES = sorted(PACKAGE.rglob("*.py"))
BASE = {"settings", "prompts", "io", "resumable_folder", "device", "losses", "objective"}
CORE = {*BASE, "data", "model"}
# Each package and module, and the packages it may import. `cli` and `run` may import everything.
ALLOWED = {
    "io": set[str](),
    "init": {"settings", "io"},
    "objective": set[str](),
    "device": {"io"},
    "losses": {"device", "objective"},
    "prompts": {"settings", "io"},
    "resumable_folder": {"io"},
    "settings": {"prompts", "io", "objective"},
    "data": BASE,
    "model": BASE | {"data"},
    **dict.fromkeys(("train", "evaluate", "serve"), CORE),
    "export": CORE | {"serve"},
    "memory": CORE | {"train"},
    "tools": CORE | {"train", "evaluate"},
}
MOST_MODULES = 15
LIBRARIES = {
    "accelerate": ("train/", "run.py"),
    "bitsandbytes": ("model/",),
    "deepspeed": ("train/",),
    "datasets": ("data/",),
    "mteb": ("evaluate/mteb",),
    "peft": ("model/",),
    "pyarrow": ("data/", "model/vectors.py"),
    "sklearn": (),
}
HEAVY = {*LIBRARIES, "torch", "transformers", "scipy", "pandas", "huggingface_hub"}


def relative(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


def unit(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(module: Path) -> list[str]:
    """All imports, inside functions and for type checkers too: `angle_llm.data`, `torch.nn`, …"""
    return list(_imports(module))


def _imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(module)}:{node.lineno}: relative import"
            package = node.module == "angle_llm"
            yield from (f"angle_llm.{alias.name}" for alias in node.names) if package else [node.module]


@pytest.mark.parametrize("module", [m for m in MODULES if unit(m) in ALLOWED], ids=relative)
def test_dependencies_point_one_way(module: Path) -> None:
    allowed = ALLOWED[unit(module)] | {unit(module), "__version__"}
    used = {name.split(".")[1] for name in imports(module) if name.startswith("angle_llm.")}
    assert used <= allowed, f"{relative(module)} must not import {sorted(used - allowed)}"


def test_settings_are_declared_in_one_folder() -> None:
    """`cli` reads the settings of all commands without importing the code of the commands."""
    users = {relative(m) for m in MODULES if "@settings_class" in m.read_text(encoding="utf-8")}
    assert len(users) > 3
    assert {user for user in users if not user.startswith("settings/")} <= {"evaluate/held_out.py", "prompts.py"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_heavy_library_is_imported_in_few_places(library: str) -> None:
    users = [relative(m) for m in MODULES if library in {name.split(".")[0] for name in imports(m)}]
    assert all(user.startswith(LIBRARIES[library]) for user in users), users


def test_importing_angle_llm_loads_no_heavy_library() -> None:
    modules = "angle_llm.cli, angle_llm.prompts, angle_llm.settings.train"
    code = f"import sys, {modules}; print(*{{module.split('.')[0] for module in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY.intersection(loaded)


def test_few_modules_depend_on_a_pretraining_task() -> None:
    """The settings, the command, the module of the tasks, the choice of the task, and the advice for single texts."""
    users = {relative(m) for m in MODULES if re.search(r"pretrain(?!ed)|mntp|two_views", m.read_text(encoding="utf-8"))}
    allowed = {"settings/train.py", "cli.py", "train/pretraining.py", "train/objectives.py", "data/formats.py"}
    assert users <= allowed, sorted(users - allowed)


def test_every_public_name_is_defined() -> None:
    assert {name for name in angle_llm.__all__ if getattr(angle_llm, name, None) is None} == set()
    assert dir(angle_llm) == angle_llm.__all__
    with pytest.raises(AttributeError, match="SentenceEncodr"):
        _ = angle_llm.SentenceEncodr


def test_what_the_path_of_a_source_means_is_decided_in_one_module() -> None:
    signs = ('rpartition("@")', '"starter:"', '"mteb:"', ' "qrels"\n')
    users = {relative(module) for module in MODULES if any(sign in module.read_text("utf-8") for sign in signs)}
    assert users == {"data/sources.py", "data/files/beir.py"}


def test_no_folder_has_more_modules_than_a_reader_can_scan() -> None:
    counts = Counter(module.parent for module in MODULES)
    assert max(counts.values()) <= MOST_MODULES, counts.most_common(1)


def test_no_two_modules_import_each_other() -> None:
    """Imports inside functions and for type checkers count too."""
    used = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): set(imports(m)) for m in MODULES}
    pairs = [(a, b) for a in used for b in used if a < b and b in used[a] and a in used[b]]
    assert pairs == []


def group(module: str) -> str:
    """Package of a module: `data`, `train`, …; in `model` the sub-package, such as `model.layers`, or `model`."""
    parts = module.split(".")[1:]
    inside = parts[0] == "model" and PACKAGE.joinpath(*parts[:2]).is_dir()
    return ".".join(parts[:2] if inside else parts[:1])


def test_no_two_packages_or_sub_packages_import_each_other() -> None:
    """Imports inside functions and for type checkers count too."""
    used = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): imports(m) for m in MODULES}
    edges = {
        (group(user.removesuffix(".__init__")), group(name))
        for user, names in used.items()
        for name in names
        if user != "angle_llm.__init__" and name.startswith("angle_llm.")
    }
    pairs = sorted((a, b) for a, b in edges if a < b and (b, a) in edges)
    assert pairs == []


def test_no_import_cycle() -> None:
    """Imports at the top of modules, those for type checkers aside, have no cycle."""
    paths = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): m for m in MODULES}
    names = {name.removesuffix(".__init__"): module for name, module in paths.items()}
    graph: dict[str, set[str]] = {}
    for name, module in names.items():
        found: set[str] = set()
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = (found & set(names)) - {name}
    while leaves := [name for name, found in graph.items() if not found]:
        graph = {name: found - set(leaves) for name, found in graph.items() if name not in leaves}
    assert not graph, f"modules in or behind an import cycle: {sorted(graph)}"


def test_few_modules_know_which_losses_exist() -> None:
    """The step, the trainer and the forecasts ask an `Objective`, not for its class."""
    users = set()
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if names & {"AngleObjective", "NestedObjective", "SumOfTerms"} and unit(module) != "losses":
                users.add(relative(module))
    assert users == {"__init__.py", "train/objectives.py"}


def test_each_fault_changes_one_place_of_the_code() -> None:
    """`python tests/faults.py` tries them, which takes too long for each run of the tests."""
    for fault in FAULTS:
        place(ROOT, fault)
