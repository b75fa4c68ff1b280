"""Kernels for a GPU are lowered once in a process, for all programs that they are parts of.

To lower a kernel takes 0.05 to 0.5 s of Python's time, and a check asks for it several times: alone, in each whole call that is
tried, and in the call that is used in the end. Here a kernel is exported when it is first asked for, and programs call what was
exported, which takes some milliseconds.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import jax
from jax import export

from pallasfuse import _compat
from pallasfuse.decisions import Phase

Array = Any
type Run = Callable[[Sequence[Phase], Mapping[str, Array]], dict[str, Array]]
"""Runs the phases of a kernel on arrays by name, and returns what they store."""

_MOST = 256
"""So many kernels are kept, those that were asked for last: one takes up to half a megabyte."""
_UNCHECKED = [
    export.DisabledSafetyCheck.platform(),  # of other platforms for which a program is lowered, too, it is another branch
    *map(export.DisabledSafetyCheck.custom_call, ("__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2")),
]
"""Checks of `jax.export` that are about other processes, or versions of JAX: what is exported here does not leave this one."""
_PLATFORM = "cuda"


@dataclass(frozen=True, slots=True)
class _Exported:
    """A kernel as it was exported, and the names of what it stores, in order. As long as it is kept, its phases are no others.

    Without a program it could not be exported."""

    phases: tuple[Phase, ...]
    program: export.Exported | None = None
    stores: tuple[str, ...] = ()


@dataclass
class _Kernels:
    """Holds the kernels that were exported last, by all that they depend on. Who asks for one that is being exported waits."""

    lock: Any = field(default_factory=Lock)
    known: "OrderedDict[object, Future[_Exported | None]]" = field(default_factory=OrderedDict)

    def get(self, key: object, make: Callable[[], _Exported]) -> _Exported | None:
        """Returns the kernel of a key, made by the first who asks for it; None to those who wait where that was interrupted."""
        with self.lock:
            found = self.known.get(key)
            if found is not None:
                self.known.move_to_end(key)
            else:
                made = self.known[key] = Future()
                while len(self.known) > _MOST:
                    self.known.popitem(last=False)
        if found is not None:
            return found.result()
        try:
            made.set_result(make())
        finally:  # whatever interrupts it: others may wait
            if not made.done():
                with self.lock:
                    self.known.pop(key, None)
                made.set_result(None)
        return made.result()


_kernels = _Kernels()


def run(phases: Sequence[Phase], arrays: Mapping[str, Array], run_phases: Run) -> dict[str, Array]:
    """Runs the phases of a kernel as `run_phases` does, from its exported form where a GPU for it is at hand."""
    if not all(p.target.writes_kernels for p in phases) or not _is_at_hand(arrays.values()):
        return run_phases(phases, arrays)
    names = list(dict.fromkeys(t.name for p in phases for t in p.program.given if t.name in arrays))
    types = [jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in names]
    settings = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    key = tuple(map(id, phases)), tuple(names), tuple((t.shape, t.dtype) for t in types), settings
    found = _kernels.get(key, lambda: _exported(phases, names, types, run_phases))
    if found is None or found.program is None:
        return run_phases(phases, arrays)
    return dict(zip(found.stores, found.program.call(*[arrays[n] for n in names]), strict=True))


def _exported(phases: Sequence[Phase], names: Sequence[str], types: Sequence[Any], run_phases: Run) -> _Exported:
    stores: list[str] = []

    def kernel(*arrays: Array) -> list[Array]:
        stored = run_phases(phases, dict(zip(names, arrays, strict=True)))
        stores[:] = stored
        return list(stored.values())

    try:
        with _compat.for_this_version():
            program = export.export(jax.jit(kernel), platforms=(_PLATFORM,), disabled_checks=_UNCHECKED)(*types)
    except Exception:  # who asked runs it as it is, and is told what is wrong with it
        return _Exported(tuple(phases))
    return _Exported(tuple(phases), program, tuple(stores))


def _is_at_hand(arrays: Any) -> bool:
    """Is a program lowered for a GPU of this process, outside of all meshes? Elsewhere types of arrays say more than shapes do."""
    return jax.default_backend() == "gpu" and not _compat.is_rocm() and not _compat.is_in_mesh(arrays)
