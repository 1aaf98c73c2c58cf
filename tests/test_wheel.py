"""The wheel: it contains prompts, recipes, configurations and guides, and they work outside a clone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import programs
import pytest
from tiny import save_tiny_base

import angle_llm
from angle_llm import cli
from angle_llm.init import CONTENTS
from angle_llm.prompts import load_prompt
from angle_llm.settings.parsing import SettingsError, bundled_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
(WHEEL,) = (block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "angle-llm init" in block)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, as after installation."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert f"pip install dist/{wheel.name}\n" in WHEEL
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


def run(site: Path, folder: Path, *words: str) -> str:
    """Return the output of a command in a folder, with the package of the wheel and without the clone."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment(site), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(site: Path, folder: Path, *words: str) -> str:
    """Return the output of `accelerate launch`. It starts the program in a new interpreter, with the package of the wheel."""
    done = programs.run("accelerate", "launch", *words, cwd=folder, environment=environment(site))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_prompts_and_recipes_of_the_clone(site: Path, tmp_path: Path) -> None:
    program = (
        "import json, angle_llm.prompts as p; from angle_llm.settings.parsing import bundled_files as files;"
        "print(json.dumps([p.__file__, {n: p.load_prompt(n).template for n in files('prompts')}, [*files('recipes')]]))"
    )
    file, templates, recipes = json.loads(run(site, tmp_path, "-c", program))
    assert Path(file).is_relative_to(site)
    assert templates == {name: load_prompt(name).template for name in bundled_files("prompts")}
    assert recipes == [*bundled_files("recipes")]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_recipe_trains_in_a_folder_of_init(processes: int, site: Path, tmp_path: Path) -> None:
    """The commands of the README, with a tiny model; on two processes with a configuration of accelerate."""
    (name,) = re.findall(r"^angle-llm init (\w+)", WHEEL, re.MULTILINE)
    shown = run(site, tmp_path, "-m", "angle_llm.cli", "init", name)
    assert all(str(Path(name) / entry) in shown for entry in CONTENTS)
    folder = tmp_path / name
    (words,) = re.findall(
        r"^accelerate launch --num_processes 1 --num_cpu_threads_per_process 2 (recipes.*)", WHEEL, re.MULTILINE
    )
    base = save_tiny_base("llama", tmp_path / "base")
    flags = ["--model.path", str(base), "--model.max-length", "100", "--lora.rank", "2", "--data.limit", "8"]
    flags += ["--batch-size", "4", "--max-steps", "1", "--evaluation.tasks"]
    options = ["--num_processes", str(processes)]
    if processes == 2:
        options += ["--config_file", "deepspeed_configs/data_parallel.yaml", "--main_process_port", "0"]
    shown = launch(site, folder, *options, *words.split(), *flags)
    assert f"process 0 of {processes}" in shown
    assert (folder / "runs/starter/model/adapter_model.safetensors").is_file()
    assert not [path for path in folder.rglob("__pycache__") if path.parent.name != "recipes"]


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SettingsError, match=f"{tmp_path} exists and is not an empty folder"):
        cli.run(["init", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_versions_are_equal() -> None:
    assert f'version = "{angle_llm.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {angle_llm.__version__}" in (ROOT / "docs/CHANGELOG.md").read_text()
