"""`angle-llm plan`: its forecast is the memory of a real step, and no weights are loaded for it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import run
from tiny import (
    HYBRID,
    KINDS,
    LIKE_ANOTHER,
    QUICK_KINDS,
    micro_batches_of,
    save_tiny_base,
    tiny_backbone,
    tiny_encoder,
    train_a_little,
)
from tiny_tokenizers import TOKENIZERS
from transformers import AutoModel

from angle_llm import AngleObjective, SentenceEncoder, TextBatch, cli
from angle_llm.data.examples import load_examples
from angle_llm.data.order import Draws
from angle_llm.losses import Relation
from angle_llm.memory.budget import ROUND_TOKENS, USABLE
from angle_llm.memory.device_memory import GIB, LIVE_NUMBERS, LOSS_BLOCKS, LOSS_COPIES, Device, Sharding
from angle_llm.memory.plan import forecast, render
from angle_llm.memory.step_memory import META, FusedKernels, MemoryLedger, PassMemory, count_passes
from angle_llm.model import meta_model
from angle_llm.model.layers import quantization
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.saved_lora import lora_of_run
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.parsing import SettingsError, settings_from_dict
from angle_llm.settings.train import DataSource, LoraSettings, ModelSettings, PlanSettings, TrainSettings
from angle_llm.train.batches import StepSchedule
from angle_llm.train.loading import load_encoder
from angle_llm.train.pretraining import TokenMasker, TokenPrediction
from angle_llm.train.step import boundary_step
from angle_llm.train.token_budget import TokenBudget

LORA = LoraSettings(rank=4, alpha=4)
EVERYTHING_KEPT = 10**9


@pytest.fixture(scope="module")
def examples() -> list[Any]:
    return load_examples(DataSource(limit=64)).examples


def real_encoder(kind: str, dtype: torch.dtype, lora: LoraSettings | None, bits: int | None = None) -> SentenceEncoder:
    encoder = tiny_encoder(kind, dtype, max_length=100)
    if bits is not None:
        quantization.quantize(encoder.model.backbone, bits)
    if lora is None:
        encoder.model.requires_grad_(True)
    else:
        encoder.add_lora(lora)
        train_a_little(encoder.model)
    encoder.model.train()
    return encoder


def meta_model_of(kind: str, dtype: torch.dtype, lora: LoraSettings | None) -> Any:
    family = (KINDS | HYBRID)[kind]
    config = family.config()
    tiny_copy = SentenceEncoder(meta_model.tiny_copy(config), TOKENIZERS[family.tokenizer]())
    return meta_model.put_in(tiny_copy.model, meta_model.meta_backbone(config, dtype, lora))


def counted(model: Any, plan: Plan) -> PassMemory:
    """Memory of passes that keep the activations of all micro-batches of a plan."""
    passes = [count_passes(model, micro_batch, on_gpu=False) for micro_batch in micro_batches_of(plan)]
    kept = sum(memory.kept for memory in passes)
    return PassMemory(kept, kept + max(memory.peak - memory.kept for memory in passes))


def ledger_of(encoder: SentenceEncoder) -> MemoryLedger:
    """A ledger of a step whose weights have gradients already, as a forecast counts."""
    for parameter in encoder.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    gradients = [parameter.grad for parameter in encoder.model.parameters() if parameter.grad is not None]
    return MemoryLedger([*encoder.model.parameters(), *encoder.model.buffers(), *gradients])


def real_step(encoder: SentenceEncoder, plan: Plan, batch: TextBatch, graph_tokens: int = EVERYTHING_KEPT) -> int:
    """Peak memory of a real step, without gradients of weights."""
    with ledger_of(encoder) as ledger:
        boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=graph_tokens)
    return ledger.peak


def saved_bytes(encoder: SentenceEncoder, plan: Plan, batch: TextBatch) -> int:
    """Bytes that autograd keeps in a real step, each storage once, without weights."""
    own = {tensor.untyped_storage()._cdata for tensor in [*encoder.model.parameters(), *encoder.model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=EVERYTHING_KEPT)
    return sum(size for key, size in kept.items() if key not in own)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(
            pytest.param(kind, torch.float32, marks=[pytest.mark.slow] * (kind in LIKE_ANOTHER | {"opt"}))
            for kind in KINDS
        ),
        ("llama", torch.bfloat16),
        pytest.param("bert", torch.bfloat16, marks=pytest.mark.slow),
        ("lfm2", torch.float32),
        *(pytest.param(kind, torch.float32, marks=pytest.mark.slow) for kind in ("qwen3_5_text", "falcon_h1", "mamba")),
    ],
)
def test_a_step_without_weights_takes_the_memory_of_the_real_one(
    kind: str, dtype: torch.dtype, examples: list[Any]
) -> None:
    batch = TextBatch.from_examples(examples[:24])
    encoder = real_encoder(kind, dtype, LORA)
    plan = encoder.plan(batch.texts, 512)
    forecasted = counted(meta_model_of(kind, dtype, LORA), plan)
    assert forecasted.kept == pytest.approx(saved_bytes(encoder, plan, batch), rel=0.1)
    assert forecasted.peak == pytest.approx(real_step(encoder, plan, batch), rel=0.05)


@pytest.mark.parametrize(
    ("lora", "bits"),
    [
        (LoraSettings(rank=4, alpha=4, dropout=0.1), None),
        (None, None),
        pytest.param(LORA, 4, marks=pytest.mark.needs("bitsandbytes")),
    ],
)
def test_the_forecast_with_dropout_all_weights_and_a_quantized_base(
    lora: LoraSettings | None, bits: int | None, examples: list[Any]
) -> None:
    batch = TextBatch.from_examples(examples[:24])
    dtype = torch.bfloat16 if bits else torch.float32
    encoder, model = real_encoder("llama", dtype, lora, bits), meta_model_of("llama", dtype, lora)
    plan = encoder.plan(batch.texts, 4096)
    forecasted = counted(model, plan)
    assert forecasted.peak == pytest.approx(real_step(encoder, plan, batch), rel=0.1 if bits else 0.05)


@pytest.mark.needs("bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_the_bytes_of_a_quantized_base(bits: int) -> None:
    config = KINDS["llama"].config()
    config.hidden_size, config.intermediate_size = 256, 512
    real = AutoModel.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    expected = meta_model.frozen_bytes(meta_model.meta_backbone(config, torch.bfloat16, LORA), bits=bits)
    quantization.quantize(real, bits)
    tensors: list[torch.Tensor] = [*real.parameters(), *real.buffers()]
    if bits == 4:
        states = [parameter.quant_state for parameter in real.parameters() if hasattr(parameter, "quant_state")]
        tensors += [tensor for state in states for tensor in (state.absmax, state.state2.absmax)]
    assert expected == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.02)


def test_a_cached_step_takes_its_largest_micro_batch_and_the_embeddings(examples: list[Any]) -> None:
    batch = TextBatch.from_examples(examples)
    encoder = real_encoder("llama", torch.float32, LORA)
    plan = encoder.plan(batch.texts, 256)
    largest = max(plan.groups, key=lambda group: group.computed_tokens)
    forecasted = count_passes(meta_model_of("llama", torch.float32, LORA), largest.make(), on_gpu=False)
    embeddings = 4 * 32 * len(batch)
    assert len(plan.groups) > 3
    assert forecasted.peak + 2 * embeddings == pytest.approx(real_step(encoder, plan, batch, 0), rel=0.1)


def loss_bytes(objective: AngleObjective, batch: TextBatch, dimensions: int) -> int:
    """Peak memory of a loss and its gradient, for random embeddings."""
    with MemoryLedger() as ledger:
        rows_UD = torch.randn(len(batch), dimensions, requires_grad=True)
        relation = Relation(batch.left, batch.right, batch.score, group=batch.group, teacher_vectors=rows_UD.detach())
        torch.autograd.grad(objective(rows_UD, relation).loss, rows_UD)
    return ledger.peak


@pytest.mark.parametrize("dimensions", [64, 1024])
@pytest.mark.parametrize(
    "objective",
    [
        AngleObjective(cosine_weight=1, angle_weight=1),
        AngleObjective(teacher_similarity_weight=1, teacher_vector_weight=1),
    ],
)
def test_the_forecast_of_a_loss_is_an_upper_bound(
    objective: AngleObjective, dimensions: int, examples: list[Any]
) -> None:
    batch = TextBatch.from_examples(examples)
    assert loss_bytes(objective, batch, dimensions) < LOSS_COPIES * 4 * dimensions * len(batch) + LOSS_BLOCKS


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_the_tiny_copy_has_the_properties_of_the_model(kind: str) -> None:
    real = tiny_encoder(kind)
    tiny_copy = SentenceEncoder(meta_model.tiny_copy(KINDS[kind].config()), TOKENIZERS[KINDS[kind].tokenizer]())
    assert (tiny_copy.pooling, tiny_copy.model.options.causal, tiny_copy.max_length) == (
        real.pooling,
        real.model.options.causal,
        real.max_length,
    )
    assert tiny_copy.layouts == real.layouts


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_meta_backbone_has_the_parameters_of_the_model_and_no_memory(kind: str) -> None:
    real = tiny_backbone(kind)
    without_weights = meta_model.meta_backbone(KINDS[kind].config(), torch.float32)
    shapes = [{name: one.shape for name, one in model.named_parameters()} for model in (real, without_weights)]
    assert shapes[0] == shapes[1]
    assert {parameter.device for parameter in without_weights.parameters()} == {META}
    real.requires_grad_(False)
    assert meta_model.frozen_bytes(real) == meta_model.frozen_bytes(without_weights.requires_grad_(False))
    assert FlopsPerToken.of(real) == FlopsPerToken.of(without_weights)


def test_a_gpu_keeps_no_scores_and_one_byte_of_a_dropout_mask() -> None:
    query, key, value = (torch.empty(1, 2, 512, 64, device=META, dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    kept = {}
    for name, mode in (("apart", MemoryLedger()), ("fused", FusedKernels(on_gpu=True))):
        with MemoryLedger([query, key, value]) as ledger, mode:
            answer = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            kept[name] = ledger.live
            torch.autograd.backward(answer.sum())
        assert query.grad.shape == query.shape
    assert kept["fused"] == query.nbytes + 4 * 2 * 512  # the result, and one number per query
    assert kept["apart"] > 2 * 512 * 512 * 2  # scores too
    with MemoryLedger([query]) as ledger, FusedKernels(on_gpu=True):
        assert torch.nn.functional.dropout(query, 0.1, training=True).shape == query.shape
        assert ledger.peak == query.nbytes + query.numel()


def device(sharding: Sharding, kind: str = "cuda") -> Device:
    return Device(
        kind=kind,
        sharding=sharding,
        base_bytes=8 * GIB,
        trained_bytes=GIB,
        trained_numbers=GIB // 4,
        moment_bytes=2 * GIB,
        bucket_numbers=1024**2,
        embedding_bytes=2**20,
        summed_bytes=GIB // 2,
    )


def test_zero_stages_partition_memory() -> None:
    alone, zero1, zero2, zero3 = (device(Sharding(4, zero)).memory(5 * GIB) for zero in range(4))
    assert alone.base_weights == zero2.base_weights == 8 * GIB
    assert zero3.base_weights == 2 * GIB
    assert alone.optimizer == 2 * GIB
    assert zero1.optimizer == 3 * GIB // 4  # with DeepSpeed's own copy of the weights
    assert zero3.optimizer == GIB // 2
    assert zero1.gradients == GIB
    assert zero2.gradients == GIB // 4
    assert alone.exchange == GIB // 2
    assert device(Sharding()).memory(5 * GIB).exchange == 0
    assert alone.activations == zero3.activations == 5 * GIB
    in_float32 = replace(device(Sharding(4, 3)), number_bytes=4).memory(5 * GIB)
    assert in_float32.exchange - zero3.exchange == 2 * LIVE_NUMBERS
    offloaded = device(Sharding(4, 3, "optimizer"))
    assert offloaded.memory(5 * GIB).optimizer == 0
    assert offloaded.host_bytes == GIB // 2
    far = device(Sharding(4, 3, "parameters"))
    assert far.memory(5 * GIB).base_weights == 0
    assert far.host_bytes == GIB // 2 + 9 * GIB // 4


def test_fsdp_partitions_the_base_only() -> None:
    alone = device(Sharding(4)).memory(5 * GIB)
    fsdp = replace(device(Sharding(4, fsdp=True)), gathered_bytes=3 * GIB).memory(5 * GIB)
    assert fsdp == replace(alone, base_weights=2 * GIB, exchange=GIB // 2 + 3 * GIB)


def test_the_larger_of_passes_and_update_counts() -> None:
    update = device(Sharding(1, 1)).memory(2000)
    assert update.gradients == GIB
    assert update.optimizer == 4 * GIB  # weights and averages, and one more tensor per weight during the update
    assert update.activations == 0
    assert device(Sharding(), "cpu").memory(2000).optimizer == 2 * GIB
    passes = device(Sharding()).memory(5 * GIB)
    assert (passes.optimizer, passes.activations) == (2 * GIB, 5 * GIB)
    assert passes.total == sum(vars(passes).values())


def settings(folder: Path, **changed: Any) -> PlanSettings:
    values: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "float32", "max_length": 100},
        "lora": {"rank": 4, "alpha": 4},
        "data": {"limit": 100},
        "batch_size": 16,
        "epochs": 2,
        **changed,
    }
    return settings_from_dict(PlanSettings, values, where="test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = save_tiny_base("llama", tmp_path_factory.mktemp("base"))
    (folder / "model.safetensors").unlink()
    return folder


def test_work_is_counted_by_the_real_planner_without_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = settings(folder)
    found = forecast(plan)
    examples = load_examples(plan.data).examples
    encoder = tiny_encoder("llama", max_length=100)
    batches = [indices for _, step in StepSchedule(Draws((100,), (100,)), plan).after(0) for indices in step]
    texts = [TextBatch.from_examples([examples[index] for index in indices]).texts for indices in batches]
    plans = [encoder.plan(some, 8192) for some in texts]
    assert found.work.steps == len(plans) == 14
    assert found.work.sampled_groups == 14
    assert found.work.logical_tokens == sum(one.logical_tokens for one in plans)
    assert found.work.computed_tokens == sum(one.computed_tokens for one in plans)
    assert found.work.largest_group == max(one.computed_tokens for one in plans)
    assert found.work.kept_tokens == found.work.largest_group
    assert (found.work.layout, found.work.cached_groups) == ("trie", 0)
    assert found.architecture == "llama"
    assert found.trainable < found.parameters
    assert forecast(settings(folder, epochs=9, max_steps=14)).work == found.work
    monkeypatch.setattr("angle_llm.memory.budget.SAMPLED_EXAMPLES", 16)
    one_batch = forecast(settings(folder)).work
    assert one_batch.sampled_groups == 1
    assert one_batch.computed_tokens == pytest.approx(found.work.computed_tokens, rel=0.15)


def test_the_forecast_is_of_the_largest_step_and_of_a_full_budget(folder: Path) -> None:
    kept = forecast(settings(folder, device="cpu"))
    assert kept.at_budget.activations > 3 * kept.expected.activations
    cached = forecast(settings(folder, device="cpu", graph_tokens=0, micro_batch_tokens=200))
    assert cached.work.cached_groups == cached.work.sampled_groups
    assert cached.work.kept_tokens <= 200
    assert cached.expected.activations < kept.expected.activations / 2
    full = forecast(settings(folder, lora={"rank": 0}))
    assert full.trainable == full.parameters
    assert full.expected.optimizer >= 8 * full.trainable
    quarter = forecast(settings(folder, processes=4))
    assert quarter.work.kept_tokens < kept.work.kept_tokens / 2


def test_lora_on_a_half_precision_base_with_zero_3(folder: Path) -> None:
    model = {"path": str(folder), "dtype": "bfloat16"}
    stage_2, stage_3 = (
        forecast(settings(folder, model=model, processes=2, zero=zero)).kept_per_token for zero in (2, 3)
    )
    assert stage_2 < stage_3 < 2 * stage_2  # the layers of peft keep more than the fused ones


def test_mntp_adds_the_memory_of_its_logits(folder: Path) -> None:
    half: dict[str, Any] = {"task": "mntp", "mask_fraction": 0.5}
    model = {**vars(settings(folder).model), "attention": "bidirectional"}
    plain = forecast(settings(folder, device="cpu", model=model))
    found = forecast(settings(folder, device="cpu", model=model, pretraining=half))
    vocabulary, tokens = KINDS["llama"].config().vocab_size, found.work.kept_tokens
    output = torch.nn.Linear(1, vocabulary, bias=False).requires_grad_(False)
    prediction = TokenPrediction(output, TokenMasker(vocabulary, vocabulary, 0, frozenset(), 0.5, seed=0))
    state_BTD = torch.zeros(1, tokens, 1, requires_grad=True)
    label_BT = torch.arange(tokens)[None] % 2 - 1
    with MemoryLedger([*prediction.parameters(), state_BTD]) as ledger:
        prediction.sums(state_BTD, label_BT, torch.zeros_like(label_BT), 1).sum().backward()
    # 15 %: the real step also has tensors with a number per token.
    added = found.expected.activations - plain.expected.activations * tokens / plain.work.kept_tokens
    assert added == pytest.approx(ledger.peak, rel=0.15)
    with pytest.raises(SettingsError, match="expected bidirectional attention, got causal"):
        forecast(settings(folder, pretraining=half))


@pytest.mark.parametrize("kind", ["llama", pytest.param("llama-tied", marks=pytest.mark.slow)])
def test_mntp_adds_the_weight_of_an_output_layer_of_its_own(kind: str, tmp_path: Path) -> None:
    base = save_tiny_base(kind, tmp_path / "base")
    model = {"path": str(base), "attention": "bidirectional", "pooling": "mean", "dtype": "float32"}
    lora = {"rank": 4, "alpha": 4, "dropout": 0.1}
    plain, mntp = (
        forecast(settings(base, model=model, lora=lora, pretraining={"task": task})) for task in ("simcse", "mntp")
    )
    config = KINDS[kind].config()
    output = 0 if kind == "llama-tied" else 4 * config.vocab_size * config.hidden_size
    assert mntp.expected.base_weights - plain.expected.base_weights == output
    assert plain.work.operations == 2 * mntp.work.operations  # SimCSE encodes each text twice


def test_an_adapter_on_the_first_layers_is_planned_without_the_others(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    encoder = SentenceEncoder.from_pretrained(base, device="cpu")
    encoder.add_lora(LORA)
    short = encoder.truncated(dimensions=None, layers=1)
    short.save_pretrained(tmp_path / "short")
    planned = forecast(settings(base, model={"path": str(tmp_path / "short"), "dtype": "float32"}))
    parts = short.model.backbone.named_parameters()
    sizes = {name: weight.numel() for name, weight in parts}
    assert planned.parameters == sum(sizes.values())
    assert planned.trainable == sum(size for name, size in sizes.items() if "lora_" in name)


def test_settings_that_the_run_refuses_are_refused(folder: Path) -> None:
    layers = KINDS["llama"].config().num_hidden_layers
    assert forecast(settings(folder, nested={"layers": [layers - 1]})).parameters
    with pytest.raises(ValueError, match=rf"different numbers in 1 .. {layers - 1}.*got \[{layers}\]"):
        forecast(settings(folder, nested={"layers": [layers]}))
    with pytest.raises(SettingsError, match="expected dropout above 0"):
        forecast(settings(folder, pretraining={"task": "simcse"}))


def test_the_layout_is_that_of_the_planned_device(tmp_path: Path) -> None:
    """Also of weights that are loaded on the CPU and moved to a GPU by ZeRO-3: attention dropout is padded there."""
    bert = save_tiny_base("bert", tmp_path / "bert")
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "attention_probs_dropout_prob": 0.1}))
    assert forecast(settings(bert)).work.layout == "packed"
    assert forecast(settings(bert, device="cuda")).work.layout == "padded"
    zero_3 = SimpleNamespace(
        partition="ZeRO-3", zero_stage=3, is_main=True, world_size=1, device=torch.device("cuda"),
        load_device=torch.device("cpu"), max=int, gather=lambda layouts: [layouts],
    )  # fmt: skip
    train = TrainSettings(model=ModelSettings(path=str(bert)))
    encoder, _ = load_encoder(resolve_model(str(bert)), train, zero_3)  # type: ignore[arg-type]
    assert encoder.layouts.layout == "padded"


@pytest.mark.parametrize("is_main", [True, False])
def test_all_ranks_of_zero_3_compute_products_in_bfloat16(is_main: bool, tmp_path: Path) -> None:
    """Only the main rank loads the weights; the others have a model on the meta device."""
    folder = save_tiny_base("llama", tmp_path / "base")
    zero_3: Any = SimpleNamespace(
        partition="ZeRO-3", zero_stage=3, is_main=is_main, world_size=1, device=torch.device("cpu"),
        load_device=torch.device("cpu"), max=int, gather=lambda layouts: [layouts],
    )  # fmt: skip
    train = TrainSettings(model=ModelSettings(path=str(folder)), lora=LoraSettings(rank=0))
    assert train.autocasts
    assert load_encoder(resolve_model(str(folder)), train, zero_3)[0].model.options.autocasts


def test_runs_that_training_refuses_are_not_planned(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {number}", "label": f"class {number % 2}"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SettingsError, match="class-weight above 0"):
        forecast(settings(folder, data={"path": str(tmp_path / "rows.jsonl"), "format": "labelled_text"}))
    with pytest.raises(SettingsError, match="teacher scores"):
        forecast(settings(folder, objective={"kl_weight": 1.0}))
    with pytest.raises(SettingsError, match="adamw_8bit excludes --zero 1"):
        settings(folder, optimizer={"name": "adamw_8bit"}, zero=1)


def test_the_largest_budgets_that_fit_are_chosen(folder: Path) -> None:
    gpu = {"device": "cuda", "activation_checkpointing": "never"}
    plenty = forecast(settings(folder, memory=64, **gpu))
    assert plenty.budget == TokenBudget(16_384, 16_384)  # no step has more
    assert plenty.at_budget.total == pytest.approx(plenty.choice.forecast_bytes, rel=0.01)
    tight = settings(folder, memory=(plenty.at_budget.total - plenty.at_budget.activations / 2) / USABLE / GIB, **gpu)
    found = forecast(tight)
    budget = found.budget
    assert found.choice.fits
    assert 0 < budget.graph_tokens < 16_384
    assert budget.graph_tokens % ROUND_TOKENS == 0
    assert found.choice.forecast_bytes <= USABLE * tight.memory * GIB
    assert f"--micro-batch-tokens {budget.micro_batch_tokens} --graph-tokens {budget.graph_tokens}" in render(
        tight, found
    )
    assert not forecast(settings(folder, memory=0.1, **gpu)).choice.fits


def test_saved_encoders_are_planned(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama", pooling="last", max_length=77, base=str(save_tiny_base("llama", tmp_path / "base")))
    encoder.save_pretrained(tmp_path / "whole")
    tiny_copy, _ = meta_model.tiny_encoder_copy(resolve_model(str(tmp_path / "whole")), ModelSettings())
    assert (tiny_copy.max_length, tiny_copy.prompt) == (77, encoder.prompt)
    encoder.add_lora(LORA)
    encoder.save_pretrained(tmp_path / "adapter")
    tiny_copy, _ = meta_model.tiny_encoder_copy(source := resolve_model(str(tmp_path / "adapter")), ModelSettings())
    assert (tiny_copy.max_length, tiny_copy.prompt) == (77, encoder.prompt)
    assert lora_of_run(source, ModelSettings(), LoraSettings()) == replace(
        LORA, targets=["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    )


def test_the_command_takes_the_flags_of_train(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {folder}, dtype: bfloat16, max_length: 100}}\ndata: {{limit: 50}}\n")
    sharded = ["--processes", "2", "--zero", "2", "--offload", "optimizer"]
    arguments = ["--config", str(config), "--lora.rank", "2", "--memory", "24", *sharded]
    done = run("angle-llm", "plan", *arguments, "--json", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "plan.json").read_text())
    given = content["settings"]
    assert (given["lora"]["rank"], given["processes"], given["zero"], given["offload"]) == (2, 2, 2, "optimizer")
    with pytest.raises(SettingsError, match=r"ZeRO-3 cannot train with --pretraining\.task simcse"):
        cli.run(["plan", *arguments, "--zero", "3", "--pretraining.task", "simcse"])
