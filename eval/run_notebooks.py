"""Execute notebooks, and store their outputs in them without progress bars.

    python eval/run_notebooks.py docs/notebooks/*.ipynb

A notebook runs in a new temporary folder. Tables, figures and printed lines are stored; stderr and widgets are not.
Needs nbclient and ipykernel (the extra `notebook`), matplotlib, pandas, and the models that the notebooks name.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

WIDGET = "application/vnd.jupyter.widget-view+json"


def stored(outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a cell to store: printed lines as one output, and results without widgets."""
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    results = [output for output in outputs if output.output_type != "stream" and WIDGET not in output.data]
    lines = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed.strip() else []  # type: ignore[no-untyped-call]
    return [*lines, *results]


def main(paths: list[str]) -> None:
    for path in paths:
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times
            if cell.cell_type == "code":
                cell.outputs = stored(cell.outputs)
        notebook.metadata.language_info = {"name": "python"}
        notebook.metadata.pop("widgets", None)
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
        print(f"{path}: {Path(path).stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
