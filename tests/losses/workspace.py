"""Memory of the objective beyond the embeddings and their gradient, measured in a separate process.

    python tests/losses/workspace.py --rows 65536 --columns 4096 --anchors 2048 --form symmetric

Triples: as many as the rows allow, all of them ranked by cosine and angle; the first ``--anchors`` of them are positive
pairs and so anchors of the contrast, whose time grows with anchors x rows x columns. Prints one line of JSON. Linux only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from angle_llm.losses import AngleObjective, blocks

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def in_a_process(**options: Any) -> dict[str, Any]:
    """The output of this command, on one thread unless the environment sets another number."""
    arguments = [str(part) for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(rows: int, columns: int, anchors: int, form: str, angle: str) -> dict[str, Any]:
    for elements in (blocks.BLOCK_ELEMENTS, 1):  # loads code, in one block and in many
        with patch.object(blocks, "BLOCK_ELEMENTS", elements):
            run(6, columns, 2, form, angle)
    embeddings_ND = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    CLEAR.write_text("5")  # resets the peak
    before, start = kilobytes("VmRSS"), time.perf_counter()
    loss, gradient_ND = run(rows, columns, anchors, form, angle, embeddings_ND)
    seconds, peak = time.perf_counter() - start, kilobytes("VmHWM")
    assert gradient_ND.isfinite().all()
    embeddings_MiB = embeddings_ND.nbytes / MIB
    return {
        "loss": round(loss, 4),
        "seconds": round(seconds, 1),
        "embeddings_MiB": embeddings_MiB,
        "workspace_MiB": round((peak - before) / 1024 - embeddings_MiB, 1),  # the gradient is as large as they are
    }


def run(
    rows: int, columns: int, anchors: int, form: str, angle: str, embeddings_ND: torch.Tensor | None = None
) -> tuple[float, torch.Tensor]:
    triples = rows // 3
    left_P = torch.arange(triples).repeat(2)
    right_P = torch.arange(triples, 3 * triples)
    score_P = torch.zeros(2 * triples)
    score_P[anchors:triples] = 0.5  # ranked above the negatives, not contrasted
    score_P[:anchors] = 1
    if embeddings_ND is None:
        embeddings_ND = torch.randn(rows, columns)
    leaf_ND = embeddings_ND.requires_grad_()
    objective = AngleObjective(1, 1, 1, angle_form=angle, contrastive_form=form)
    loss = objective(leaf_ND, left_P, right_P, score_P).loss
    (gradient_ND,) = torch.autograd.grad(0.5 * loss, leaf_ND)
    return loss.item(), gradient_ND


def kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rows", "columns", "anchors"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--form", default="symmetric")
    parser.add_argument("--angle", default="phase")
    parser.add_argument("--block-elements", type=int, default=blocks.BLOCK_ELEMENTS)
    options = vars(parser.parse_args())
    blocks.BLOCK_ELEMENTS = options.pop("block_elements")
    print(json.dumps(measure(**options)))
