"""One settings object: YAML, command line and Python write the same fields, and mistakes name themselves."""

import ast
import inspect
import itertools
import re
from pathlib import Path

import pytest

import angle_llm.config.data as data_settings
import angle_llm.config.model as model_settings
import angle_llm.config.objective as objective_settings
import angle_llm.config.train as train_settings
from angle_llm.config import (
    CheckpointSettings,
    LoraSettings,
    OptimizerSettings,
    SettingsError,
    TrainSettings,
    load_settings,
    parse_settings,
    save_settings,
    settings_from_dict,
)
from angle_llm.losses import AngleObjective

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
def test_every_recipe_yaml_loads_and_names_how_its_model_reads(path: Path) -> None:
    settings = load_settings(TrainSettings, path)
    AngleObjective(**vars(settings.objective))
    assert settings.run_dir.startswith("runs/")
    causal = "smollm2" in settings.model.path
    expected = ("summarize_one_word", "last") if causal else ("plain", "mean")
    assert (settings.model.prompt, settings.model.pooling) == expected


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
        ({"lora": {"alpha": float("nan")}}, ["lora.alpha", "nan"]),
        ({"lora": {"rank": 0}}, ["lora.rank 0", "bfloat16", "float32"]),
        ({"optimizer": {"weight_decay": -1}}, ["optimizer.weight_decay", "-1"]),
        ({"optimizer": {"warmup": 1.5}}, ["optimizer.warmup", "whole number", "1.5"]),
        ({"evaluation": {"every_steps": 5}}, ["evaluation.every_steps", "evaluation.pairs"]),
        ({"checkpoint": {"every_steps": -1}}, ["checkpoint.every_steps", "-1"]),
        ({"checkpoint": {"keep": 0}}, ["checkpoint.keep must be 1 or more", "0"]),
        ({"resume": ""}, ["resume is empty", "auto, never"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"data": {"on_bad_row": "ignore"}}, ["data.on_bad_row", "skip", "'ignore'"]),
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


def test_every_field_is_explained_in_the_source_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """tyro takes the string below a field as its help; a comment beside it would not show."""
    with pytest.raises(SystemExit):
        parse_settings(TrainSettings(), ["--help"])
    shown = " ".join(re.sub(r"[^\w.,;:`-]+", " ", capsys.readouterr().out).split())
    assert "--config FILE" in shown
    explained = 0
    modules = [data_settings, model_settings, objective_settings, train_settings]
    for owner in [owner for module in modules for owner in ast.parse(inspect.getsource(module)).body]:
        body = owner.body if isinstance(owner, ast.ClassDef) and owner.name.endswith(("Settings", "Source")) else []
        for field, below in itertools.pairwise(body):
            nested = isinstance(field, ast.AnnAssign) and ast.unparse(field.annotation).endswith(("Settings", "Source"))
            if not isinstance(field, ast.AnnAssign) or nested:
                continue
            assert isinstance(below, ast.Expr), f"{owner.name}: {ast.unparse(field)} has no explanation below it"
            if (
                ast.unparse(field.target) == "sets"
            ):  # a list of settings: on the command line once a YAML file names some
                continue
            first_words = " ".join(re.sub(r"[^\w.,;:`-]+", " ", ast.literal_eval(below.value)).split()[:4])
            assert first_words in shown, first_words
            explained += 1
    assert explained > 40


def test_place_and_checkpoints_decide_nothing_of_what_is_computed() -> None:
    settings = TrainSettings(run_dir="a", resume="auto", checkpoint=CheckpointSettings(every_steps=3, keep=5))
    assert settings.decisive == TrainSettings().decisive
    assert (
        settings.fingerprint()
        == TrainSettings().fingerprint()
        == TrainSettings(lora=LoraSettings(alpha=32)).fingerprint()
    )
    assert settings.fingerprint() != TrainSettings(seed=1).fingerprint()
    assert (
        TrainSettings(lora=LoraSettings(alpha=8.0)).fingerprint()
        == TrainSettings(lora=LoraSettings(alpha=8)).fingerprint()
    )


def test_warmup_is_a_share_or_a_number_of_steps() -> None:
    assert OptimizerSettings(warmup=0.1).warmup_steps(32) == 4
    assert OptimizerSettings(warmup=100).warmup_steps(32) == 100
    assert OptimizerSettings(warmup=0).warmup_steps(32) == 0
