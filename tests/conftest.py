"""What several rooms' tests share."""

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

# Read when transformers and its kin are first imported, so set before any test module is.
os.environ["OMP_NUM_THREADS"] = "1"  # tests run beside each other: several threads each would cost tenfold
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["ANGLE_LLM_CACHE"] = tempfile.mkdtemp(prefix="angle-llm-cache-")  # no test writes into the user's cache


LONGEST = (
    "test_distributed.py",
    "test_resume.py",
    "test_readme.py",
    "test_process_loss.py",
    "test_cli.py",
)
"""Files that take a minute and more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: at the end they would keep one worker busy while the others have nothing left to do."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same whichever came before it in its worker, its fixtures too."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def data_dir() -> Path:
    """The folder with the real data sets, named by the environment variable ANGLE_LLM_DATA; without it, a skip."""
    folder = os.environ.get("ANGLE_LLM_DATA")
    if not folder:
        pytest.skip("real data: set ANGLE_LLM_DATA to the folder that holds nli/, stsb/, sts/ …")
    return Path(folder)
