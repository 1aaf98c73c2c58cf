"""Merge of several models: the weights equal an independent formula, and models of different kinds are refused."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kills import contents
from safetensors.torch import load_file, save_file
from tiny import PeftLora, add_adapter, copy_of_adapter, save_tiny_base, tiny_encoder
from torch import Tensor

from angle_llm import PromptTemplate, SentenceEncoder, cli
from angle_llm.export import merge as merge_module
from angle_llm.export.card import REPORT_NAME
from angle_llm.export.comparison import Verification
from angle_llm.export.merge import merge
from angle_llm.export.verify import VerificationError, VerifyOptions, verify
from angle_llm.export.weights import MergedWeights
from angle_llm.model.source.checks import ArtifactError
from angle_llm.settings.parsing import MissingLibraryError
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", "Where is it?"]
PROMPT = PromptTemplate(name="mine", template='This sentence: "{text}" means in one word: "')


def combined(models: list[Path], out: Path, **options: Any) -> Verification:
    found = merge(models[0], out, others=models[1:], device="cpu", **options)
    assert found is not None
    assert found.holds
    return found


def save_adapter(base: Path, folder: Path, seed: int, lora: LoraSettings | None = None, **options: Any) -> Path:
    """Write an adapter whose matrices are all random, with a scale that depends on the seed."""
    lora = lora or LoraSettings(rank=2, alpha=6)

    def make(path: Path) -> None:
        encoder = SentenceEncoder.from_pretrained(base, device="cpu", **options)
        add_adapter(encoder, lora)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in encoder.model.named_parameters():
            if "lora_" in name and parameter.ndim == 2:
                parameter.data.copy_(0.05 * (1 + seed) * torch.randn(parameter.shape, generator=generator))
        encoder.save_pretrained(path)

    return copy_of_adapter(base, folder, f"random {seed} {lora!r} {options!r}", make)


def save_whole(kind: str, folder: Path, seed: int, amount: float = 0.02, **options: Any) -> Path:
    """Write a model of the kind, all of whose weights were trained from the same initial weights."""
    encoder = tiny_encoder(kind, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in encoder.model.parameters():
        parameter.data.add_(amount * torch.randn(parameter.shape, generator=generator))
    encoder.save_pretrained(folder)
    return folder


def weights_of(model: Path, base: Path | None = None) -> dict[str, Tensor]:
    """Return the weights of a model in float64; those of an adapter by the formula W + alpha / rank · B A."""
    if not (model / "adapter_config.json").exists():
        return {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    assert base is not None
    config = json.loads((model / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    found, updates = weights_of(base), load_file(model / "adapter_model.safetensors")
    for key in [key for key in updates if key.endswith(".lora_A.weight")]:
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = scale * updates[key.replace("lora_A", "lora_B")].double() @ updates[key].double()
        found[f"{path}.weight"] += delta.T if config["fan_in_fan_out"] else delta
    return found


def largest_error(out: Path, expected: dict[str, Tensor]) -> float:
    """Return the largest error of a weight relative to the largest weight of its tensor."""
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == expected.keys()
    return max(float((stored[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_base("llama", tmp_path / "base")


@pytest.fixture
def two(base: Path, tmp_path: Path) -> list[Path]:
    return [save_adapter(base, tmp_path / name, seed, prompt=PROMPT) for seed, name in enumerate("ab")]


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_adapters_of_other_seeds_and_ranks_are_averaged_after_their_merge(kind: str, tmp_path: Path) -> None:
    base = save_tiny_base(kind, tmp_path / "base")
    loras = [LoraSettings(rank=2, alpha=6), PeftLora(rank=3, alpha=2, rslora=True), LoraSettings(rank=2, alpha=6)]
    models = [save_adapter(base, tmp_path / str(seed), seed, lora) for seed, lora in enumerate(loras)]
    found = combined(models, tmp_path / "out", weights=[2, 1, 1])
    first, second, third = (weights_of(model, base) for model in models)
    expected = {name: 0.5 * first[name] + 0.25 * second[name] + 0.25 * third[name] for name in first}
    assert largest_error(tmp_path / "out", expected) < 2e-7
    assert "The comparison is of 0 alone." in found.notes[-1]
    assert "(0.5 and 0.25 and 0.25): 0 of" in found.notes[-1]


def test_the_mean_is_not_the_product_of_mean_factors(two: list[Path], base: Path, tmp_path: Path) -> None:
    merge(two[0], tmp_path / "out", others=two[1:], check=False)
    a, b = (load_file(model / "adapter_model.safetensors") for model in two)
    key = next(key for key in a if "q_proj.lora_A" in key)
    other = key.replace("lora_A", "lora_B")
    of_factors = 3 * (a[other] + b[other]) / 2 @ (a[key] + b[key]) / 2
    name = key.removeprefix("base_model.model.").replace("lora_A.", "")
    stored = load_file(tmp_path / "out" / "model.safetensors")[name] - load_file(base / "model.safetensors")[name]
    assert (stored - of_factors).abs().max() > 0.1 * of_factors.abs().max()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_weights_1_and_0_give_the_merge_of_the_first(two: list[Path], dtype: str, tmp_path: Path) -> None:
    combined(two, tmp_path / "out", weights=[1, 0], dtype=dtype)
    merge(two[0], tmp_path / "alone", dtype=dtype, check=False)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "alone"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert verify([two[0], tmp_path / "out"], VerifyOptions(device="cpu")).holds


@pytest.mark.parametrize("order", [1, -1])
def test_with_its_base_the_update_is_scaled(order: int, two: list[Path], base: Path, tmp_path: Path) -> None:
    models = [two[0], base][::order]
    merge(models[0], tmp_path / "out", others=models[1:], weights=[0.7, 0.3][::order], check=order == 1)
    tuned, untrained = weights_of(two[0], base), weights_of(base)
    expected = {name: untrained[name] + 0.7 * (tuned[name] - untrained[name]) for name in tuned}
    assert largest_error(tmp_path / "out", expected) < 2e-7
    assert SentenceEncoder.from_pretrained(tmp_path / "out", device="cpu").prompt == PROMPT


@pytest.mark.needs("bitsandbytes")
def test_the_base_of_a_quantised_training_is_dequantised(base: Path, tmp_path: Path) -> None:
    run = save_adapter(base, tmp_path / "a", 0, LoraSettings(rank=2, alpha=6, targets=["q_proj"]), bits=4)
    merge(run, tmp_path / "out", others=[base], check=False)
    merge(run, tmp_path / "alone", check=False)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "alone"))
    stored = load_file(base / "model.safetensors")
    assert torch.equal(ours["layers.0.mlp.up_proj.weight"], theirs["layers.0.mlp.up_proj.weight"])
    assert not torch.equal(ours["layers.0.mlp.up_proj.weight"], stored["layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_whole_models_an_adapter_and_a_merged_model(
    dtype: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes = [save_whole("llama", tmp_path / str(seed), seed) for seed in range(2)]
    run = save_adapter(base, tmp_path / "a", 2)
    merge(run, tmp_path / "merged", dtype="bfloat16", check=False)
    models = [wholes[0], wholes[1], run, tmp_path / "merged", base]
    monkeypatch.setattr(merge_module, "SHARD_BYTES", 20_000)
    combined(models, tmp_path / "out", weights=[0.1, 0.2, 0.3, 0.3, 0.1], dtype=dtype)
    parts = [weights_of(model, base) for model in models]
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    for file in files:
        for name, tensor in load_file(file).items():
            expected = sum(share * part[name] for share, part in zip([0.1, 0.2, 0.3, 0.3, 0.1], parts, strict=True))
            error = (tensor.double() - expected).abs() / expected.abs().max()
            assert tensor.dtype == getattr(torch, dtype)
            assert error.max() < (2e-7 if dtype == "float32" else 2**-8), name


def other_prompt(base: Path, folder: Path) -> Path:
    return save_adapter(base, folder, 1, prompt="plain")


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one weight": (None, {"weights": [1]}, r"expected 2 numbers.*\[1\]"),
    "negative": (None, {"weights": [1.5, -0.5]}, "0 or larger"),
    "nan": (None, {"weights": [float("nan"), 1]}, "nan"),
    "infinite": (None, {"weights": [float("inf"), 1]}, "inf"),
    "zeros": (None, {"weights": [0, 0]}, "not all 0"),
    "prompt": (other_prompt, {}, "b and .*a do not belong together: prompt"),
    "pooling": (lambda base, b: save_adapter(base, b, 1, prompt=PROMPT, pooling="mean"), {}, "pooling: .*last.*mean"),
    "length": (lambda base, b: save_adapter(base, b, 1, prompt=PROMPT, max_length=50), {}, "max_length.*got 50"),
    "base": (
        lambda base, b: save_adapter(save_tiny_base("llama", b.parent / "base2", seed=1), b, 1, prompt=PROMPT),
        {},
        "fingerprint of the base: expected .*, got",
    ),
    "bare base": (lambda base, b: save_tiny_base("llama", b, seed=1), {}, "fingerprint"),
    "shapes": (
        lambda base, b: save_whole("mistral", b, 1, prompt=PROMPT, pooling="last", max_length=128),
        {},
        "(shapes|config)",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_do_not_belong_together_are_refused(reason: str, base: Path, tmp_path: Path) -> None:
    make, options, message = REFUSED[reason]
    first = save_adapter(base, tmp_path / "a", 0, prompt=PROMPT)
    second = (make or (lambda base, b: save_adapter(base, b, 1, prompt=PROMPT)))(base, tmp_path / "b")
    kept = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        merge(first, tmp_path / "out", others=[second], device="cpu", **options)
    assert contents(tmp_path) == kept


def test_a_weight_of_one_model_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "a", 0)
    with pytest.raises(ValueError, match="--weights: expected several models, got one"):
        merge(adapter, tmp_path / "out", weights=[0.5])


def test_whole_models_of_other_configuration_or_tokenizer_are_refused(tmp_path: Path) -> None:
    first = save_whole("llama", tmp_path / "a", 0)
    second = save_whole("llama", tmp_path / "b", 1)
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ArtifactError, match=r"rms_norm_eps in config\.json: expected 1e-06, got 0\.001"):
        merge(first, tmp_path / "out", others=[second], device="cpu")
    (second / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((second / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (second / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ArtifactError, match=r"do not belong together: tokenizer\. "):
        merge(first, tmp_path / "out", others=[second], device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_merged_model_has_the_base_of_its_adapter(two: list[Path], base: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    merge(two[0], whole, check=False)
    with pytest.raises(ArtifactError, match=r"has [0-9a-f]{16}"):
        merge(whole, tmp_path / "out", others=[save_tiny_base("llama", tmp_path / "c", seed=1)], check=False)
    with pytest.raises(ArtifactError, match="fingerprint of the base"):
        merge(
            whole,
            tmp_path / "out",
            others=[save_adapter(tmp_path / "c", tmp_path / "d", 0, prompt=PROMPT)],
            check=False,
        )
    of_whole, of_base, of_two = weights_of(whole), weights_of(base), weights_of(two[1], base)
    for models, expected in (
        ([two[1], whole], of_two),
        ([whole, two[1]], of_two),
        ([base, whole], of_base),
        ([whole, base], of_base),
    ):
        combined(models, tmp_path / "out")
        half = {name: (of_whole[name] + expected[name]) / 2 for name in of_whole}
        assert largest_error(tmp_path / "out", half) < 1e-6  # rounding of float32
    record = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert record["base_fingerprint"] == json.loads((whole / "merge.json").read_text())["base_fingerprint"] is not None


def test_an_adapter_trained_on_a_merged_model_is_combined_with_it(two: list[Path], base: Path, tmp_path: Path) -> None:
    merge(two[0], tmp_path / "whole", check=False)
    second = save_adapter(tmp_path / "whole", tmp_path / "second", 3)
    models = [second, tmp_path / "whole"]
    expected = [weights_of(second, tmp_path / "whole"), weights_of(tmp_path / "whole")]
    for order, origin in ((1, tmp_path / "whole"), (-1, base)):
        combined(models[::order], tmp_path / "out", weights=[0.3, 0.7][::order])
        mixed = {name: 0.3 * expected[0][name] + 0.7 * expected[1][name] for name in expected[0]}
        assert largest_error(tmp_path / "out", mixed) < 2e-7
        assert json.loads((tmp_path / "out" / "merge.json").read_text())["base"] == str(origin)
    with pytest.raises(ArtifactError, match="fingerprint of the base"):
        merge(second, tmp_path / "out", others=[two[1]], check=False)  # its base is the base of the merged model


def test_a_prompt_without_a_tail_changes_no_tokens(base: Path, tmp_path: Path) -> None:
    """The tokenizer of a merged model has another flag for names of special tokens, which an encoder does not use."""
    models = [save_adapter(base, tmp_path / name, seed, prompt="query") for seed, name in enumerate("ab")]
    merge(models[0], tmp_path / "whole", check=False)
    combined([tmp_path / "whole", models[1]], tmp_path / "out")


def test_a_saved_encoder_is_needed(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected a saved encoder"):
        merge(base, tmp_path / "out", others=[base])


def test_an_adapter_is_not_replaced(two: list[Path]) -> None:
    """`merge A B` without OUT."""
    kept = contents(two[1])
    with pytest.raises(ArtifactError, match="is not the result of a merge"):
        cli.run(["merge", str(two[0]), str(two[1])])
    assert contents(two[1]) == kept


@pytest.mark.parametrize("target", ["a", "b", "base", "b/inside", "."])
def test_no_input_is_overwritten(target: str, two: list[Path], tmp_path: Path) -> None:
    kept = contents(tmp_path)
    with pytest.raises(ArtifactError, match="Choose another folder"):
        merge(two[0], tmp_path / target, others=[two[1]])
    assert contents(tmp_path) == kept


@pytest.mark.parametrize(
    "fault", ["interrupted", "one weight", pytest.param("one model twice", marks=pytest.mark.slow)]
)
def test_a_fault_leaves_nothing(fault: str, two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call writes the combination; the first writes the first encoder alone."""
    write, calls = merge_module._write_weights, list[Path]()

    def faulty(folder: Path, skeleton: Any, composite: Any, weights: MergedWeights, *options: Any) -> None:
        calls.append(folder)
        if len(calls) == 2 and fault == "one model twice":
            weights = MergedWeights([weights.parts[0]] * 2, weights.shares)
        write(folder, skeleton, composite, weights, *options)
        if len(calls) == 2 and fault == "interrupted":
            raise KeyboardInterrupt
        if len(calls) == 2 and fault == "one weight":
            path = folder / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1  # the exponent of the last weight
            path.write_bytes(data)

    monkeypatch.setattr(merge_module, "_write_weights", faulty)
    kept = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt if fault == "interrupted" else VerificationError):
        merge(two[0], tmp_path / "out", others=[two[1]], device="cpu")
    assert len(calls) == 2
    assert contents(tmp_path) == kept


