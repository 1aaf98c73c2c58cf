"""One settings object: YAML, command line and Python write the same fields, and mistakes name themselves."""

from pathlib import Path

import pytest

from angle_llm.objectives import AngleObjective
from angle_llm.settings import (
    LoraSettings,
    OptimizerSettings,
    SettingsError,
    TrainSettings,
    load_settings,
    parse_settings,
    save_settings,
    settings_from_dict,
    settings_to_dict,
)

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def test_saved_settings_come_back_equal(tmp_path: Path) -> None:
    settings = settings_from_dict(
        TrainSettings,
        {
            "seed": 7,
            "lora": {"targets": ["q_proj"]},
            "data": {"score_range": [0, 5], "where": {"split": "dev", "x": 0}},
        },
        "here",
    )
    save_settings(settings, tmp_path / "settings.yaml")
    assert load_settings(TrainSettings, tmp_path / "settings.yaml") == settings
    assert list(tmp_path.iterdir()) == [tmp_path / "settings.yaml"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_yaml_loads(path: Path) -> None:
    settings = load_settings(TrainSettings, path)
    AngleObjective(**vars(settings.objective))
    assert settings.run_dir.startswith("runs/")


def test_yaml_overrides_defaults_key_by_key_and_the_command_line_overrides_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\nlora: {rank: 4}\noptimizer: {learning_rate: 1e-3}\n")
    defaults = TrainSettings(batch_size=7, lora=LoraSettings(alpha=99))
    for config in (["--config", str(tmp_path / "run.yaml")], [f"--config={tmp_path / 'run.yaml'}"]):
        settings = parse_settings(defaults, [*config, "--seed", "2", "--data.where", "sts_overlap", "0"])
        assert (settings.seed, settings.batch_size, settings.lora.rank, settings.lora.alpha) == (2, 7, 4, 99)
        # YAML 1.1 reads 1e-3 as text; it is a number all the same.
        assert settings.optimizer.learning_rate == 1e-3
        assert settings.data.where == {"sts_overlap": "0"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"lora": {"rnak": 8}}, ["'rnak'", "'rank'", "in lora"]),
        ({"batchsize": 8}, ["'batchsize'", "'batch_size'", "top level"]),
        ({"lora": {"rank": "many"}}, ["lora.rank", "integer", "'many'"]),
        ({"batch_size": 0}, ["batch_size must be 1 or more, got 0"]),
        ({"model": {"dtype": "fp32"}}, ["model.dtype", "float32", "'fp32'"]),
        ({"lora": {"dropout": 1.5}}, ["lora.dropout", "1.5"]),
        ({"optimizer": {"schedule": "lineal"}}, ["optimizer.schedule", "linear", "'lineal'"]),
        ({"model": None}, ["model"]),
        (["batch_size"], ["mapping", "list"]),
    ],
)
def test_a_mistake_names_key_need_and_what_came(values: object, told: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        settings_from_dict(TrainSettings, values, "run.yaml")
    assert all(word in str(error.value) for word in ["run.yaml", *told]), str(error.value)


def test_files_that_are_missing_malformed_or_unsafe(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no settings file"):
        load_settings(TrainSettings, tmp_path / "none.yaml")
    for content in ("seed: [", "!!python/object/apply:os.getcwd []"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(SettingsError, match="not valid YAML"):
            load_settings(TrainSettings, tmp_path / "bad.yaml")


def test_the_command_line_names_the_nearest_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(TrainSettings(), ["--lora.rnak", "3"])
    assert "--lora.rank" in capsys.readouterr().err


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(TrainSettings(), ["--help"])
    shown = capsys.readouterr().out
    for section, values in settings_to_dict(TrainSettings()).items():
        for name in values if isinstance(values, dict) and section != "data" else [None]:
            option = f"{section}.{name}" if name else section
            assert f"--{option}".replace("_", "-") in shown, option
    assert "--config FILE" in shown


def test_warmup_is_a_share_or_a_number_of_steps() -> None:
    assert OptimizerSettings(warmup=0.1).warmup_steps(32) == 4
    assert OptimizerSettings(warmup=100).warmup_steps(32) == 100
    assert OptimizerSettings(warmup=0).warmup_steps(32) == 0
