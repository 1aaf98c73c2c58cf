"""Tests of what a user sees: commands, files, exit codes, and the public names in `angle_llm.__all__`.

They import no internal module and assert no whole sentence, so that the same files run against any checkout:

    ANGLE_LLM_TREE=/path/to/checkout PYTHONPATH=/path/to/checkout python -m pytest -n 0 tests/contract

`ANGLE_LLM_TREE` is the checkout whose `recipes/` and `eval/` are run (default: the one that holds this file); PYTHONPATH
decides which `angle_llm` is imported, here and in the commands. With the variable set, both must be the same checkout.
"""

import os
from pathlib import Path

import pytest
from commands import TREE, Files, command, training
from tiny_folders import sentences, triples, write_model, write_pairs, write_rows


def pytest_configure() -> None:
    """Refuses to test one checkout's package with another one's recipes."""
    if "ANGLE_LLM_TREE" in os.environ:
        import angle_llm

        package = Path(angle_llm.__file__).resolve()
        if not package.is_relative_to(TREE):
            raise pytest.UsageError(f"ANGLE_LLM_TREE is {TREE}, but angle_llm is imported from {package.parent}.")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("contract")
    texts = sentences(30, seed=5)
    pairs = [(texts[n], texts[(n * 7 + 1) % 30], float(n % 6)) for n in range(30)]
    return Files(
        folder,
        *(str(write_model(kind, folder / kind)) for kind in ("llama", "mistral", "bert")),
        triples=str(write_rows(folder / "triples.jsonl", triples(24))),
        pairs=str(write_pairs(folder / "pairs.tsv", pairs)),
    )


@pytest.fixture(scope="session")
def run_dir(files: Files) -> Path:
    """A finished run of `angle-llm train`: 12 steps on a tiny LLaMA, evaluated before and after."""
    run = files.folder / "run"
    command("angle-llm", "train", *training(files, run), "--evaluation.tasks", files.pairs, "--epochs", "2")
    return run


@pytest.fixture(scope="session")
def model(run_dir: Path) -> str:
    """The saved adapter of that run."""
    return str(run_dir / "model")


@pytest.fixture(scope="session")
def merged(model: str, files: Files) -> str:
    """The same as `angle-llm merge` writes it."""
    folder = files.folder / "merged"
    command("angle-llm", "merge", model, folder)
    return str(folder)