def test_a_combination_that_overflows_is_refused(tmp_path: Path) -> None:
    models = [save_whole("llama", tmp_path / name, seed) for seed, name in enumerate("ab")]
    weights = load_file(models[1] / "model.safetensors")
    weights["layers.1.mlp.down_proj.weight"][0, 0] = 3e5  # half of it exceeds the largest float16, 65504
    save_file(weights, models[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match="stored weights differ"):
        merge(models[0], tmp_path / "out", others=[models[1]], dtype="float16", device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_gives_other_vectors_is_not_written(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal weights in a folder with another configuration: found by the vectors of the first encoder."""

    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))

    monkeypatch.setattr(merge_module, "write_earlier_names", changed)
    with pytest.raises(VerificationError, match="exceeds"):
        merge(two[0], tmp_path / "out", others=[two[1]], device="cpu")
    assert not (tmp_path / "out").exists()


def test_command_and_card(
    two: list[Path], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    models = [str(two[0]), str(two[1]), str(base)]
    cli.run(["merge", *models, str(out), "--weights", "5", "3", "2"])
    shown = capsys.readouterr().out
    assert "(0.5 and 0.3 and 0.2): 0 of" in shown
    assert "The comparison is of" in shown
    report = json.loads((out / REPORT_NAME).read_text())
    assert report["holds"] is True
    record = json.loads((out / "merge.json").read_text())
    assert record["parts"] == [{"name": name, "weight": w} for name, w in zip(models, (0.5, 0.3, 0.2), strict=True)]
    assert record["base"] == str(base)
    readme = (out / "README.md").read_text(encoding="utf-8")
    assert "combination of the weights of several models: 0.5 × `a`, 0.3 × `b`, 0.2 × `base`." in readme
    assert "0 of" in readme
    assert str(tmp_path) not in readme, "the card is published, without local paths"
    record["bits"] = 4
    (out / "merge.json").write_text(json.dumps(record))
    with monkeypatch.context() as patch:
        patch.setattr(
            "angle_llm.model.layers.quantization.need_library", Mock(side_effect=MissingLibraryError("bits: none"))
        )
        verification = verify([out, out], VerifyOptions(device="cpu"))
    assert (verification.holds, verification.base_note) == (True, "unknown: cannot be opened (bits: none)")


def test_no_verify_skips_the_comparison(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["merge", *map(str, two), str(tmp_path / "out"), "--no-verify"])
    assert "NOT verified (--no-verify).\n" in capsys.readouterr().out
    combined(two, tmp_path / "again")
    assert contents(tmp_path / "out")["model.safetensors"] == contents(tmp_path / "again")["model.safetensors"]
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text()) == {"holds": None}
