"""The commands and the program of docs/serving.md run, on a tiny encoder."""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from serve_ray import RayServeSettings
from tiny import save_tiny_adapter, save_tiny_base

from angle_llm import SentenceEncoder, cli
from angle_llm.settings.parsing import parse_settings
from angle_llm.settings.serve import ServeSettings

for name in ("fastapi", "prometheus_client", "uvicorn"):
    pytest.importorskip(name)
pytest.importorskip("openai")
GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"


def test_the_guide_of_serving_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "runs/nli/model", max_length=100)
    encoder = SentenceEncoder.from_pretrained("runs/nli/model", device="cpu")
    app = importlib.import_module("angle_llm.serve.app").make_app(encoder, ServeSettings(model="runs/nli/model"))
    answers, codes, served_with = [], [], []
    with importlib.import_module("served").served(app) as url:
        for kind, block in BLOCKS:
            if kind == "python":
                exec(compile(block.replace(ADDRESS, url), "docs/serving.md", "exec"), {})
                assert capsys.readouterr().out == "2\n"
                continue
            for line in block.splitlines():
                words = [word for word in shlex.split(line.replace(ADDRESS, url)) if "TOKEN=" not in word]
                if words[0] == "curl":
                    answers.append(json.loads(subprocess.run(words, capture_output=True, check=True).stdout))
                elif words[0] == "python":  # run by tests/recipes/test_serve_ray.py
                    served_with.append(parse_settings(RayServeSettings, words[2:]))
                elif words[1] == "serve":
                    served_with.append(parse_settings(ServeSettings, words[2:]))
                else:
                    with pytest.raises(SystemExit) as ended:
                        cli.run(words[1:])
                    codes.append(ended.value.code)
    openai, tei, health = answers
    assert (len(openai["data"]), len(tei), health["status"]) == (2, 1, "ok")
    assert codes == [0]
    assert [each.host for each in served_with] == ["127.0.0.1", "0.0.0.0", "127.0.0.1"]


def test_limits_are_those_of_the_guide() -> None:
    stated = re.findall(r"`--(max-\w+)`, ([\d,]+)( MiB)?\)", GUIDE)
    limits = {
        name.replace("-", "_"): int(number.replace(",", "")) * (2**20 if unit else 1) for name, number, unit in stated
    }
    assert len(limits) == 4
    assert limits.items() <= vars(ServeSettings(model="m")).items()
