"""Memory of the objective beyond the embeddings and their gradient, measured in a separate process. Linux only.

    python tests/losses/workspace.py '{"rows": 65536, "columns": 4096, "anchors": 2048}'

Triples: as many as the rows allow, all of them ranked by cosine and angle; the first `anchors` of them are positive pairs and
so anchors of the contrast, whose time grows with anchors x rows x columns. Prints one line of JSON.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from angle_llm.losses import AngleObjective, blocks

MIB = 2**20


def in_a_process(**options: int) -> dict[str, Any]:
    """The output of this program, on one thread unless the environment sets another number."""
    command = [sys.executable, __file__, json.dumps(options)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=-1, check=True, env=environment).stdout)
    return found


def measure(rows: int, columns: int, anchors: int, block_elements: int = blocks.BLOCK_ELEMENTS) -> dict[str, Any]:
    for elements in (blocks.BLOCK_ELEMENTS, 1):  # loads code, in one block and in many
        with patch.object(blocks, "BLOCK_ELEMENTS", elements):
            run(torch.randn(6, columns), 2)
    embeddings_ND = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kilobytes("VmRSS")
    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements):
        gradient_ND = run(embeddings_ND, anchors)
    used, size = (kilobytes("VmHWM") - before) / 1024, embeddings_ND.nbytes / MIB
    assert gradient_ND.isfinite().all()
    return {"embeddings_MiB": size, "workspace_MiB": round(used - size, 1)}  # the gradient is as large as they are


def run(embeddings_ND: torch.Tensor, anchors: int) -> torch.Tensor:
    triples = len(embeddings_ND) // 3
    score_P = torch.zeros(2 * triples)
    score_P[anchors:triples] = 0.5  # ranked above the negatives, not contrasted
    score_P[:anchors] = 1
    leaf_ND = embeddings_ND.requires_grad_()
    left_P, right_P = torch.arange(triples).repeat(2), torch.arange(triples, 3 * triples)
    loss = AngleObjective(1, 1, 1)(leaf_ND, left_P, right_P, score_P).loss
    return torch.autograd.grad(0.5 * loss, leaf_ND)[0]


def kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
