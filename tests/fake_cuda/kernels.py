"""python -m tests.fake_cuda.kernels CASE...: the Triton kernels of each case's step, compiled without a GPU.

Inductor writes the kernels of the compiled functions for a fake H100, and Triton makes machine code of them for each
of `CAPABILITIES`. This needs triton, which torch's build for CPUs does not bring. A case is one of
`tests.fake_cuda.trace`. A line of JSON for each has `functions`, the compiled functions of the step, `kernels`, the
bytes of machine code by capability and kernel, and `divides`, those kernels that divide by a size which is not known
when they are compiled.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from pretrain.model.compile import maybe_compile
from pretrain.model.kernels.kernels import kernels
from tests.fake_cuda import trace

H100 = json.loads("""
{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "warp_size": 32, "multi_processor_count": 132,
"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "total_memory": 85899345920,
"shared_memory_per_multiprocessor": 233472, "L2_cache_size": 52428800}
""")
CAPABILITIES = (80, 90, 100)
sources: dict[str, str] = {}  # of kernels, by their names in Inductor's program


def main(cases: list[str]) -> None:
    """Print what a step of each case compiles to."""
    trace.pretend_to_have_a_gpu()
    pretend_it_is_an_h100()
    calls = note_compiled_functions()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    for case in map(json.loads, cases):
        for made_before in (maybe_compile, kernels):  # with the marks of their first arguments
            made_before.cache_clear()
        trace.take_a_step({**case, "compile": True})
        sources.clear()
        for call in calls.values():
            write_kernels(call)
        found = {"functions": sorted({call.name for call in calls.values()}), "divides": dividing()}
        print(json.dumps({**found, "kernels": {of: machine_code(of) for of in CAPABILITIES}}))
        calls.clear()


@dataclasses.dataclass
class Call:
    """A call of a function that torch.compile would compile."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    differentiates: bool  # outside of custom functions of autograd

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__name__}"

    @property
    def key(self) -> str:
        """Equal for calls of which one program serves all: types, not sizes."""
        leaves = tree_leaves((self.arguments, self.keywords))
        kinds = [(x.dtype, x.dim(), x.requires_grad) if isinstance(x, Tensor) else str(x) for x in leaves]
        return f"{self.name} {kinds}"


class Compiled(Exception):
    """Raised in place of the compiled program's run: the fake device runs nothing."""


def note_compiled_functions() -> dict[str, Call]:
    """From now on, torch.compile notes how a function is called, and calls it as it is: modes exclude compilation."""
    calls: dict[str, Call] = {}

    def note(function: Callable[..., Any], dynamic: bool = True) -> Callable[..., Any]:
        assert dynamic

        def call(*arguments: Any, **keywords: Any) -> Any:
            noted = Call(function, arguments, keywords, torch.is_grad_enabled())
            calls.setdefault(noted.key, noted)
            return function(*arguments, **keywords)

        return call

    global compile_really
    compile_really, torch.compile = torch.compile, note  # type: ignore[assignment]
    return calls


def write_kernels(call: Call) -> None:
    """Let Inductor write the kernels of the forward and of the backward pass of `call` into `sources`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def program(graph: Any, inputs: Any, **options: Any) -> Any:
        compile_fx_inner(graph, inputs, **options)

        def run(_: Any) -> Any:
            raise Compiled

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=program,
        bw_compiler=lambda graph, inputs: program(graph, inputs, is_backward=True),
        keep_inference_input_mutations=True,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    config.force_non_lazy_backward_lowering = True  # type: ignore[attr-defined]
    arguments, keywords = tree_map_only(Tensor, leaf, (call.arguments, call.keywords))
    try:
        with torch.set_grad_enabled(call.differentiates):
            compile_really(call.function, dynamic=True, backend=backend)(*arguments, **keywords)
    except Compiled:
        return
    raise AssertionError(f"{call.name}: was not compiled")


def leaf(x: Tensor) -> Tensor:
    """The tensor without its history; as a parameter, if it is one, whose sizes are constants, and with its marks."""
    new = nn.Parameter(x.detach()) if isinstance(x, nn.Parameter) else x.detach().requires_grad_(x.requires_grad)
    for name, value in vars(x).items():
        if name.startswith("_dynamo"):
            setattr(new, name, value)
    if isinstance(x, nn.Parameter):  # of a real one the compiler knows; of a fake one's class it does not
        for axis in range(x.dim()):
            torch._dynamo.mark_static(new, axis)
    return new


def dividing() -> list[str]:
    """The kernels of `sources` without sums that divide an index by a size which they are given."""
    by_a_size = re.compile(r"(//|%) \(?ks\d|div_floor_integer")
    return [name for name, source in sources.items() if "triton_poi" in name and by_a_size.search(source)]


def machine_code(capability: int) -> dict[str, int]:
    """Compile all kernels of `sources` with Triton: bytes of machine code, of all configurations together."""
    from torch._inductor.codecache import _load_triton_kernel_from_source

    sizes = {}
    for name, source in sources.items():
        assert "cc=90" in source
        source = source.replace("cc=90", f"cc={capability}")
        kernel: Any = _load_triton_kernel_from_source(name.rpartition(" ")[2], source)
        kernel.precompile(warm_cache_only=True)
        assert all(f".target sm_{capability}" in one["ptx"] for one in made)
        sizes[name] = sum(len(one["cubin"]) for one in made)
        made.clear()
    return sizes


made: list[dict[str, Any]] = []  # by Triton, of the last kernel


def pretend_it_is_an_h100() -> None:
    """Make torch, Inductor and Triton compile for it."""
    import triton  # pyright: ignore[reportMissingImports]
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.backends.nvidia.driver import CudaDriver  # pyright: ignore[reportMissingImports]

    properties, random_state = SimpleNamespace(**H100), torch.zeros(16, dtype=torch.uint8)
    values = {"get_device_properties": properties, "device_count": 1, "current_device": 0, "synchronize": None}
    others = {"get_rng_state": random_state, "set_rng_state": None, "_exchange_device": 0, "_maybe_exchange_device": 0}
    for name, value in {**values, **others, "_lazy_init": None}.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in values:
        setattr(device_interface.CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    device_interface.caching_worker_device_properties["cuda"] = [properties]
    device_interface.caching_worker_current_devices["cuda"] = 0
    torch.version.cuda = "12.8"
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # type: ignore[attr-defined]

    class Driver(CudaDriver):
        def __init__(self) -> None:  # theirs loads libcuda
            self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448})

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    compile_kernel = triton.compile

    def keep_code(*arguments: Any, **keywords: Any) -> Any:
        kernel = compile_kernel(*arguments, **keywords)
        made.append(kernel.asm)
        return kernel

    triton.compile = keep_code
    config.compile_threads, config.force_disable_caches = 1, True

    def note_source(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        assert device_str == "cuda"
        if source not in sources.values():
            sources[f"{len(sources)} {name}"] = source
        return SimpleNamespace(run=None)

    AsyncCompile.triton = note_source  # type: ignore[assignment]


compile_really = torch.compile

if __name__ == "__main__":
    main(sys.argv[1:])
