"""`angle-llm init`: write the files that are installed with the package into a folder, to use and to change them."""

from __future__ import annotations

import shutil
from pathlib import Path

from angle_llm.io import write_folder
from angle_llm.settings.commands import InitSettings
from angle_llm.settings.parsing import bundled, check_new_folder

CONTENTS = {
    "README.md": "install, train, evaluate, export: one screen each",
    "docs": "guides, and what was measured",
    "recipes": "programs and settings of trainings",
    "deepspeed_configs": "configurations of accelerate for several GPUs",
    "prompts": "prompt templates",
    "eval": "evaluation and measuring programs",
}
"""Names of the files and folders that `angle-llm init` writes, and what they contain."""


def init_main(settings: InitSettings) -> None:
    """Write the bundled files into a folder and print its contents."""
    folder = Path(settings.folder).expanduser()
    check_new_folder("FOLDER", folder)

    def fill(temporary: Path) -> None:
        for name in CONTENTS:
            source = bundled(name)
            if source.is_dir():
                shutil.copytree(source, temporary / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, temporary / name)

    write_folder(folder, fill)
    print("\n".join(f"{folder / name}: {content}" for name, content in CONTENTS.items()))
