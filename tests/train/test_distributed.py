"""Several processes give the result of one, with every strategy; unsupported launches are refused."""

import importlib.util
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from composites import CONFIGS
from programs import run
from tiny import HYBRID, KINDS, tiny_encoder
from transformers import CONFIG_MAPPING, AlbertConfig, AutoModel

from angle_llm.device import matmul_precision
from angle_llm.io import ALLOCATOR
from angle_llm.memory.step_memory import MemoryLedger
from angle_llm.model.heads import EmbeddingModel, EmbeddingOptions
from angle_llm.model.layers.activation_checkpointing import checkpointing_problem
from angle_llm.run import resolve_models
from angle_llm.settings.parsing import MissingLibraryError, SettingsError
from angle_llm.settings.train import ModelSettings, OptimizerSettings, TrainSettings
from angle_llm.train.distributed import Processes, _deepspeed_plugin, check_launch
from angle_llm.train.strategies import DataParallelStrategy, FsdpStrategy


def program(name: str, *arguments: str) -> str:
    """Output of a program of this folder; asserts exit code 0."""
    done = run("python", Path(__file__).with_name(name), *arguments, seconds=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


needs_deepspeed = pytest.mark.needs("deepspeed")


@pytest.mark.parametrize(
    ("steps", "worlds"), [("5", "13"), pytest.param("50", "1234", marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_any_number_of_processes_gives_the_same_adapter_in_float64(tmp_path: Path, steps: str, worlds: str) -> None:
    printed = program("distributed_runs.py", str(tmp_path), "float64", steps, worlds)
    assert printed.count("adapters by") == len(worlds)


def test_options_of_the_loss_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    assert program("distributed_runs.py", str(tmp_path), "options").count("adapters by") == 2


def test_the_check_of_replicas_copies_no_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3000, 2000, bias=False)
    checked: list[float] = []
    monkeypatch.setattr(Processes, "check_equal", lambda _self, _name, value: checked.append(float(value)))
    for world_size in (1, 2):
        strategy = DataParallelStrategy(model, OptimizerSettings(), Processes(world_size=world_size))
        with MemoryLedger([model.weight]) as ledger:
            strategy.check_replicas()
        assert ledger.peak < 12 * model.weight.numel()
    values = model.weight.detach().double()
    assert checked == [pytest.approx(float(values.sum() + values.pow(2).sum()))], (
        "a single process has nothing to compare"
    )


@pytest.mark.slow
def test_accumulated_batches_together_give_the_adapter_of_the_batches_one_by_one(tmp_path: Path) -> None:
    printed = program("distributed_runs.py", str(tmp_path), "together")
    assert printed.count("adapters by") == 2


@needs_deepspeed
@pytest.mark.parametrize("names", [["ZeRO-3"], pytest.param([], marks=pytest.mark.slow)], ids=["stage 3", "all"])
def test_every_strategy_gives_the_result_of_one_process(tmp_path: Path, names: list[str]) -> None:
    printed = program("distributed_runs.py", str(tmp_path), "deepspeed", *names)
    assert printed.count("losses differ by") == (2 if names else 2 * (2 + 6)) + 1


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        pytest.param("dense", [], marks=pytest.mark.slow),
        pytest.param("attention", ["llama", "ZeRO-3"], marks=[pytest.mark.slow, needs_deepspeed]),
        *(
            pytest.param("attention", [kind], marks=pytest.mark.slow)
            for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2")
        ),
        pytest.param("dense", ["ZeRO-2"], marks=[pytest.mark.slow, needs_deepspeed]),
        pytest.param("whole", ["ZeRO-3"], marks=[pytest.mark.slow, needs_deepspeed]),
    ],
)
def test_variants_of_the_model_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, variant: str, names: list[str]
) -> None:
    """Bidirectional attention; Dense modules that are trained with the adapter; all weights trained."""
    assert program("distributed_runs.py", str(tmp_path), variant, *names).count("losses differ by") == 2


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS, HYBRID, CONFIGS], ids=["attention", "hybrid", "multimodal"])
def test_every_family_trains_on_two_processes_as_on_one(kinds: dict[str, Any], tmp_path: Path) -> None:
    names = [name for name in kinds if name not in HYBRID or name in CONFIG_MAPPING]
    assert program("distributed_runs.py", str(tmp_path), "families", *names).count("losses differ by") == 2 * len(names)


