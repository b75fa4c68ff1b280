"""The results of a plain function, and how far from them those of a fused one may be: what rounding explains, and no more.

The measure is the plain function's own error against float64. It may be zero by luck, so that some units in the last place are
added; and near a step, a pole or a root no evaluation in floating point is right, so that elements that move when the arguments are
rounded may move as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasfuse.accuracy import last_place, special_differences
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.overrides import overridden
from pallasfuse.verification.reference import float64_function, largest_bytes, sensitivity

TIMES_PLAIN = 4.0
"""So many times the plain function's largest error against float64 are allowed between a fused result and the plain one."""
PLUS_ULPS = 4.0
"""And so many units in the last place of the largest value."""
TIMES_MOVED = 8.0
"""And, where that does not suffice, so many times what rounding the arguments changes an element by."""
_MOST_BYTES = 1 << 31

Leaves = Sequence[Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tolerance:
    """The difference that is allowed between two elements: `atol + rtol * |plain|`; and where it comes from, as text."""

    rtol: float
    atol: float
    origin: str


class PlainFunction:
    """A function on flat arguments of fixed shapes and types, compiled once in its own types and once in float64.

    Fused functions that it calls run as their plain ones.
    """

    def __init__(self, function: Callable[..., Any], leaves: Leaves) -> None:
        self._compiled = jax.jit(function)
        with overridden("plain"):
            self.jaxpr = flatten(jax.make_jaxpr(self._compiled)(*leaves))

    def __call__(self, leaves: Leaves) -> Any:
        with overridden("plain"):
            return self._compiled(*leaves)

    @cached_property
    def in_float64(self) -> Callable[[Sequence[Any]], list[Array]]:
        """The function of `values`, in float64."""
        return float64_function(self.jaxpr)

    def values(self, leaves: Leaves) -> list[Any]:
        """The values of the constants and inputs of `jaxpr`."""
        return [*self.jaxpr.consts, *(x if hasattr(x, "dtype") else np.asarray(x) for x in leaves)]


class PlainResults:
    """The results of a plain function for one list of arguments, or for several, stacked along a new first axis.

    Args:
      several: the lists of flat arguments.
      stacked: False: there is one list, and no such axis.
    """

    def __init__(self, function: PlainFunction, several: Sequence[Leaves], *, stacked: bool = False) -> None:
        self._function, self._several, self._stacked = function, several, stacked
        made = [function(leaves) for leaves in several]
        self.paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(made[0])]
        self.tree = jax.tree.map(lambda *slices: self._joined([as_array(x) for x in slices]), *made)
        self.leaves: list[Array] = jax.tree.leaves(self.tree)

    @cached_property
    def exact(self) -> list[Array]:
        """The results in float64, as `leaves`.

        Raises:
          ValueError: there are none.
        """
        return [self._joined([as_array(x) for x in slices]) for slices in zip(*self._exact, strict=True)]

    @cached_property
    def _exact(self) -> list[list[Array]]:
        """The results in float64 for each list of arguments.

        Raises:
          ValueError: there are none.
        """
        advice = "give `rtol` or `atol`, and no float64 is needed"
        if (needed := largest_bytes(self._function.jaxpr)) > _MOST_BYTES:
            raise ValueError(f"no tolerance can be derived: in float64, one value of the plain function takes {needed / 2**30:.1f} "
                             f"GiB: pass smaller arguments, or {advice}")  # fmt: skip
        try:
            return [self._function.in_float64(self._function.values(leaves)) for leaves in self._several]
        except Exception as error:
            raise ValueError(f"no tolerance can be derived: the plain function has no float64 evaluation "
                             f"({type(error).__name__}: {str(error).splitlines()[0][:300]}): {advice}") from error  # fmt: skip

    @cached_property
    def moved(self) -> list[Array]:
        """How far each exact result moves when the arguments are rounded; infinitely where an integer or a special value
        changes."""
        plain = self._function
        found = [sensitivity(plain.jaxpr, plain.values(leaves), exact, n, plain.in_float64)
                 for n, (leaves, exact) in enumerate(zip(self._several, self._exact, strict=True))]  # fmt: skip
        shapes = [x.shape for x in self.exact]  # complex numbers are pairs there
        moved = [self._joined(list(slices)) for slices in zip(*found, strict=True)]
        return [m if m.shape == s else np.stack([m, m], -1) for m, s in zip(moved, shapes, strict=True)]

    def tolerance(self, n: int) -> Tolerance:
        """The derived tolerance of one result; zero for integers and booleans."""
        plain, exact = self.leaves[n], self.exact[n]
        if not jnp.issubdtype(plain.dtype, jnp.inexact):
            return Tolerance(
                0.0, 0.0, "integers and booleans are to be equal, but where rounding the arguments changes them"
            )
        finite = np.isfinite(wide(plain)) & np.isfinite(exact)
        if not finite.any():
            return Tolerance(0.0, 0.0, "the plain result has no finite element")
        error = float(np.abs(np.where(finite, wide(plain), 0) - np.where(finite, exact, 0)).max())
        largest = float(np.abs(exact[finite]).max())
        ulp = last_place(plain.dtype, largest)
        return Tolerance(0.0, TIMES_PLAIN * error + PLUS_ULPS * ulp,
                         f"{TIMES_PLAIN:g} times the plain function's own largest error against float64, {error:.2g}, and "
                         f"{PLUS_ULPS:g} units in the last place of {plain.dtype} at the largest value, {largest:.3g}")  # fmt: skip

    def explained(self, n: int, ours: Array, tolerance: Tolerance) -> Array:
        """Where rounding explains that a result differs by more than the derived tolerance.

        Special values that float64 has as well are explained, and what rounding the arguments changes.
        """
        plain, exact, moved = wide(self.leaves[n]), self.exact[n], self.moved[n]
        ours = wide(ours)
        if not jnp.issubdtype(self.leaves[n].dtype, jnp.inexact):
            return np.isinf(moved)
        specials = _differs_specially(ours, plain) & ~special_differences(ours, plain, exact)
        finite = np.isfinite(ours) & np.isfinite(plain) & np.isfinite(moved)
        apart = np.abs(np.where(finite, ours, 0) - np.where(finite, plain, 0))
        near = finite & (apart <= tolerance.atol + TIMES_MOVED * np.where(finite, moved, 0))
        explained: Array = specials | near | np.isinf(moved)
        return explained

    def _joined(self, slices: list[Array]) -> Array:
        return np.stack(slices) if self._stacked else slices[0]


def as_array(x: Any) -> Array:
    """A result as a NumPy array: keys of random numbers as their data, complex numbers as pairs."""
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x if hasattr(x, "dtype") else jnp.asarray(x))
    return np.stack([array.real, array.imag], -1) if np.iscomplexobj(array) else array


def wide(array: Array) -> Array:
    """An array of floats in float64, in which differences of small types are exact; any other as it is."""
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _differs_specially(a: Array, b: Array) -> Array:
    return special_differences(a, b, b)
