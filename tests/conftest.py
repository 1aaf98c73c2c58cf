"""What several rooms' tests share."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def data_dir() -> Path:
    """The folder with the real data sets, named by the environment variable ANGLE_LLM_DATA; without it, a skip."""
    folder = os.environ.get("ANGLE_LLM_DATA")
    if not folder:
        pytest.skip("real data: set ANGLE_LLM_DATA to the folder that holds nli/, stsb/, sts/ …")
    return Path(folder)
