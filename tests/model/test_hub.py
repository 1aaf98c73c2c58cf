"""Encoders on the hub load by name, and only the needed files are downloaded."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hub_server import Hub, open_hub
from huggingface_hub import constants
from tiny import save_tiny_base, tiny_encoder, train_a_little

from angle_llm import SentenceEncoder
from angle_llm.model.source.backbone import BackboneLocation, load_tokenizer
from angle_llm.model.source.checks import CARD_NAME, ArtifactError
from angle_llm.model.source.hub import ADAPTER_FILES
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", "Where is it?"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return open_hub(tmp_path / "cache", monkeypatch)


def load(name: str | Path, **options: object) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(name, device="cpu", **options)  # type: ignore[arg-type]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_full_encoder_loads_as_it_was_saved(hub: Hub, tmp_path: Path) -> None:
    encoder = tiny_encoder("llama", prompt=None, pooling="mean", max_length=77)
    encoder.save_pretrained(tmp_path / "model")
    extra = dict.fromkeys(("pytorch_model.bin", "README.md", "training_args.bin", "evil.py", "onnx/model.onnx"), b"x")
    extra["merge.json"] = b"{}"
    commit = hub.put("user/whole", files_of(tmp_path / "model") | extra)
    again = load("user/whole")
    assert (again.pooling, again.max_length, again.base, again.base_revision) == ("mean", 77, "user/whole", commit)
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert hub.fetched() == {
        CARD_NAME, "config.json", "merge.json", "model.safetensors", "modules.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


def test_an_adapter_loads_its_base_at_the_revision_of_training(hub: Hub, tmp_path: Path) -> None:
    commit = hub.put("org/base", save_tiny_base("llama", tmp_path / "base"))
    encoder = load("org/base")
    assert (encoder.base, encoder.base_revision) == ("org/base", commit)
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "adapter")
    first = hub.put("user/adapter", tmp_path / "adapter")
    hub.put("org/base", save_tiny_base("llama", tmp_path / "other", seed=1))  # a later revision of the base
    hub.put("user/adapter", {"README.md": b"taken back"})  # and of the adapter
    again = load("user/adapter", revision=first)
    assert load(f"user/adapter@{first}").base_revision == again.base_revision
    with pytest.raises(ValueError, match="expected one revision"):
        load(f"user/adapter@{first}", revision="main")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert (again.base, again.base_revision) == ("org/base", commit)


def test_cached_encoders_load_without_the_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_encoder("bert")
    encoder.save_pretrained(tmp_path / "model")
    hub.put("user/whole", tmp_path / "model")
    hub.put("org/base", save_tiny_base("llama", tmp_path / "base"))
    rows, bare = load("user/whole").encode(TEXTS), load("org/base").encode(TEXTS)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert np.array_equal(load("user/whole").encode(TEXTS), rows)
    assert np.array_equal(load("org/base").encode(TEXTS), bare)
    assert hub.requests == []


def test_a_bare_backbone_needs_its_own_files_only(hub: Hub, tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    hub.put("org/base", files_of(base) | {"pytorch_model.bin": b"x", "evil.py": b"x", "README.md": b"x"})
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    hub.put("org/chat", base)
    chat = {"prompt": "chat_template"}
    assert np.array_equal(load("org/chat", **chat).encode(TEXTS), load(base, **chat).encode(TEXTS))
    hub.requests.clear()
    assert np.array_equal(load("org/base").encode(TEXTS), load(base).encode(TEXTS))
    assert hub.fetched() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    loads = [line for line in hub.requests if line.startswith("GET") and "model.safetensors" in line]
    assert len(loads) == 1


def test_pickles_alone_are_refused(hub: Hub, tmp_path: Path) -> None:
    files = files_of(save_tiny_base("llama", tmp_path / "base"))
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    hub.put("org/old", files)
    with pytest.raises(ArtifactError, match=r"org/old cannot be opened.*safetensors"):
        load("org/old")
    assert "pytorch_model.bin" not in hub.fetched()


def test_other_repositories_are_refused(hub: Hub, tmp_path: Path) -> None:
    base = files_of(save_tiny_base("llama", tmp_path / "base"))
    hub.put("org/exported", base | {"angle_llm_export.json": b"{}"})
    hub.put("org/peft", {"adapter_config.json": b'{"base_model_name_or_path": "org/peft"}'})
    with pytest.raises(ArtifactError, match="was exported for another library"):
        load("org/exported")
    with pytest.raises(ArtifactError, match="the base org/peft is an adapter, too"):
        load("org/peft")
    with pytest.raises(OSError, match=r"the hub refuses org/nothing: .*log in"):
        load("org/nothing")
    with pytest.raises(OSError, match="the hub refuses org/exported at revision v9"):
        load("org/exported", revision="v9")


def test_an_adapter_of_peft_loads_the_base_that_it_names(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.put("org/base", save_tiny_base("llama", tmp_path / "base"))
    encoder = load("org/base", prompt="plain")
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "saved")
    files = {name: (tmp_path / "saved" / name).read_bytes() for name in ADAPTER_FILES}
    config = json.loads(files["adapter_config.json"]) | {"base_model_name_or_path": "org/base", "revision": commit}
    hub.put("user/adapter", files | {"adapter_config.json": json.dumps(config).encode(), "optimizer.pt": b"x"})
    hub.put("org/base", save_tiny_base("llama", tmp_path / "other", seed=1))  # a later revision of the base
    again = load("user/adapter", prompt="plain")
    assert (again.base, again.base_revision) == ("org/base", commit)
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert "optimizer.pt" not in hub.fetched()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert np.array_equal(load("user/adapter", prompt="plain").encode(TEXTS), encoder.encode(TEXTS))
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/none"}')
    with pytest.raises(FileNotFoundError, match=r"org/none is not on this machine.*local/adapter_config\.json"):
        load(tmp_path / "local", prompt="plain")


@pytest.mark.filterwarnings("ignore:without the hub")
@pytest.mark.parametrize("model_type", ["mistral", "pixtral", "llama"])
def test_tekken_is_fetched_for_the_families_of_mistral(model_type: str, hub: Hub, tmp_path: Path) -> None:
    files = files_of(save_tiny_base("llama", tmp_path / "base"))
    config = json.loads(files["config.json"]) | {"model_type": model_type}
    tekken = json.dumps({"config": {"pattern": "x"}}).encode()
    hub.put("org/base", files | {"config.json": json.dumps(config).encode(), "tekken.json": tekken})
    load_tokenizer(BackboneLocation("org/base"))
    assert ("tekken.json" in hub.fetched()) is (model_type != "llama")


def test_without_an_answer_of_the_hub_only_one_file_is_waited_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("org/base", save_tiny_base("llama", tmp_path / "base"))
    tiny_encoder("llama").save_pretrained(tmp_path / "model")
    hub.put("user/whole", tmp_path / "model")
    rows = {name: load(name).encode(TEXTS) for name in ("org/base", "user/whole")}
    closed = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", closed + "/{repo_id}/resolve/{revision}/{filename}")
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    for name, expected in rows.items():
        waits.clear()
        assert np.array_equal(load(name).encode(TEXTS), expected)
        assert 0 < len(waits) <= 5, "five attempts for each file that is asked for"


@pytest.mark.filterwarnings("error")
def test_a_model_or_revision_missing_in_the_cache_is_an_error_with_its_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.put("org/base", save_tiny_base("llama", tmp_path / "base"))
    load("org/base")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load("org/base", revision=commit)
    with pytest.raises(FileNotFoundError, match="org/base at revision v9 is not on this machine"):
        load("org/base", revision="v9")
    with pytest.raises(FileNotFoundError, match=r"org/other is not on this machine.*HF_HUB_OFFLINE"):
        load("org/other")


def test_a_repository_without_a_model_is_an_error_that_says_so(hub: Hub) -> None:
    hub.put("org/model-GGUF", {"README.md": b"x", "model-Q8_0.gguf": b"x"})
    with pytest.raises(
        FileNotFoundError, match=r"^org/model-GGUF on the hub has no config\.json.*download the \.gguf file"
    ):
        load("org/model-GGUF")


def test_a_lost_connection_is_an_error_or_the_cache_is_read(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP libraries have their own classes of errors, which are no `OSError`."""
    tiny_encoder("bert").save_pretrained(tmp_path / "model")
    hub.put("user/whole", tmp_path / "model")
    hub.put("org/base", save_tiny_base("llama", tmp_path / "base"))
    rows = load("org/base").encode(TEXTS)
    lost = Mock(side_effect=Exception("Server disconnected"))
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", lost)
        with pytest.raises(ConnectionError, match=r"user/whole: the connection to the hub failed .*HF_HUB_OFFLINE"):
            load("user/whole")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lost)
    assert np.array_equal(load("org/base").encode(TEXTS), rows)
    with pytest.raises(ConnectionError, match=r"org/other: the connection to the hub failed .*Server disconnected"):
        load("org/other")


def test_an_adapter_on_a_saved_encoder_of_the_hub_is_refused(hub: Hub, tmp_path: Path) -> None:
    tiny_encoder("llama").save_pretrained(tmp_path / "model")
    hub.put("user/whole", tmp_path / "model")
    encoder = load(save_tiny_base("llama", tmp_path / "base"))
    encoder.add_lora(LoraSettings(rank=2))
    encoder.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / CARD_NAME).unlink()
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "user/whole"}))
    with pytest.raises(ValueError, match=r"adapter: expected a backbone.*user/whole is a saved encoder"):
        load("user/whole", adapter=tmp_path / "adapter", prompt="plain")
