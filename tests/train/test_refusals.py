"""What cannot work is refused before weights load."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from angle_llm.config import LoraSettings, ModelSettings, SettingsError, TrainSettings
from angle_llm.train.distributed import TABLE, Launch, check_can_work


@dataclass(frozen=True)
class Launched:
    """How a run might have been launched."""

    zero_stage: int = 0
    compiles: bool = False
    other_strategy: str | None = None
    casts: bool = False
    splits_layers: bool = False


PLAIN = TrainSettings(model=ModelSettings(dtype="bfloat16"))
QUANTISED = replace(PLAIN, model=ModelSettings(dtype="bfloat16", bits=4))
REFUSED = {
    "FSDP": (PLAIN, Launched(other_strategy="FSDP"), "zero3.yaml"),
    "compiled": (PLAIN, Launched(compiles=True), "--dynamo_backend no"),
    "casts": (PLAIN, Launched(zero_stage=2, casts=True), "take that section out"),
    "tensor parallel": (PLAIN, Launched(zero_stage=2, splits_layers=True), "take that section out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    settings, launched, instead = REFUSED[case]
    with pytest.raises(SettingsError, match=f"Instead: .*{instead}"):
        check_can_work(settings, launched)  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'angle_llm\[quantization\]'"):
        check_can_work(QUANTISED, Launched())  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [PLAIN, QUANTISED, replace(PLAIN, lora=LoraSettings(dora=True))])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_rest_is_let_through(stage: int, settings: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_can_work(settings, Launched(zero_stage=stage))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "torch.compile"),
    ],
)
def test_what_a_launcher_sets_is_seen(
    variables: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch.join(tmp_path)
    check_can_work(PLAIN, launch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=reason):
        check_can_work(PLAIN, launch)


def test_every_row_of_the_table_is_tested() -> None:
    assert len(TABLE) == len(REFUSED) + 1
