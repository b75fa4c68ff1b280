"""XLA for CPUs at its least effort: what `--quick` compiles with, for kernels of a few hundred elements.

With `jax_disable_most_optimizations` two thirds of the time of a compilation still go to what small programs do not need: every
fusion is lowered through MLIR in a context of its own, and the code of a module is divided among 32 threads. Both are
options of XLA that JAX has no flag for, and `XLA_FLAGS` would set them for the tests marked `optimized`, too.

And a fifth of the time of compilations goes to programs that were compiled before, from other lines: a function that several cases
call, the operations of what is expected. What was compiled lately is taken again.
"""

import hashlib
from collections import OrderedDict
from threading import Lock
from typing import Any

SETTINGS = {"xla_cpu_disable_new_fusion_emitters": ""}
"""Extra options of XLA's CPU backend: loops of fusions are emitted as LLVM code directly."""
FLAGS = f"--xla_backend_extra_options={','.join(SETTINGS)} --xla_cpu_parallel_codegen_split_count=1"
"""The same for a process of its own, as `XLA_FLAGS`."""


def _varint(number: int) -> bytes:
    digits = []
    while number >= 128:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def _message(field: int, payload: bytes) -> bytes:
    """A field of a protocol buffer that holds a message or text."""
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


_EXECUTABLE_BUILD_OPTIONS, _DEBUG_OPTIONS = 3, 3
_PARALLEL_CODEGEN_SPLIT_COUNT, _BACKEND_EXTRA_OPTIONS = 323, 500  # fields of DebugOptions, in xla.proto
_ADDED = _message(_EXECUTABLE_BUILD_OPTIONS, _message(_DEBUG_OPTIONS, (
    _varint(_PARALLEL_CODEGEN_SPLIT_COUNT << 3) + _varint(1)
    + b"".join(_message(_BACKEND_EXTRA_OPTIONS, _message(1, name.encode()) + _message(2, value.encode()))
               for name, value in SETTINGS.items())
)))  # fmt: skip


def least_effort(options: Any) -> Any:
    """The same options of a compilation, with `SETTINGS`: of a field that a protocol buffer has twice, the last one counts."""
    return type(options).ParseFromString(options.SerializeAsString() + _ADDED)


class CompiledOnce:
    """Compiles programs as a function of JAX does, but for those that it compiled lately: programs whose texts, without names of
    lines and scopes, are equal."""

    def __init__(self, compiled: Any, size: int = 512) -> None:
        self.compiled, self.size = compiled, size
        self.kept: OrderedDict[bytes, Any] = OrderedDict()
        self.lock = Lock()

    def __call__(self, backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any) -> Any:
        text = module.operation.get_asm(enable_debug_info=False)
        given = (backend, module, executable_devices, options, host_callbacks)
        if host_callbacks or "callback" in text:  # the addresses of functions, which others may have later
            return self.compiled(*given)
        devices = [d.id for d in executable_devices]
        around = f"{id(backend)} {devices} ".encode() + options.SerializeAsString()
        key = hashlib.sha256(around + text.encode()).digest()
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        made = self.compiled(*given)
        with self.lock:
            self.kept[key] = made
            if len(self.kept) > self.size:
                self.kept.popitem(last=False)
        return made


def install() -> None:
    """From here on, whatever JAX compiles without optimizations is compiled with the least effort, and once."""
    import jax
    from jax._src import compiler

    made = compiler.get_compile_options
    if hasattr(made, "with_all_effort"):
        return

    def get_compile_options(*args: Any, **kwargs: Any) -> Any:
        options = made(*args, **kwargs)
        level = options.executable_build_options.debug_options.xla_backend_optimization_level
        level = dict(options.env_option_overrides).get("xla_backend_optimization_level", level)
        return options if level else least_effort(options)

    get_compile_options.with_all_effort = made  # type: ignore[attr-defined]
    compiler.get_compile_options = get_compile_options
    every_time = compiler.backend_compile_and_load
    once = CompiledOnce(every_time)

    def backend_compile_and_load(*args: Any) -> Any:
        return (once if jax.config.values["jax_disable_most_optimizations"] else every_time)(*args)

    backend_compile_and_load.every_time = every_time  # type: ignore[attr-defined]
    compiler.backend_compile_and_load = backend_compile_and_load
