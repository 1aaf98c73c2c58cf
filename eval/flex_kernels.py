"""Compile the FlexAttention kernels of a GPU on a machine without a GPU, or run them in the interpreter of Triton.

    pip install triton==3.7.1 "numpy<2.4"    # the version that the CUDA build of torch requires; 3.5.1 for torch 2.9
    python eval/flex_kernels.py --arch 80 89 90 --shapes 32/8/64 32/8/128
    python eval/flex_kernels.py --interpret --arch 80 --shapes 4/2/64 --dtype float16

The first prints the options and the shared memory of the forward and backward kernels; the exit code is 1 if a kernel needs
more than the GPU has. The second runs the same Triton code on the CPU (a minute; not in bfloat16), and compares output and
gradients with dense attention. torch traces `flex_call` with CPU tensors; then the devices in the graphs are replaced by a
GPU that does not exist. This replaces private functions of torch; it ran with torch 2.9.1 and 2.13.
"""

import argparse
import os
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = str(int("--interpret" in sys.argv))  # triton and torch read them at import
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
import triton
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import async_compile, codecache, compile_fx
from torch._inductor.runtime import hints, triton_helpers, triton_heuristics
from torch._subclasses import fake_tensor
from torch.nn.attention import flex_attention
from torch.utils import _triton
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

from angle_llm.model.layout.flex import BLOCK, block_mask, compiled_flex
from angle_llm.model.layout.token_sequence import build_sequence, shared_prefixes

SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Maximum bytes of shared memory per block, by compute capability × 10."""
FLEX: Any = sys.modules["torch._higher_order_ops.flex_attention"]
current: Any = SimpleNamespace(arch=0, interpret=False)
"""Compute capability × 10 of the imitated GPU, and whether its kernels run in the interpreter."""
kernels: list[Any] = []


class Kernel:
    """Kernel in generated code, in place of a kernel that inductor loads onto a GPU."""

    def __init__(self, function: Any, triton_meta: Any, inductor_meta: Any, **others: Any) -> None:
        self.function, self.meta, self.config = function, triton_meta, inductor_meta.get("config_args", {})
        self.launch = {name: others.get(name) for name in ("num_warps", "num_stages")}

    def shared_memory(self) -> int:
        """Compile with the options of inductor, and return the bytes of shared memory."""
        parts = (self.meta["signature"], dict(self.meta["constants"]), self.meta["configs"][0])
        options = {**self.launch, "debug": True, "sanitize_overflow": False}
        source = triton.compiler.ASTSource(self.function, *parts)
        return int(triton.compile(source, GPUTarget("cuda", current.arch, 32), options).metadata.shared)

    def run(self, *given: Any, stream: int) -> None:
        """Run the kernel in the interpreter; generated code calls this."""
        if self.config:  # FlexAttention: the last three arguments are the grid
            self.function[given[-3:]](*given[:-3])
        else:  # a reduction
            kinds: dict[str, str] = self.meta["signature"]
            grid = (-(-int(given[list(kinds).index("xnumel")]) // 64),)
            self.function[grid](*given, **{name: 64 for name in kinds if kinds[name] == "constexpr"})


def imitate_gpu() -> None:
    """Replace the functions of torch and Triton that need a GPU."""

    def properties(*_: Any) -> Any:
        sizes = {"name": "", "gcnArchName": "", "multi_processor_count": 108, "regs_per_multiprocessor": 65_536}
        sizes |= {"max_threads_per_multi_processor": 2048, "shared_memory_per_block_optin": SHARED_MEMORY[current.arch]}
        return SimpleNamespace(major=current.arch // 10, minor=current.arch % 10, warp_size=32, **sizes)

    def load(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernels.append(getattr(codecache.PyCodeCache.load(source), name))
        return kernels[-1]

    def permuted(out: Tensor, strides: Any) -> Tensor:  # without the copy on the GPU
        order = FLEX._construct_strides(out.shape, torch._inductor.ir.get_fill_order(strides))
        return torch.empty_strided(out.shape, order, dtype=out.dtype, device=out.device)

    cuda, guards = torch.cuda, torch._C._dynamo.guards
    target = {"get_current_target": lambda: GPUTarget("cuda", current.arch, 32)}
    triton.runtime.driver.set_active(SimpleNamespace(get_active_torch_device=lambda: torch.device("cuda", 0), **target))
    for owners, names, value in (
        ([cuda], "_lazy_init set_device set_rng_state", lambda *_: None),
        ([cuda], "_exchange_device", lambda _: 0),
        ([cuda], "_maybe_exchange_device", lambda _: 0),  # another function: torch stores both in a dictionary
        ([cuda], "get_device_capability", lambda *_: divmod(current.arch, 10)),
        ([cuda], "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
        ([cuda, CudaInterface], "device_count", staticmethod(lambda: 1)),
        ([cuda, CudaInterface], "current_device", staticmethod(lambda: 0)),
        ([cuda, CudaInterface], "get_device_properties", staticmethod(properties)),
        ([guards], "_empty_strided_cuda", guards._empty_strided_cpu),  # type: ignore[attr-defined]
        ([torch._C], "_cuda_getCurrentRawStream", lambda _: 0),
        ([fake_tensor], "init_gpu_context", lambda *_: None),
        ([flex_attention], "_validate_device", lambda *_: None),  # it refuses gradients on a CPU
        ([FLEX], "_permute_strides", permuted),
        ([triton_helpers], "set_driver_to_gpu", lambda: None),
        ([triton_heuristics], "template reduction persistent_reduction", lambda *_, **given: partial(Kernel, **given)),
        ([async_compile.AsyncCompile], "triton", load),
    ):
        for owner, name in product(owners, names.split()):
            setattr(owner, name, value)


def generate(graph: fx.GraphModule, inputs: Any, **others: Any) -> Any:
    """Generate code for the GPU from the forward or backward graph of a CPU."""

    def on_gpu(value: Any) -> Any:
        if isinstance(value, fake_tensor.FakeTensor):
            with value.fake_mode:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda:0")
        return torch.device("cuda", 0) if isinstance(value, torch.device) else value

    for module in (module for module in graph.modules() if isinstance(module, fx.GraphModule)):
        for node in module.graph.nodes:
            node.meta["val"] = tree_map(on_gpu, node.meta.get("val"))
            node.args, node.kwargs = (fx.node.map_aggregate(given, on_gpu) for given in (node.args, node.kwargs))
        module.recompile()
    with patch("torch.cuda.is_available", lambda: True):
        _triton.has_triton.cache_clear()
        return compile_fx.compile_fx_inner(graph, [on_gpu(value) for value in inputs], **others)


def backend(graph: fx.GraphModule, inputs: Any) -> Any:
    """Backend of torch.compile that generates code for the GPU."""
    for node in graph.graph.nodes:  # on a GPU, the forward kernel returns the logsumexp for the backward kernel
        if node.target is torch.ops.higher_order.flex_attention:
            node.args = tuple({**one, "OUTPUT_LOGSUMEXP": True} if isinstance(one, dict) else one for one in node.args)
    graph.recompile()
    compiled = compile_fx.compile_fx(graph, inputs, inner_compile=generate)
    return compiled if current.interpret else lambda *_: (None,)


def check(shape: str, dtype: torch.dtype, blocks: int) -> bool:
    """Print the shared memory of every kernel, or errors in the interpreter; return whether they are small enough."""
    heads, kv_heads, width = map(int, shape.split("/"))
    tokens, long = blocks * BLOCK, [*range(blocks * BLOCK - 100)]
    texts = [long, *([*long[:200], 1000 + tail] for tail in range(4))]
    mask: Any = block_mask(build_sequence(texts, shared_prefixes(texts))[1], tokens, torch.device("cpu"))
    plain = [torch.randn(1, tokens, count, width, dtype=dtype) for count in (heads, kv_heads, kv_heads)]
    states = [tensor.transpose(1, 2).requires_grad_() for tensor in plain]  # as in LLaMA
    output = compiled_flex(backend)(*states, mask, None, width**-0.5, heads != kv_heads)
    if not current.interpret:
        found = [(kernel.shared_memory(), kernel.config | kernel.launch) for kernel in kernels if kernel.config]
        for used, given in found:
            sizes = {name: given[name] for name in given if name.startswith(("BLOCK_", "num_", "IS_"))}
            print(f"sm_{current.arch} {shape}: {used} of {SHARED_MEMORY[current.arch]} bytes, {sizes}")
        return all(used <= SHARED_MEMORY[current.arch] for used, _ in found)
    wide = [tensor.detach().double().requires_grad_() for tensor in states]
    index_T = torch.arange(tokens)
    visible_TT = mask.mask_mod(None, None, index_T[:, None], index_T)
    expected = nn.functional.scaled_dot_product_attention(
        wide[0], wide[1], wide[2], attn_mask=visible_TT, enable_gqa=True
    )
    gradient = torch.randn_like(output)
    gradients = [torch.autograd.grad(output, states, gradient), torch.autograd.grad(expected, wide, gradient.double())]
    pairs = zip((output.detach(), *gradients[0]), (expected.detach(), *gradients[1]), strict=True)
    errors = [float((one.double() - best).abs().max() / best.abs().max()) for one, best in pairs]
    print(f"sm_{current.arch} {shape}, {tokens} tokens:", *(f"{error:.1e}" for error in errors))
    return max(errors) < 2e-3  # float16


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90], choices=SHARED_MEMORY)
    parser.add_argument("--shapes", nargs="+", default=["32/8/64", "32/8/128"], help="heads/key-value heads/width")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--interpret", action="store_true", help="run the kernels on the CPU")
    arguments = parser.parse_args()
    imitate_gpu()
    good, current.interpret = True, arguments.interpret
    for current.arch, shape in product(arguments.arch, arguments.shapes):
        torch._dynamo.reset()
        kernels.clear()
        hints.DeviceProperties.create.cache_clear()
        for blocks in (3, 5) if arguments.interpret else (3,):
            good &= check(shape, getattr(torch, arguments.dtype), blocks)
    sys.exit(not good)
