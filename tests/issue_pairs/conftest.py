"""A server in the place of GitHub, and the verb run on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_github import FakeGitHub, Rows, read_pairs

from angle_llm.issue_pairs.command import issues_main
from angle_llm.issue_pairs.settings import IssueSettings


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)


@pytest.fixture
def github() -> Iterator[FakeGitHub]:
    with FakeGitHub() as server:
        yield server


@pytest.fixture
def build(github: FakeGitHub, tmp_path: Path) -> Callable[..., Rows]:
    """Runs the verb into `tmp_path / "out"`; gives the rows of each split."""

    def run(*repos: str, out: str = "out", **named: Any) -> Rows:
        issues_main(IssueSettings(repos=repos, out=tmp_path / out, api=github.url, **named))
        return read_pairs(tmp_path / out)

    return run
