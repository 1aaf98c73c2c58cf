"""Training that continues from a saved encoder: an adapter, or a whole model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import read_metrics
from safetensors.torch import load_file
from tiny import save_tiny_adapter, save_tiny_base

from angle_llm import SentenceEncoder, fine_tune
from angle_llm.export.merge import merge
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model import saved_lora
from angle_llm.model.layers.lora import is_adapted
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import ModelSource, resolve_model
from angle_llm.run import resolve_models
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import (
    DataSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    PretrainingSettings,
    TrainSettings,
)
from angle_llm.train import loading
from angle_llm.train.distributed import Processes

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def settings(tmp_path: Path) -> TrainSettings:
    """A run of two steps."""
    base = save_tiny_base("llama", tmp_path / "base")
    return TrainSettings(
        run_dir=str(tmp_path / "first"),
        model=ModelSettings(path=str(base), dtype="float32", max_length=60),
        lora=LoraSettings(rank=2, alpha=6, targets=["v_proj", "q_proj"]),
        data=DataSettings(path="starter:nli_triples.jsonl.gz", limit=8),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        batch_size=4,
    )


def second(settings: TrainSettings, name: str = "second", **changes: Any) -> TrainSettings:
    """The same run from the model of the first one."""
    model = replace(settings.model, path=f"{settings.run_dir}/model", max_length=None)
    run_dir = str(settings.run_path.parent / name)
    return replace(settings, **{"run_dir": run_dir, "model": model, "lora": LoraSettings(), "seed": 7} | changes)


def test_two_steps_and_two_from_the_saved_adapter_equal_those_in_memory(
    settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[SentenceEncoder] = []
    load = loading.load_encoder
    monkeypatch.setattr("angle_llm.run.load_encoder", lambda *given: loaded.append(load(*given)) or loaded[-1])
    first = fine_tune(settings).folder
    folder = fine_tune(second(settings)).folder
    assert "is loaded in" not in capsys.readouterr().out
    monkeypatch.setattr("angle_llm.run.load_encoder", lambda *_: loaded[0])  # as the first run left it
    in_memory = fine_tune(second(settings, "in_memory")).folder
    assert (folder / ADAPTER).read_bytes() == (in_memory / ADAPTER).read_bytes()
    assert (folder / ADAPTER).read_bytes() != (first / ADAPTER).read_bytes()
    losses = [line["loss"] for line in read_metrics(tmp_path / "second") if "loss" in line]
    assert losses == [line["loss"] for line in read_metrics(tmp_path / "in_memory") if "loss" in line]

    third = fine_tune(second(settings, "fourth", model=replace(settings.model, path=str(folder)))).folder
    targets = [
        json.loads((each / "adapter_config.json").read_text())["target_modules"] for each in (first, folder, third)
    ]
    assert [sorted(each) for each in targets] == [["q_proj", "v_proj"]] * 3
    cards = [EncoderCard.read(each) for each in (first, folder)]
    assert cards[0] == cards[1], "also base, fingerprint and maximum length"
    assert cards[1].base == settings.model.path
    assert merge(folder, tmp_path / "merged") is not None
    assert verify([folder, tmp_path / "merged"], VerifyOptions(device="cpu")).holds


def test_an_adapter_of_peft_is_continued_as_the_saved_one(settings: TrainSettings) -> None:
    first = fine_tune(settings).folder
    expected = (fine_tune(second(settings)).folder / ADAPTER).read_bytes()
    values = json.loads((first / "angle_llm.json").read_text())
    (first / "angle_llm.json").unlink()
    (first / "modules.json").unlink()  # the marks of this package
    model = ModelSettings(path=str(first), dtype="float32", prompt=values["prompt"]["name"], max_length=60)
    again = fine_tune(second(settings, "third", model=model)).folder
    assert (again / ADAPTER).read_bytes() == expected
    assert json.loads((again / "angle_llm.json").read_text()) == values


def test_a_continued_run_resumes(settings: TrainSettings, capsys: pytest.CaptureFixture[str]) -> None:
    fine_tune(settings)
    half = second(settings, "half")
    fine_tune(replace(half, model=replace(half.model, dtype="bfloat16")))
    assert "first/model was trained in float32 and is loaded in bfloat16" in capsys.readouterr().out
    once = second(settings, checkpoint=replace(settings.checkpoint, every_steps=1))
    expected = (fine_tune(once).folder / ADAPTER).read_bytes()
    shutil.rmtree(max((once.run_path / "checkpoints").glob("step-*")))
    again = fine_tune(replace(once, resume="auto")).folder
    assert (again / ADAPTER).read_bytes() == expected


@pytest.mark.parametrize("rank", [0, 3])
def test_a_whole_model_trains_all_weights_or_gets_an_adapter(settings: TrainSettings, rank: int) -> None:
    encoder = SentenceEncoder.from_pretrained(settings.model.path, device="cpu", pooling="mean", max_length=50)
    encoder.save_pretrained(settings.run_path / "model")
    folder = fine_tune(second(settings, lora=LoraSettings(rank=rank))).folder
    trained = SentenceEncoder.from_pretrained(folder, device="cpu")
    assert (trained.pooling, trained.max_length) == ("mean", 50)
    assert is_adapted(trained.model.backbone) == (rank > 0)
    if rank:
        assert EncoderCard.read(folder).base == str(settings.run_path / "model")
    else:
        before, after = (load_file(each / "model.safetensors") for each in (settings.run_path / "model", folder))
        assert not any(torch.equal(before[name], after[name]) for name in before if "proj" in name)


def check(settings: TrainSettings) -> LoraSettings:
    source, _ = resolve_models(settings)
    return saved_lora.lora_of_run(source, settings.model, settings.lora)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": LoraSettings(rank=0)}, r"--lora\.rank.*angle-llm merge"),
        ({"lora": LoraSettings(alpha=8)}, r"--lora\.alpha"),
        ({"lora": LoraSettings(targets=["q_proj"])}, r"--lora\.targets"),
        pytest.param({"bits": 4}, r"--model\.bits", marks=pytest.mark.needs("bitsandbytes")),
        ({"run_dir": "first"}, "--model.path .* is the output folder of this run"),
    ],
)
def test_other_settings_than_those_of_the_adapter_are_refused(
    settings: TrainSettings, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny_adapter(Path(settings.model.path), settings.run_path / "model", settings.lora, dtype="float32")
    run = second(settings, lora=settings.lora)
    check(run)
    if "bits" in changes:
        changes = {"model": replace(run.model, **changes)}
    elif "run_dir" in changes:
        changes = {"run_dir": str(tmp_path / "first")}
    with pytest.raises(SettingsError, match=message):
        check(replace(run, **changes))


def test_the_configuration_of_an_adapter_can_name_all_layers_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    model = ModelSettings(path=str(tmp_path / "adapter"), dtype="float32")
    save_tiny_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"target_modules": "all-linear"}))
    assert saved_lora.lora_of_run(resolve_model(model.path), model, LoraSettings()).targets == ["all-linear"]
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "r"}))
    with pytest.raises(ArtifactError, match="adapter"):
        saved_lora.lora_of_run(resolve_model(model.path), model, LoraSettings())
    path.unlink()
    with pytest.raises(ArtifactError, match=r"No such file.*adapter_config\.json"):
        saved_lora.lora_of_run(resolve_model(model.path), model, LoraSettings())


def test_a_cut_model_is_refused_under_zero_3(tmp_path: Path) -> None:
    base = SentenceEncoder.from_pretrained(save_tiny_base("llama", tmp_path / "base"))
    base.truncated(dimensions=8).save_pretrained(tmp_path / "cut")
    with pytest.raises(SettingsError, match=r"ZeRO-3 .*only some layers or dimensions"):
        loading.check_partition(
            resolve_model(str(tmp_path / "cut")),
            TrainSettings(model=ModelSettings(path=str(tmp_path / "cut"), dtype="float32")),
            "ZeRO-3",
        )


def test_models_and_tasks_that_cannot_be_partitioned_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(save_tiny_base("llama", tmp_path / "base"))
    adapter = str(save_tiny_adapter(Path(base), tmp_path / "adapter"))
    run = TrainSettings(model=ModelSettings(base))
    loading.check_partition(resolve_model(adapter), replace(run, model=ModelSettings(adapter)), None)
    loading.check_partition(resolve_model(base), run, "ZeRO-3")
    with pytest.raises(SettingsError, match=r"ZeRO-3.*--model\.bits None"):
        loading.check_partition(resolve_model(base), replace(run, model=ModelSettings(base, bits=4)), "ZeRO-3")
    with pytest.raises(SettingsError, match=r"ZeRO-3.*adapter.*angle-llm merge"):
        loading.check_partition(resolve_model(adapter), replace(run, model=ModelSettings(adapter)), "ZeRO-3")
    whole = replace(run, lora=replace(run.lora, rank=0))
    loading.check_partition(resolve_model(base), whole, "ZeRO-3")
    with pytest.raises(SettingsError, match=r"FSDP.*--lora\.rank 0.*ZeRO-3"):
        loading.check_partition(resolve_model(base), whole, "FSDP")
    with pytest.raises(SettingsError, match=r"FSDP.*4 bits.*--model\.bits None"):
        loading.check_partition(resolve_model(base), replace(run, model=ModelSettings(base, bits=4)), "FSDP")
    task = replace(run, pretraining=PretrainingSettings(task="simcse"))
    with pytest.raises(SettingsError, match=r"ZeRO-3.*--pretraining\.task simcse"):
        loading.check_partition(resolve_model(base), task, "ZeRO-3")
    monkeypatch.setattr(ModelSource, "dense", [Path("2_Dense")])
    with pytest.raises(SettingsError, match=r"ZeRO-3.*Dense modules"):
        loading.check_partition(resolve_model(base), run, "ZeRO-3")


def test_zero_3_refuses_a_model_before_the_data_are_read(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_adapter(Path(settings.model.path), settings.run_path / "model", settings.lora, dtype="float32")
    monkeypatch.setattr(Processes, "zero_stage", 3)
    monkeypatch.setattr(Processes, "deepspeed_config", {})
    monkeypatch.setattr("angle_llm.run.load_data", lambda *_: pytest.fail("the data are read"))
    with pytest.raises(SettingsError, match=r"ZeRO-3 .*adapter"):
        fine_tune(second(settings))


def test_a_large_model_is_not_trained_on_a_cpu_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(save_tiny_base("llama", tmp_path / "base"))
    monkeypatch.setattr(loading, "LARGE_ON_CPU", 1000)
    given = TrainSettings(model=ModelSettings(base), run_dir=str(tmp_path / "run"))
    with pytest.raises(SettingsError, match="--allow-cpu"):
        fine_tune(given)
    loading.check_cpu(resolve_model(base), replace(given, allow_cpu=True), Processes())
    loading.check_cpu(resolve_model(base), given, Processes(device=torch.device("cuda")))
    assert replace(given, allow_cpu=True).fingerprint() == given.fingerprint(), "the run can be resumed with it"