@pytest.mark.parametrize(
    ("arguments", "equal"),
    [
        (["llama"], 1),
        *(pytest.param([kind, "long"], 5, marks=pytest.mark.slow) for kind in ("llama", "gemma2", "mamba")),
    ],
    ids=["short", "llama", "gemma2", "mamba"],
)
def test_fsdp_gives_the_bytes_of_data_parallel(
    arguments: list[str], equal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")  # otherwise MKL rounds differently at other addresses
    assert program("distributed_runs.py", str(tmp_path), "fsdp", *arguments).count("the same bytes") == equal


def test_a_run_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    assert "moved: losses differ by" in program("distributed_runs.py", str(tmp_path), "elastic")


@pytest.mark.slow
@needs_deepspeed
def test_a_run_resumes_with_another_strategy(tmp_path: Path) -> None:
    assert "moved: losses differ by" in program("distributed_runs.py", str(tmp_path), "elastic", "ZeRO")


@pytest.mark.slow
@pytest.mark.needs("bitsandbytes", "deepspeed")
def test_quantised_bases_train_with_every_strategy(tmp_path: Path) -> None:
    printed = program("distributed_runs.py", str(tmp_path), "bits", "ZeRO-2")
    assert printed.count("losses differ by") == 3 * 2 * 3


@pytest.mark.skipif(sys.platform != "linux", reason="the program limits its address space")
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_one_process_out_of_memory_repeats_the_step_on_all(processes: int, tmp_path: Path) -> None:
    printed = program("distributed_runs.py", str(tmp_path), "shortage", str(processes), str(50 // processes))
    assert 1 <= int(printed.split(" repeated steps")[0].split()[-1]) <= 6
    assert "limited: losses differ by" in printed


@pytest.mark.parametrize("names", [[], pytest.param(["ZeRO-2"], marks=[pytest.mark.slow, needs_deepspeed])])
def test_a_failing_kernel_ends_the_run_and_names_the_flag(names: list[str], tmp_path: Path) -> None:
    assert "padded: losses differ by" in program("distributed_runs.py", str(tmp_path), "kernels", *names)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "FSDP 1": ("NO", {}, {"ACCELERATE_USE_FSDP": "true"}, "fsdp_version 2"),
    "FSDP, offload": (
        "FSDP",
        {},
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
        "fsdp_offload_params: false",
    ),
    "Megatron": ("MEGATRON_LM", {}, {}, "MEGATRON_LM"),
    "fp16": ("DEEPSPEED", {"fp16": {"enabled": True}}, {}, r"model\.dtype"),
    "tensor": ("DEEPSPEED", {"tensor_parallel": {"autotp_size": 2}}, {}, "tensor"),
    "DeepSpeed on a CPU": (
        "NO",
        {},
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "True"},
        "use_cpu: false",
    ),
    "pipeline": ("DEEPSPEED", {"pipeline": {}}, {}, "pipeline"),
    "sequence": ("DEEPSPEED", {"sequence_parallel_size": 2}, {}, "sequence"),
    "context": ("MULTI_GPU", {}, {"PARALLELISM_CONFIG_CP_SIZE": "2"}, "context"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_launch_is_refused_with_an_alternative(case: str) -> None:
    kind, config, environment, message = REFUSED[case]
    with pytest.raises(SettingsError, match=message):
        check_launch(kind, config, environment)


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"])
def test_other_launches_are_accepted(kind: str) -> None:
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if kind == "FSDP" else {}
    check_launch(kind, {"bf16": {"enabled": "auto"}, "tensor_parallel": {}}, environment)


def test_the_state_of_an_earlier_trainer_is_not_used() -> None:
    """Another library trained in bfloat16 in this process, as in a notebook."""
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(mixed_precision="bf16", cpu=True)
    processes = Processes.start()
    assert processes.accelerator is not None
    assert processes.accelerator.mixed_precision == "no"


@pytest.mark.parametrize(("use_cpu", "backend"), [("True", "gloo"), ("False", "nccl")])
def test_use_cpu_holds_on_a_machine_with_gpus(use_cpu: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_cpu: true` of a launcher's config file; no GPU and no other process is needed to see what is requested."""
    requested: dict[str, Any] = {}

    def accelerator(**named: Any) -> SimpleNamespace:
        requested.update(named)
        device = torch.device("cpu" if named["cpu"] else "cuda:0")
        state = SimpleNamespace(device=device, process_index=0, num_processes=2, local_process_index=0)
        state.deepspeed_plugin = None
        return SimpleNamespace(state=state, distributed_type=SimpleNamespace(value="NO"))

    monkeypatch.setattr("accelerate.Accelerator", accelerator)
    monkeypatch.setattr("angle_llm.train.distributed.wait_for_ranks", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
    for variable in ALLOCATOR:
        monkeypatch.setenv(variable, "")  # restores it at the end
        monkeypatch.delenv(variable)
    processes = Processes.start()
    assert (ALLOCATOR[0] in os.environ) == (backend == "nccl")
    assert processes.device.type == ("cpu" if use_cpu == "True" else "cuda")
    assert requested["cpu"] is (use_cpu == "True")
    assert requested["kwargs_handlers"][0].backend == backend
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    expected = pytest.raises(SettingsError, match="starts 3 processes on a machine with 2 GPUs")
    with expected if backend == "nccl" else nullcontext():
        Processes.start()


@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")  # torch 2.9
def test_float32_products_of_a_step_use_tf32_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    for device in ("cpu", "cuda:0"):
        with matmul_precision(torch.device(device), "high"):
            pass
    assert chosen == ["high", "highest"]


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, True), (3, False)])
def test_deepspeed_overlaps_in_stage_2_only(stage: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config={"zero_optimization": {"overlap_comm": True}})
    monkeypatch.setattr("accelerate.utils.DeepSpeedPlugin", lambda **_: plugin)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert _deepspeed_plugin().deepspeed_config["zero_optimization"]["overlap_comm"] is overlaps


def test_quantisation_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = TrainSettings(model=ModelSettings("org/model", bits=4))
    with pytest.raises(MissingLibraryError, match=r"pip install 'angle_llm\[quantization\]'"):
        resolve_models(settings)


def test_a_launcher_variable_reaches_the_check(tmp_path: Path) -> None:
    """Refused before weights load or anything is written."""
    code = (
        "import os; os.environ['ACCELERATE_USE_FSDP'] = 'true'\n"
        "from angle_llm.settings.train import TrainSettings; from angle_llm import fine_tune\n"
        f"fine_tune(TrainSettings(run_dir={str(tmp_path / 'run')!r}))"
    )
    (tmp_path / "program.py").write_text(code)
    done = run("python", tmp_path / "program.py")
    assert "SettingsError: the launcher selects FSDP" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_list_of_its_layers() -> None:
    """ALBERT has one layer that runs several times. FSDP is refused before the processes communicate."""
    config = AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = EmbeddingModel(AutoModel.from_config(config), EmbeddingOptions("mean", causal=False))
    with pytest.raises(SettingsError, match=r"AlbertModel has no single list of its layers\. Use ZeRO-3"):
        FsdpStrategy(model, OptimizerSettings(), Processes(world_size=2))
    assert (
        checkpointing_problem(model.backbone)
        == "the layers of AlbertModel are not in one list, which activation checkpointing needs."
    )
    assert "albert, 2 layers, 16 dimensions" in repr(tiny_encoder("bert").changed(model=model))
