"""An encoder leaves for the hub when it is asked to, whole, with a card that is true, and without what is not to leave."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hub_server import TOKEN, Hub, open_hub
from huggingface_hub import constants
from tiny import save_tiny_base, tiny_encoder, train_a_little

from angle_llm import PromptTemplate, SentenceEncoder, cli
from angle_llm.config import LoraSettings
from angle_llm.export.merge import merge

TEXTS = ["A man is eating.", "Where is it?"]

# huggingface_hub 2.4 sends files by a way that httpx2 2.16 has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # plain peft
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return open_hub(tmp_path / "cache", monkeypatch)


@pytest.fixture
def logged_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def adapter(hub: Hub, tmp_path: Path) -> Path:
    """A run's model, an adapter on a base that the hub has."""
    base = save_tiny_base("llama", tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    hub.put("org/base", base)
    encoder = SentenceEncoder.from_pretrained("org/base", device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    run = tmp_path / "run"
    encoder.save_pretrained(run / "model")
    settings = {"data": {"path": "/home/me/secret/nli.jsonl"}, "learning_rate": 1e-3}
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    lines = [{"step": 0, "evaluation": 61.5}, {"step": 1, "loss": 2.0}, {"step": 8, "evaluation": 70.25}]
    lines.append({"step": 9, "evaluation": 70})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    hub.asked.clear()
    return run / "model"


def push(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["angle-llm", "push", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def everything_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def head(hub: Hub, repo: str = "user/mine") -> dict[str, bytes]:
    found = hub.repos[repo]
    return found.commits[found.head]


def run_code(card: str, library: str, repo: str, place: Path | str) -> dict[str, Any]:
    """What the card's code for a library leaves, run as it stands but for the repository's name."""
    block = re.search(rf"### {library}\n\n```python\n(.*?)```", card, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1].replace(repr(repo), repr(str(place))), names)
    return names


@pytest.mark.usefixtures("logged_in")
def test_an_adapter_goes_as_it_is_and_comes_back(
    hub: Hub, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / "training_args.bin").write_bytes(b"a pickle")
    (adapter / ".cache").mkdir()
    (adapter / ".cache" / "x.json").write_text("{}")
    before = everything_below(adapter.parent)
    assert push(monkeypatch, adapter, "user/mine") == 0
    shown = capsys.readouterr()
    assert ".cache/x.json, training_args.bin" in shown.out
    assert TOKEN not in shown.out + shown.err
    assert everything_below(adapter.parent) == before
    repo, files = hub.repos["user/mine"], head(hub)
    assert repo.private
    assert len(repo.messages) == 2  # the hub's own, and ours: everything in one commit
    assert set(files) == {".gitattributes", "README.md", "angle_llm.json", "adapter_config.json", "adapter_model.safetensors",
        "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert not any(
        str(adapter.parent.parent).encode() in content or b"/home/me" in content for content in files.values()
    )
    base = json.loads(files["adapter_config.json"])
    assert (base["base_model_name_or_path"], base["revision"]) == ("org/base", hub.repos["org/base"].head)
    rows = SentenceEncoder.from_pretrained("user/mine", device="cpu").encode(TEXTS)
    assert np.array_equal(rows, SentenceEncoder.from_pretrained(adapter, device="cpu").encode(TEXTS))

    card = files["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["base_model"], front["license"], front["library_name"]) == ("org/base", "apache-2.0", "angle_llm")
    assert 'Summarize sentence "{text}" in one word:"' in card
    assert "| evaluation during training, of the saved model | 70.25 |" in card
    assert "path: nli.jsonl" in card
    ours = run_code(card, "angle_llm", "user/mine", "user/mine")["rows"]
    (tmp_path / "fetched").mkdir()
    for name, content in files.items():
        (tmp_path / "fetched" / name).write_bytes(content)
    # From a folder: peft keeps the hub's address from before this test.
    theirs = run_code(card, "transformers", "user/mine", tmp_path / "fetched")["encode"]("A man is eating.").numpy()
    # Both compute in float32; the trie adds in another order.
    assert np.abs(ours[0] - theirs).max() < 1e-5 * np.abs(ours[0]).max()


@pytest.mark.usefixtures("logged_in")
def test_a_merged_model_replaces_an_adapter_file_by_file(
    hub: Hub, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push(monkeypatch, adapter, "user/mine") == 0
    merge(adapter, tmp_path / "merged", device="cpu")
    assert push(monkeypatch, tmp_path / "merged", "user/mine", "--run", adapter.parent, "--public") == 0
    files = head(hub)
    assert {"model.safetensors", "config.json", "merge.json"} <= set(files)
    assert not {"adapter_config.json", "adapter_model.safetensors", "verification.json"} & set(files)
    card = files["README.md"].decode()
    assert "on 46 texts: the same encoder. 1 − cosine is at most" in card
    assert "base_model: org/base" in card
    rows = SentenceEncoder.from_pretrained("user/mine", device="cpu").encode(TEXTS)
    theirs = run_code(card, "transformers", "user/mine", "user/mine")["encode"](TEXTS[0]).numpy()
    assert np.abs(rows[0] - theirs).max() < 1e-5 * np.abs(rows[0]).max()


@pytest.mark.usefixtures("logged_in")
def test_what_was_not_verified_stays_unless_it_is_asked_for(
    hub: Hub, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    merge(adapter, tmp_path / "merged", check=False)
    assert push(monkeypatch, tmp_path / "merged", "user/mine") == 2
    assert "--unverified" in capsys.readouterr().err
    assert "user/mine" not in hub.repos
    assert push(monkeypatch, tmp_path / "merged", "user/mine", "--unverified", "--public") == 0
    assert not hub.repos["user/mine"].private
    assert "Not compared with its origin." in head(hub)["README.md"].decode()


def test_a_dry_run_shows_what_would_go_and_asks_nobody(
    hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(monkeypatch, adapter, "user/mine", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "adapter_model.safetensors\n" in shown
    assert "**To be filled in.** The license" in shown
    assert hub.asked == []


@pytest.mark.usefixtures("logged_in")
def test_what_somebody_else_put_there_is_left_alone(
    hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.put("user/mine", {"thesis.pdf": b"x", "README.md": b"x"})
    assert push(monkeypatch, adapter, "user/mine") == 2
    assert "user/mine holds other files (thesis.pdf …)" in capsys.readouterr().err
    assert head(hub) == {"thesis.pdf": b"x", "README.md": b"x"}


def test_what_the_hub_refuses_is_told_and_changes_nothing(
    hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_below(adapter)

    def message(*arguments: str) -> str:
        assert push(monkeypatch, adapter, *(arguments or ("user/mine",))) == 2
        shown = capsys.readouterr()
        assert TOKEN not in shown.out + shown.err
        return shown.err

    assert "set HF_TOKEN" in message()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "log in (`hf auth login`), or set HF_TOKEN" in message()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "no write access" in message("org/mine")
    hub.refuse_commits = True
    assert "user/mine was not uploaded: " in message()
    assert set(head(hub)) == {".gitattributes"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in message()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert "Try again when the hub is reachable. No local file was changed." in message()
    assert everything_below(adapter) == before


def test_what_nobody_else_could_use_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("llama", tmp_path / "base"), device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    encoder.save_pretrained(tmp_path / "adapter")
    tiny_encoder("bert").save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "vocab.txt").symlink_to("/etc/hostname")
    for folder, repo, message in (
        ("adapter", "user/mine", "angle-llm merge"),
        ("whole", "user/mine", "is a link out of its folder"),
        ("base", "user/mine", "is neither a saved encoder"),
        ("base", "mine", "USER/NAME"),
    ):
        assert push(monkeypatch, tmp_path / folder, repo) == 2
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("logged_in")
def test_words_that_look_like_paths_stay_and_paths_go(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "/no_think Sum up and/or name: {text}"
    tiny_encoder("bert", prompt=PromptTemplate("~mine", template)).save_pretrained(tmp_path / "whole")
    config = tmp_path / "whole" / "tokenizer_config.json"
    extra = {"name_or_path": "/home/me/base", "extra_special_tokens": ["/", "~~"], "cls_token": "[CLS]"}
    config.write_text(json.dumps(json.loads(config.read_text()) | extra))
    assert push(monkeypatch, tmp_path / "whole", "user/mine") == 0
    prompt = json.loads(head(hub)["angle_llm.json"])["prompt"]
    assert (prompt["name"], prompt["template"]) == ("~mine", template)
    tokenizer = json.loads(head(hub)["tokenizer_config.json"])
    assert (tokenizer["name_or_path"], tokenizer["extra_special_tokens"]) == ("base", ["/", "~~"])


@pytest.mark.usefixtures("logged_in")
def test_what_no_push_wrote_stays_beside_the_encoder(
    hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = dict.fromkeys(("LICENSE", "model.Q4.gguf", "results/model-1.safetensors", "results/scores.json"), b"x")
    ours = dict.fromkeys(("angle_llm.json", "model-00001-of-00002.safetensors", "1_Pooling/config.json"), b"{}")
    hub.put("user/mine", theirs | ours)
    assert push(monkeypatch, adapter, "user/mine") == 0
    files = head(hub)
    assert theirs.items() <= files.items()
    assert not {"model-00001-of-00002.safetensors", "1_Pooling/config.json"} & files.keys()
    assert push(monkeypatch, adapter, "user/mine", "--dry-run") == 0
    assert "model-*.safetensors" in capsys.readouterr().out


@pytest.mark.usefixtures("logged_in")
def test_a_local_base_is_no_base_model_of_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("llama", tmp_path / "my-llama"), device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", check=False)
    assert push(monkeypatch, tmp_path / "merged", "user/mine", "--unverified") == 0
    card = head(hub)["README.md"].decode()
    assert "base_model" not in yaml.safe_load(card.split("---\n")[1])
    assert "made from `my-llama`" in card
    assert not any(str(tmp_path).encode() in content for content in head(hub).values())
