"""The equation that stands for a loop which is one kernel, and what it computes.

On a GPU of NVIDIA it is the kernel (`recurrences`), anywhere else the loop that it stands for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import numpy as jnp
from jax.interpreters import mlir

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Primitive
from pallasfuse.decompositions.writing import traced_as
from pallasfuse.device import Device
from pallasfuse.first_time import IMPORTS
from pallasfuse.ir.tile_program import Contract, TileProgram, every
from pallasfuse.jaxpr_frontend import called
from pallasfuse.price.terms import Price
from pallasfuse.primitive_names import KERNEL_OF_LOOP
from pallasfuse.targets import Target

if TYPE_CHECKING:
    from pallasfuse.tiling.recurrence import Layout  # a plan that was kept runs without what plans


LEFT_TO_XLA = ""
"""This stands in place of the name of a layout where XLA's own loop is as fast as any kernel."""


@dataclass(frozen=True, eq=False)
class KernelOfLoop:
    """The parameter of an equation that stands for a loop: the loop's own equation, and the kernel that runs it."""

    loop: JaxprEqn
    kernel: TileProgram
    operands: tuple[str, ...]
    """The names that the operands of the equation have in the kernel, in its order."""
    results: tuple[str, ...]
    """The names that the results of the equation have in the kernel, in its order."""
    price: Price
    layout: "Layout"
    """The way in which the kernel spreads the loop over the device."""
    target: Target

    def __repr__(self) -> str:
        """Returns the kernel as text: equal loops have the same one."""
        own = self.kernel
        precisions = [s.precision for s in every(own.body) if isinstance(s, Contract)]
        return (
            f"{own}\n{precisions}, {own.warps} warps, {own.prefetch_distance} ahead, {self.operands} to {self.results}"
        )

    @property
    def layout_name(self) -> str:
        """The layout as text, which tells it from others of the same loop."""
        own = self.layout
        grid = " ".join(f"{axis.name}:{size}" for axis, size in own.grid)
        return f"{grid or 'one block'}, {own.warps} warps, keeps {' '.join(sorted(own.kept)) or 'nothing'}"

    @property
    def source(self) -> str:
        """The line of the program that the loop comes from."""
        return _compat.source_summary(self.loop) or "<unknown line>"

    @property
    def trips(self) -> int:
        """The number of trips of the loop."""
        return int(self.loop.params["length"])

    def price_of_xla(self, device: Device) -> Price:
        """The price of the loop as XLA runs it."""
        with IMPORTS:
            from pallasfuse.jaxpr_frontend.conversion import convert
            from pallasfuse.price.xla import price_xla

        return price_xla(convert(traced_as(self.loop, self.by_xla, self.loop.invars)).program, device)

    def by_xla(self, *args: Any) -> list[Any]:
        """The results of the loop as XLA runs it."""
        return list(_compat.bind(self.loop, args))

    def by_kernel(self, *args: Any, run: Callable[..., Mapping[str, Any]] | None = None) -> list[Any]:
        """The results of the loop as one kernel. run: runs a tile program on arrays by their names; by default on Triton."""
        if run is None:
            from pallasfuse.triton_gpu import kernel  # planning needs no Pallas

            run = kernel.run
        shapes = {t.name: tuple(a.extent for a in t.axes) for t in self.kernel.inputs}
        given = {n: jnp.reshape(x, shapes[n]) for n, x in zip(self.operands, args, strict=True) if n in shapes}
        found = run(self.kernel, given)
        return [found[n].reshape(_compat.shape_of(v)) for n, v in zip(self.results, self.loop.outvars, strict=True)]


recurrence_p = Primitive(KERNEL_OF_LOOP)
recurrence_p.multiple_results = True
recurrence_p.def_impl(lambda *args, of: of.by_xla(*args))
recurrence_p.def_abstract_eval(lambda *avals, of: [_compat.plain_aval(v.aval) for v in of.loop.outvars])
mlir.register_lowering(recurrence_p, mlir.lower_fun(lambda *args, of: of.by_xla(*args), multiple_results=True))
mlir.register_lowering(
    recurrence_p, mlir.lower_fun(lambda *args, of: of.by_kernel(*args), multiple_results=True), platform="cuda"
)


def loops_as_kernels(jaxpr: Jaxpr, *, inside: bool = True) -> tuple[KernelOfLoop, ...]:
    """The loops of a jaxpr that are one kernel each; inside: also those in the bodies of others and of branches."""
    found = list[KernelOfLoop]()
    for eqn in jaxpr.eqns:
        if eqn.primitive is recurrence_p:
            found.append(eqn.params["of"])
        for body in called(eqn) if inside else ():
            found += loops_as_kernels(body)
    return tuple(found)
