"""`push` uploads a whole encoder with a correct card, and no local paths or other files."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hub_server import TOKEN, Hub, open_hub
from huggingface_hub import ModelCard, constants
from kills import contents
from tiny import save_tiny_adapter, save_tiny_base, tiny_encoder

from angle_llm import PromptTemplate, SentenceEncoder, cli
from angle_llm.export.card import CardFacts, model_card
from angle_llm.export.formats.onnx_folder import onnx_usage
from angle_llm.export.merge import merge
from angle_llm.export.push import PushError
from angle_llm.model.source.checks import CARD_NAME
from angle_llm.settings.parsing import PASSED

TEXTS = ["A man is eating.", "Where is it?"]

# huggingface_hub 2.4 sends files with an API that httpx2 2.16 deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # plain peft
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = open_hub(tmp_path / "cache", monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def adapter(hub: Hub, tmp_path: Path) -> Path:
    """The model of a run, an adapter on a base from the hub."""
    base = save_tiny_base("llama", tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    hub.put("org/base", base)
    run = tmp_path / "run"
    save_tiny_adapter(Path("org/base"), run / "model")
    settings = {
        "data": {"path": "/home/me/secret/nli.jsonl, /home/me/secret/stsb@train:2.0"},
        "evaluation": {"tasks": ["/home/me/secret/issues@valid"], "corpus": "/home/me/secret/issues"},
        "objective": {"teacher": "~/secret/teacher", "false_negatives": {"guide": "/home/me/secret/guide"}},
        "model": {"prompt": {"query": "/home/me/secret/mine.yaml", "document": "plain"}},
        "learning_rate": 1e-3,
    }
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    first = {"step": 0, "evaluation": 61.5, "evaluation/issues@valid/nDCG@10": 61.5, "evaluation/pairs/spearman": 9}
    lines: list[dict[str, object]] = [first, {"step": 1, "loss": 2.0}, {"step": 8, "evaluation": 70.25}]
    lines.append({"step": 9, "evaluation": 71})  # of a model that was not saved
    (run / "best.json").write_text(json.dumps({"issues@valid/nDCG@10": 70.25}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    hub.requests.clear()
    return run / "model"


def push(*arguments: str | Path) -> None:
    cli.run(["push", *map(str, arguments)])


def head(hub: Hub, repo: str = "user/mine") -> dict[str, bytes]:
    found = hub.repos[repo]
    return found.commits[found.head]


def run_code(card: str) -> np.ndarray:
    """The vectors that the code of a card computes."""
    block = re.search(r"### angle_llm\n\n```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names["rows"]


def test_an_adapter_is_uploaded_and_opened(
    hub: Hub, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / "training_args.bin").write_bytes(b"a pickle")
    (adapter / ".cache").mkdir()
    (adapter / ".cache" / "x.json").write_text("{}")
    before = contents(adapter.parent)
    push(adapter, "user/mine")
    shown = capsys.readouterr()
    assert ".cache/x.json, training_args.bin" in shown.out
    assert TOKEN not in shown.out + shown.err
    assert contents(adapter.parent) == before
    repo, files = hub.repos["user/mine"], head(hub)
    assert repo.private
    assert len(repo.messages) == 2  # the one of the hub, and ours: everything in one commit
    assert set(files) == {".gitattributes", "README.md", "angle_llm.json", "adapter_config.json", "adapter_model.safetensors",
        "modules.json", "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert not any(
        str(tmp_path).encode() in content or b"/home/me" in content or b"secret" in content
        for content in files.values()
    )
    base = json.loads(files["adapter_config.json"])
    assert (base["base_model_name_or_path"], base["revision"]) == ("org/base", hub.repos["org/base"].head)
    rows = SentenceEncoder.from_pretrained("user/mine", device="cpu").encode(TEXTS)
    assert np.array_equal(rows, SentenceEncoder.from_pretrained(adapter, device="cpu").encode(TEXTS))

    card = files["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["base_model"], front["license"], front["library_name"]) == ("org/base", "apache-2.0", "angle_llm")
    assert 'Summarize sentence "{text}" in one word:"' in card
    assert "| issues@valid during training, of the saved model | nDCG@10 | 70.25 |" in card
    assert "path: nli.jsonl,stsb@train:2.0" in card
    np.testing.assert_allclose(run_code(card)[0], rows[0], atol=1e-5)


def test_a_merged_model_replaces_the_files_of_an_adapter(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    push(adapter, "user/mine")
    merge(adapter, tmp_path / "merged", device="cpu")
    texts = {"STS12": {"variant": "senteval", "spearman": 64.5}, "STS-B": {"variant": "raw", "spearman": 70.0}}
    results = {"variant": "senteval + raw", "tasks": texts}  # as on the hub
    (tmp_path / "sts.json").write_text(json.dumps(results))
    push(tmp_path / "merged", "user/mine", "--run", adapter.parent, "--results", tmp_path / "sts.json", "--public")
    files = head(hub)
    assert {"model.safetensors", "config.json", "merge.json"} <= set(files)
    assert not {"adapter_config.json", "adapter_model.safetensors", "verification.json"} & set(files)
    card = files["README.md"].decode()
    assert "base_model: org/base" in card
    assert "| STS12 (senteval) | spearman | 64.50 |" in card
    assert "| STS-B (raw) | spearman | 70.00 |" in card
    rows = SentenceEncoder.from_pretrained("user/mine", device="cpu").encode(TEXTS)
    np.testing.assert_allclose(run_code(card)[0], rows[0], atol=1e-5)


def test_an_unverified_model_is_refused(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "merged", check=False)
    with pytest.raises(ValueError, match="--no-verify"):
        push(tmp_path / "merged", "user/mine")
    assert "user/mine" not in hub.repos
    merge(adapter, tmp_path / "verified", device="cpu")
    push(tmp_path / "verified", "user/mine", "--public")
    assert not hub.repos["user/mine"].private


def test_a_dry_run_uses_no_network(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    push(adapter, "user/mine", "--dry-run")
    shown = capsys.readouterr().out
    assert "adapter_model.safetensors\n" in shown
    assert hub.requests == []


def test_settings_of_the_run_can_be_empty(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (adapter.parent / "settings.yaml").write_text("")
    push(adapter, "user/mine", "--dry-run")
    assert "adapter_model.safetensors\n" in capsys.readouterr().out


def test_settings_of_another_program_are_not_published(
    hub: Hub, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(adapter, tmp_path / "project/encoder")
    (tmp_path / "project/settings.yaml").write_text("api_key: sk-123\n")
    push(tmp_path / "project/encoder", "user/mine", "--dry-run")
    shown = capsys.readouterr().out
    assert "adapter_model.safetensors\n" in shown
    assert "sk-123" not in shown


def test_the_license_of_a_base_without_a_user_name_is_in_the_card(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    hub.put("gpt2", {"README.md": b"---\nlicense: mit\n---\n"})
    card = json.loads((adapter / CARD_NAME).read_text())
    (adapter / CARD_NAME).write_text(json.dumps(card | {"base": "gpt2", "base_revision": None}))
    push(adapter, "user/mine")
    front = yaml.safe_load(head(hub)["README.md"].decode().split("---\n")[1])
    assert (front["base_model"], front["license"]) == ("gpt2", "mit")


def test_a_base_in_a_local_folder_is_no_hub_id(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name alone is in the card. The score of a run is not the score of `interrupted`."""
    whole = adapter.parent / "interrupted"
    tiny_encoder("bert").save_pretrained(whole)
    settings = yaml.safe_load((adapter.parent / "settings.yaml").read_text())
    settings["model"]["path"] = "/home/me/models/gpt2"
    (adapter.parent / "settings.yaml").write_text(yaml.safe_dump(settings))
    push(whole, "user/mine", "--dry-run")
    shown = capsys.readouterr().out
    assert "made from `gpt2`" in shown
    assert "base_model" not in shown
    assert "70.25" not in shown


