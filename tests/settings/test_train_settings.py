"""Settings: YAML, flags and Python set the same fields, and a mistake is reported with its key and value."""

import ast
import inspect
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import angle_llm.settings.train as config
from angle_llm.losses import AngleObjective, FalseNegatives
from angle_llm.settings.parsing import (
    SettingsError,
    flags_of,
    load_settings,
    parse_settings,
    save_settings,
    settings_from_dict,
)
from angle_llm.settings.train import CheckpointSettings, LoraSettings, OptimizerSettings, PlanSettings, TrainSettings
from angle_llm.train.objectives import make_losses

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_saved_settings_load_back_equal(tmp_path: Path) -> None:
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
def test_every_recipe_yaml_loads_with_prompt_and_pooling_of_its_model(path: Path) -> None:
    settings = load_settings(TrainSettings, path)
    make_losses(settings)
    assert settings.run_dir.startswith("runs/")
    causal = settings.model.path.endswith(".gguf")
    expected = ("summarize_one_word", "last") if causal else ("plain", "mean")
    assert (settings.model.prompt, settings.model.pooling) == expected


def test_yaml_overrides_defaults_key_by_key_and_the_command_line_overrides_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\nlora: {rank: 4}\noptimizer: {learning_rate: 1e-3}\n")
    defaults = TrainSettings(batch_size=7, lora=LoraSettings(alpha=99))
    for flags in (["--config", str(tmp_path / "run.yaml")], [f"--config={tmp_path / 'run.yaml'}"]):
        settings = parse_settings(defaults, [*flags, "--seed", "2", "--data.where", "sts_overlap", "0"])
        assert (settings.seed, settings.batch_size, settings.lora.rank, settings.lora.alpha) == (2, 7, 4, 99)
        # YAML 1.1 reads 1e-3 as text; it is read as a number.
        assert settings.optimizer.learning_rate == 1e-3
        assert settings.data.where == {"sts_overlap": "0"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"optimiser": {}}, ["'optimiser'", "'optimizer'", "the top level"]),
        ([1], ["a mapping", "list"]),
        ({"lora": {"rank": "four"}}, ["lora.rank", "'four'"]),
        ({"lora": {"rnak": 8}}, ["'rnak'", "'rank'", "in lora"]),
        ({"data": {"sets": [{"weigth": 2}]}}, ["'weigth'", "'weight'", "data.sets.0"]),
        ({"model": {"dtype": "fp32"}}, ["model.dtype", "float32", "'fp32'"]),
        ({"lora": {"dropout": 1.5}}, ["lora.dropout", "1.5"]),
        ({"lora": {"alpha": float("nan")}}, ["lora.alpha", "nan"]),
        ({"lora": {"rank": 0}, "model": {"dtype": "float16"}}, ["lora.rank 0", "bfloat16", "float32"]),
        ({"lora": {"rank": 0}, "model": {"bits": 4}}, ["lora.rank 0", "model.bits"]),
        ({"lora": {"targets": []}}, ["lora.targets"]),
        ({"optimizer": {"warmup": 1.5}}, ["optimizer.warmup", "whole number", "1.5"]),
        ({"checkpoint": {"every_steps": -1}}, ["checkpoint.every_steps", "-1"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"data": {"batches": "ignore"}}, ["data.batches", "by_set", "'ignore'"]),
        ({"data": {"path": "a.csv", "sets": [{"path": "b.csv"}]}}, ["data.path", "data.sets"]),
        ({"nested": {"layers": [4, 2]}}, ["nested.layers", "[4, 2]"]),
        ({"optimizer": {"scheduel": "cosine"}}, ["'scheduel'", "'schedule'", "in optimizer"]),
        ({"model": None}, ["model"]),
    ],
)
def test_an_error_names_key_expectation_and_value(values: object, expected: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        settings_from_dict(TrainSettings, values, "run.yaml")
    assert all(word in str(error.value) for word in ["run.yaml", *expected]), str(error.value)


def test_a_recipe_is_found_by_its_name() -> None:
    assert load_settings(TrainSettings, "starter") == load_settings(TrainSettings, RECIPES[0].parent / "starter.yaml")
    with pytest.raises(SettingsError, match="minilm_starter"):
        load_settings(TrainSettings, "starte")


def test_the_oldest_versions_are_the_pins_of_make_test_floors() -> None:
    root = RECIPES[0].parent.parent
    pin = r'^([\w-]+)==([\d.]+)(; python_version < "3\.11")?(?:; python_version >= "3\.11")?  # \w'
    pins = re.findall(pin, (root / ".ci" / "floors.txt").read_text(encoding="utf-8"), re.MULTILINE)
    metadata = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert len(pins) > 20
    for name, version, marker in pins:
        bound = rf'"{name}>=([\d.]+){re.escape(marker.replace(chr(34), chr(39)))}"'
        bounds = {found.removesuffix(".0") for found in re.findall(bound, metadata)}
        assert bounds == {re.sub(r"(\.0)+$", "", version)}, name


def test_missing_malformed_or_unsafe_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown recipe"):
        load_settings(TrainSettings, tmp_path / "none.yaml")
    for content in ("seed: [", "!!python/object/apply:os.getcwd []"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(SettingsError, match=r"bad\.yaml is not valid YAML"):
            load_settings(TrainSettings, tmp_path / "bad.yaml")


def test_an_invalid_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (
        (["--data.fromat", "triple"], ["--data.fromat", "--data.format"]),
        (["--data.columns", "text1", "question", "answer.csv", "--seed", "1"], ["--data.columns"]),
        (["--data.where", "language", "--seed", "1"], ["--data.where"]),
        (["--lora.rank", "-1"], ["--lora.rank: ", "-1"]),
    ):
        with pytest.raises(SystemExit):
            parse_settings(TrainSettings(), words)
        shown = capsys.readouterr().err
        assert all(word in shown for word in named), shown
    found = parse_settings(TrainSettings(), ["--data.columns", "text1", "question"])
    assert found.data.columns == {"text1": "question"}


@pytest.mark.parametrize(
    ("flags", "where", "columns"),
    [
        ([], {"overlap": 0}, {"text1": "a", "text2": "b"}),
        (["--data.where"], {}, {"text1": "a", "text2": "b"}),
        (["--data.where", "--data.limit", "8"], {}, {"text1": "a", "text2": "b"}),
        (["--data.where", "language", "en"], {"language": "en"}, {"text1": "a", "text2": "b"}),
        (["--data.columns", "anchor", "c", "--data.where.overlap", "1"], {"overlap": 1}, {"anchor": "c"}),
        (["--data.columns.text1", "c"], {"overlap": 0}, {"text1": "c", "text2": "b"}),
    ],
)
def test_a_flag_replaces_a_mapping_of_a_settings_file_or_a_value_of_it(
    tmp_path: Path, flags: list[str], where: dict[str, Any], columns: dict[str, str]
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("{data: {path: x.jsonl, where: {overlap: 0}, columns: {text1: a, text2: b}}}")
    of_file = parse_settings(TrainSettings(), ["--config", str(path), *flags])
    of_program = parse_settings(load_settings(TrainSettings, path), flags)  # defaults of a recipe
    for found in (of_file, of_program):
        assert (found.data.where, found.data.columns, found.data.path) == (where, columns, "x.jsonl")


def test_a_condition_of_a_settings_file_with_a_truth_value_is_a_switch(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("{data: {path: x.jsonl, where: {clean: true, old: false}}}")
    found = parse_settings(TrainSettings(), ["--config", str(path), "--data.where.no-clean", "--data.where.old"])
    assert found.data.where == {"clean": False, "old": True}


def test_defaults_are_those_of_the_guide() -> None:
    """docs/training.md."""
    run = TrainSettings()
    chosen = run.optimizer
    names = ("name", "learning_rate", "weight_decay", "warmup", "schedule", "max_gradient_norm")
    assert [getattr(chosen, name) for name in names] == ["adamw", 1e-4, 0, 0.1, "linear", 1]
    assert (run.lora.rank, run.lora.alpha, run.batch_size) == (32, 32, 64)


def test_every_field_is_documented_in_the_source_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """tyro takes the string below a field as its help text; a comment beside it would not be printed."""
    with pytest.raises(SystemExit):
        parse_settings(PlanSettings(), ["--help"])  # those of training, and its own
    shown = " ".join(re.sub(r"[^\w.,;:`-]+", " ", capsys.readouterr().out).split())
    assert "--config FILE" in shown
    documented = 0
    for owner in ast.parse(inspect.getsource(config)).body:
        body = owner.body if isinstance(owner, ast.ClassDef) and owner.name.endswith(("Settings", "Source")) else []
        for field, below in itertools.pairwise(body):
            kind = ast.unparse(field.annotation) if isinstance(field, ast.AnnAssign) else ""
            if not kind or kind.startswith("ClassVar") or kind.endswith(("Settings", "Source")):
                continue
            assert isinstance(below, ast.Expr), f"{owner.name}: {ast.unparse(field)} has no text below it"
            if ast.unparse(field.target) == "sets":  # a flag only once a YAML file lists datasets
                continue
            first_words = " ".join(re.sub(r"[^\w.,;:`-]+", " ", ast.literal_eval(below.value)).split()[:4])
            assert first_words in shown, first_words
            documented += 1
    assert documented > 30


def test_run_directory_checkpoints_and_budgets_do_not_change_the_fingerprint() -> None:
    settings = TrainSettings(run_dir="a", resume="auto", checkpoint=CheckpointSettings(every_steps=3, keep=5))
    settings = replace(settings, micro_batch_tokens=7, graph_tokens=0, activation_checkpointing="never")
    assert settings.identity == TrainSettings().identity
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


@pytest.mark.parametrize(
    "objective",
    [
        {"false_negatives": {"margin": 0.0}},
        {"hardness_strength": 5.0},
        {"kl_weight": 1.0},
        {"teacher_temperature": 1.0},
        {"teacher": "t", "teacher_vector_weight": 1},
    ],
)
def test_every_objective_setting_changes_the_fingerprint(objective: dict[str, Any]) -> None:
    changed = settings_from_dict(TrainSettings, {"objective": objective}, where="test")
    assert changed.fingerprint() != TrainSettings().fingerprint()


OTHER_LOSS = {"in_batch_weight": 0, "cosine_weight": 1}


@pytest.mark.parametrize(
    ("objective", "named"),
    [
        ({"false_negatives": {"scope": "all"}}, r"false_negatives\.scope"),
        ({"false_negatives": {"margin": 0}, **OTHER_LOSS}, "false_negatives"),
        ({"hardness_strength": 1, **OTHER_LOSS}, "hardness_strength"),
        ({"contrastive_form": "forward", **OTHER_LOSS}, "contrastive_form"),
    ],
)
def test_settings_without_effect_are_refused(objective: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        make_losses(settings_from_dict(TrainSettings, {"objective": objective}, "test"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"pretraining": {"task": "simcse", "mask_fraction": 0.3}}, "mask-fraction 0.3"),
        ({"pretraining": {"mask_fraction": 0.3}}, "mask-fraction 0.3"),
    ],
)
def test_settings_of_another_task_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        settings_from_dict(TrainSettings, values, "test")


def test_odd_nested_dimensions_are_refused_with_an_angle() -> None:
    nested = {"nested": {"dimensions": [2, 3]}}
    assert make_losses(settings_from_dict(TrainSettings, nested, "test"))
    with pytest.raises(SettingsError, match=r"nested\.dimensions.*3.*angle_weight"):
        make_losses(settings_from_dict(TrainSettings, nested | {"objective": {"angle_weight": 1}}, "test"))


def test_a_dataset_overrides_settings_of_negatives() -> None:
    def losses(*own: dict[str, Any]) -> list[Any]:
        common = {"contrastive_form": "forward", "false_negatives": {"margin": 0, "guide": "g"}}
        data = {"sets": [{"path": "x", "objective": each} for each in own]}
        return list(make_losses(settings_from_dict(TrainSettings, {"objective": common, "data": data}, "test")))

    first, second, third = losses(
        {}, {"contrastive_form": "symmetric"}, {"false_negatives": {"margin": 0.2}, "in_batch_weight": 0.5}
    )
    assert (first.contrastive_form, second.contrastive_form) == ("forward", "symmetric")
    assert (first.false_negatives.margin, third.false_negatives) == (0, FalseNegatives(margin=0.2, guided=True))
    assert len(losses({}, {"in_batch_weight": 0, "cosine_weight": 1})) == 2  # the other dataset uses the negatives
    with pytest.raises(SettingsError, match="guide of the run or none, got 'other'"):
        losses({"false_negatives": {"guide": "other"}})
    with pytest.raises(SettingsError, match=r"objective of x: false_negatives\.margin: .*'far'"):
        losses({"false_negatives": {"margin": "far"}})


def test_settings_of_negatives_reach_the_loss() -> None:
    flags = "--objective.contrastive-form forward --objective.false-negatives.ratio 0.95 "
    flags += "--objective.hardness-strength 5"
    (loss,) = make_losses(parse_settings(TrainSettings(), flags.split()))
    assert loss == AngleObjective(
        contrastive_form="forward",
        false_negatives=FalseNegatives(ratio=0.95),
        hardness_strength=5.0,
    )


def test_numbers_of_printed_flags_are_exact() -> None:
    values = {"learning_rate": 5e-5, "rank": 0, "score_range": [0.0, 12345678.0], "threshold": 0.1234567}
    words = "--learning-rate 5e-5 --rank 0 --score-range 0 12345678.0 --threshold 0.1234567"
    assert flags_of(values) == words.split()
