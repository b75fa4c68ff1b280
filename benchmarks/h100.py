"""An H100 without a GPU: lowering for CUDA, and compilation through ptxas.

Lowering needs nothing but JAX. Compilation needs the CUDA plugin and ptxas (`requirements/aot-0.11.txt`,
`make venv-aot`); it finds what a lowering cannot: functions without a half-precision form, tiles that overflow shared
memory, spilled registers.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# There is no driver, whose version the plugin would check.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

DEVICE_KIND = "NVIDIA H100 80GB HBM3"
CORES = 132
SHARED_MEMORY_BYTES = 232448
"""The most that one block may use."""

_TARGET_CONFIG = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {CORES}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: {SHARED_MEMORY_BYTES}
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{DEVICE_KIND}"
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a compiled module."""

    name: str
    blocks: int
    threads: int
    shared_bytes: int
    registers: int | None
    """Per thread; None where ptxas was not asked, because XLA had the kernel already."""
    spilled_bytes: int | None
    """Stores and loads of spilled registers, counted in the kernel's text."""


@dataclass(frozen=True, slots=True)
class MosaicKernel:
    """One kernel of Mosaic GPU, whose launch no dump of the module shows."""

    shared_bytes: int
    registers: int | None
    """Per thread at the start; warpgroups exchange theirs later. None where ptxas was not asked."""
    spilled_bytes: int | None


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a compilation. `lower_s` holds tracing, planning and lowering; `compile_s` XLA, Triton and ptxas."""

    lower_s: float
    compile_s: float
    text: str
    launches: tuple[Launch, ...]
    mosaic_kernels: tuple["MosaicKernel", ...] = ()
    """In the order of lowering."""

    @property
    def triton_launches(self) -> tuple[Launch, ...]:
        """The kernels that the fused function was planned to be; XLA's own are called differently."""
        return tuple(k for k in self.launches if k.name.startswith("fused_t"))


def can_compile() -> bool:
    """Are the plugin and ptxas installed?"""
    return (
        find_spec("jax_plugins") is not None
        and find_spec("jax_plugins.xla_cuda13") is not None
        and _toolkit() is not None
    )


def lower(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """`function` lowered for an H100, on any machine. `arguments` are arrays or `jax.ShapeDtypeStruct`s."""
    device = jax.sharding.AbstractDevice(device_kind=DEVICE_KIND, num_cores=CORES, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def triton_calls(text: str) -> int:
    """Counts the Triton kernels that a lowered module calls."""
    return len(re.findall(r"custom_call @\"?(?:__gpu\$xla\.gpu\.triton|triton_kernel_call)\b", text))


def compile_for_h100(function: Callable[..., Any], arguments: Sequence[Any]) -> Compiled:
    """`function` compiled for an H100, through ptxas. `arguments` are arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      jax.errors.JaxRuntimeError: a kernel does not compile, or needs more shared memory than there is.
    """
    on_device = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_sharding()) for a in arguments]
    with tempfile.TemporaryDirectory() as folder, _mosaic_dump(Path(folder) / "mosaic.log"):
        start = time.perf_counter()
        lowered = lower(function, on_device)
        lower_s = time.perf_counter() - start
        dump = Path(folder) / "dump"
        log = Path(folder) / "ptxas.log"
        options = {
            "xla_dump_to": str(dump),
            "xla_dump_hlo_as_text": True,
            "xla_gpu_enable_libnvptxcompiler": False,
            "xla_gpu_cuda_data_dir": str(_verbose_toolkit(Path(folder), log)),
        }
        start = time.perf_counter()
        executable = lowered.compile(compiler_options=options)
        compile_s = time.perf_counter() - start
        resources = _resources(log.read_text() if log.exists() else "")
        thunks = "".join(f.read_text() for f in sorted(dump.glob("*.thunk_sequence.txt")))
        sys.stdout.flush()
        mosaic = tuple(_mosaic_kernels((Path(folder) / "mosaic.log").read_text(errors="replace")))
    return Compiled(lower_s, compile_s, executable.as_text(), tuple(_launches(thunks, resources)), mosaic)


def temporary_bytes(function: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """Returns the bytes that `function` takes of an H100's memory besides its arguments and results."""
    on_device = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_sharding()) for a in arguments]
    return int(lower(function, on_device).compile().memory_analysis().temp_size_in_bytes)


@contextmanager
def _mosaic_dump(log: Path) -> Iterator[None]:
    """Writes to a file what Mosaic GPU and its ptxas print of shared memory and registers."""
    wanted = {"MOSAIC_GPU_DUMP_RESOURCES": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    sys.stdout.flush()
    stdout = os.dup(1)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.environ.update(wanted)
        try:
            with redirect_stdout(file):
                yield
        finally:
            file.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


BARRIER_BYTES = 8


def _mosaic_kernels(log: str) -> Iterator[MosaicKernel]:
    """Kernels by what is printed when they are lowered, then when they are compiled."""
    shared = []
    for scratch, counts in re.findall(r"Resources\(smem_scratch_bytes=(\d+),.*?barrier_counts=Counter\((.*?)\),", log):
        barriers = sum(int(n) * int(times) for n, times in re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", counts))
        shared.append(int(scratch) + BARRIER_BYTES * barriers)
    known = [*_resources(log).values()]
    for number, size in enumerate(shared):
        registers, spilled = known[number] if len(known) == len(shared) else (None, None)
        yield MosaicKernel(size, registers, spilled)


@cache
def _sharding() -> jax.sharding.Sharding:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET_CONFIG, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def _toolkit() -> Path | None:
    """The folder with bin/ptxas and nvvm/libdevice."""
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for ptxas in Path(place).glob("*/bin/ptxas"):
            return ptxas.parent.parent
    return None


def _verbose_toolkit(folder: Path, log: Path) -> Path:
    """A copy of the toolkit, made of links, whose ptxas writes what it says about registers and spills to `log`."""
    toolkit = _toolkit()
    assert toolkit is not None, "make venv-aot installs ptxas"
    copy = folder / "toolkit"
    (copy / "bin").mkdir(parents=True)
    for entry in toolkit.iterdir():
        if entry.name != "bin":
            (copy / entry.name).symlink_to(entry)
    for entry in (toolkit / "bin").iterdir():
        if entry.name != "ptxas":
            (copy / "bin" / entry.name).symlink_to(entry)
    ptxas = copy / "bin" / "ptxas"
    ptxas.write_text(f'#!/bin/sh\nexec "{toolkit}/bin/ptxas" -v "$@" 2>>"{log}"\n')
    ptxas.chmod(0o755)
    return copy


def _resources(log: str) -> dict[str, tuple[int, int]]:
    """Registers per thread and spilled bytes of every kernel that `ptxas -v` reports."""
    found = {}
    for part in log.split("Compiling entry function")[1:]:
        name = re.search(r"'([^']+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if name and registers and spills:
            found[name[1]] = (int(registers[1]), int(spills[1]) + int(spills[2]))
    return found


_LAUNCH = re.compile(
    r"kCustomKernel .*?(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), .*?\]\s+shared_memory: (\d+) bytes"
)


def _launches(thunks: str, resources: dict[str, tuple[int, int]]) -> list[Launch]:
    launches = []
    for name, x, y, z, threads, shared_bytes in _LAUNCH.findall(thunks):
        registers, spilled_bytes = resources.get(name, (None, None))
        blocks = int(x) * int(y) * int(z)
        launches.append(Launch(name, blocks, int(threads), int(shared_bytes), registers, spilled_bytes))
    return launches