def test_a_loss_passed_in_python_is_in_the_card(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = adapter.parent / "settings.yaml"
    settings.write_text(f"{PASSED}loss mine\n{settings.read_text()}")
    push(adapter, "user/mine", "--dry-run")
    assert "passed_in_python: loss mine" in capsys.readouterr().out


def test_a_value_of_an_own_function_is_no_score(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It can have another scale."""
    settings = yaml.safe_load((adapter.parent / "settings.yaml").read_text())
    settings["evaluation"] = {"tasks": ["function:accuracy"]}
    (adapter.parent / "settings.yaml").write_text(yaml.safe_dump(settings))
    (adapter.parent / "best.json").write_text(json.dumps({"accuracy/score": 0.83}))
    push(adapter, "user/mine", "--dry-run")
    assert "0.83" not in capsys.readouterr().out


def test_a_repository_of_another_kind_is_not_changed(hub: Hub, adapter: Path) -> None:
    hub.put("user/mine", {"thesis.pdf": b"x", "README.md": b"x"})
    with pytest.raises(PushError, match=r"user/mine contains other files \(thesis\.pdf …\)"):
        push(adapter, "user/mine")
    assert head(hub) == {"thesis.pdf": b"x", "README.md": b"x"}


def test_other_files_of_the_repository_are_kept(hub: Hub, adapter: Path) -> None:
    theirs = dict.fromkeys(("LICENSE", "model.Q4.gguf", "results/model-1.safetensors", "results/scores.json"), b"x")
    ours = dict.fromkeys(("angle_llm.json", "model-00001-of-00002.safetensors", "1_Pooling/config.json"), b"{}")
    hub.put("user/mine", theirs | ours)
    push(adapter, "user/mine")
    files = head(hub)
    assert theirs.items() <= files.items()
    assert not {"model-00001-of-00002.safetensors", "1_Pooling/config.json"} & files.keys()


def test_errors_of_the_hub_change_no_file(hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(adapter)

    def message(repo: str = "user/mine") -> str:
        with pytest.raises(PushError) as refused:
            push(adapter, repo)
        assert TOKEN not in str(refused.value)
        return str(refused.value)

    monkeypatch.delenv("HF_TOKEN")
    assert "no token found" in message()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "401" in message()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "403" in message("org/mine")
    hub.refuse_commits = True
    assert "413" in message()
    assert set(head(hub)) == {".gitattributes"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in message()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server
    assert "Connection refused" in message()
    assert contents(adapter) == before


def test_encoders_that_others_cannot_use_are_refused(tmp_path: Path) -> None:
    save_tiny_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "adapter")
    tiny_encoder("bert").save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "vocab.txt").symlink_to("/etc/hostname")
    save_tiny_adapter(tmp_path / "base", tmp_path / "relative")
    card = json.loads((tmp_path / "relative" / CARD_NAME).read_text())
    (tmp_path / "relative" / CARD_NAME).write_text(json.dumps(card | {"base": "../models/base"}))  # not from here
    for folder, message in (
        ("adapter", "angle-llm merge"),
        ("relative", r"\.\./models/base, a path on this machine"),
        ("whole", r"vocab\.txt"),
        ("base", "base"),
    ):
        with pytest.raises(ValueError, match=message):
            push(tmp_path / folder, "user/mine")


def test_paths_are_removed_and_texts_that_look_like_paths_are_kept(hub: Hub, tmp_path: Path) -> None:
    template = "/no_think Sum up and/or name: {text}"
    tiny_encoder("bert", prompt=PromptTemplate("~mine", template)).save_pretrained(tmp_path / "whole")
    config = tmp_path / "whole" / "tokenizer_config.json"
    extra = {"name_or_path": "/home/me/base", "extra_special_tokens": ["/", "~~"], "cls_token": "[CLS]"}
    config.write_text(json.dumps(json.loads(config.read_text()) | extra))
    config = tmp_path / "whole" / "config.json"
    extra = {"_name_or_path": "/home/me/base", "time_step_limit": [0.0, math.inf]}  # as Mamba2 has
    config.write_text(json.dumps(json.loads(config.read_text()) | extra))
    push(tmp_path / "whole", "user/mine")
    model = json.loads(head(hub)["config.json"])
    assert (model["_name_or_path"], model["time_step_limit"]) == ("base", [0.0, math.inf])
    prompt = json.loads(head(hub)["angle_llm.json"])["prompt"]
    assert (prompt["name"], prompt["template"]) == ("~mine", template)
    tokenizer = json.loads(head(hub)["tokenizer_config.json"])
    assert (tokenizer["name_or_path"], tokenizer["extra_special_tokens"]) == ("base", ["/", "~~"])


@pytest.mark.parametrize(
    "form", [pytest.param("onnx", marks=pytest.mark.needs("onnx", "onnxruntime", "onnxscript")), "gguf"]
)
def test_exported_files_are_uploaded_and_the_card_shows_their_use(form: str, hub: Hub, tmp_path: Path) -> None:
    tiny_encoder("llama").save_pretrained(tmp_path / "whole")
    cli.run(["export", str(tmp_path / "whole"), str(tmp_path / "out"), "--to", form, "--no-verify"])
    (tmp_path / "out" / "old.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="--no-verify"):
        push(tmp_path / "out", "user/mine")
    (tmp_path / "out" / "verification.json").write_text('{"holds": true}')
    theirs = {"angle_llm.json": b"{}", "model.safetensors": b"{}"}  # an earlier push of another form
    hub.put("user/mine", theirs)
    for _ in range(2):
        push(tmp_path / "out", "user/mine")
    files = head(hub)
    weights, code = {
        "onnx": ("onnx/model.onnx", "onnxruntime.InferenceSession("),
        "gguf": ("encoder.gguf", "llama-server -m encoder.gguf --embedding"),
    }[form]
    assert files[weights] == (tmp_path / "out" / weights).read_bytes()
    assert not {*theirs, "old.safetensors"} & files.keys()
    assert not any(str(Path(__file__).parents[2]).encode() in content for content in files.values())
    assert code in files["README.md"].decode()


def test_the_hub_reads_the_scores_of_the_card(
    hub: Hub, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"beir/scifact": {"metrics": {"nDCG@10": {"value": 61.25}}}}
    (tmp_path / "retrieval.json").write_text(json.dumps({"tasks": tasks}))
    push(adapter, "user/mine", "--results", tmp_path / "retrieval.json", "--dry-run")
    card = capsys.readouterr().out
    (found,) = ModelCard(card[card.index("---\n") :]).data.eval_results
    assert (found.task_type, found.dataset_name, found.metric_type) == ("text-retrieval", "beir/scifact", "nDCG@10")
    assert (found.metric_value, found.metric_name) == (61.25, "nDCG@10 x 100")


def test_the_card_of_a_model_with_all_weights_trained(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama")
    for dimensions, line in ((None, "`hf download user/mine"), (8, "does not support a number of dimensions")):
        encoder.truncated(dimensions=dimensions).save_pretrained(tmp_path / "whole")
        card = model_card(CardFacts.read(tmp_path / "whole"), "user/mine", scores=[("news", "accuracy", 90)])
        assert line in card
        assert "The model as it was trained." in card
        assert ModelCard(card).data.eval_results[0].task_type == "text-classification"


def test_the_code_for_onnx_shows_an_empty_prompt_of_documents(tmp_path: Path) -> None:
    prompts = {"query": "Question: ", "document": ""}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    assert f"head = 'Question: '  # of 'query', 'document': {prompts}" in onnx_usage(tmp_path)


def test_a_combination_in_the_run_directory_does_not_have_its_score(
    hub: Hub, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_adapter(tmp_path / "base", tmp_path / "other")
    save_tiny_adapter(tmp_path / "base", tmp_path / "third")
    for name, inputs in (("averaged", [tmp_path / "other", tmp_path / "third"]), ("merged", [tmp_path / "other"])):
        cli.run(["merge", *map(str, inputs), str(adapter.parent / name)])
        push(adapter.parent / name, "user/mine", "--dry-run")
        assert ("70.25" in capsys.readouterr().out) is (name == "merged")


@pytest.mark.needs("gguf")
def test_a_gguf_file_of_an_adapter_has_its_base(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    cli.run(["export", str(adapter), str(tmp_path / "out"), "--to", "gguf", "--no-verify"])
    assert CardFacts.read(tmp_path / "out").base == "org/base"
