"""Ways to run one call of a function: compiled or not, mapped, looped, differentiated, sharded; each beside what the plain function
gives."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallasfuse._compat import Jaxpr
from pallasfuse.api import FusedFunction, fuse
from pallasfuse.errors import TraceError
from pallasfuse.jaxpr_frontend import fused_calls
from pallasfuse.options import FuseOptions
from pallasfuse.overrides import Override, overridden
from pallasfuse.plan import Plan
from pallasfuse.report import drawn
from pallasfuse.tolerance import PlainFunction, PlainResults

NAMES = ("without_jit", "with_jit", "without_device", "with_device", "vmap", "scan", "grad", "sharded")
"""The variants that have names: four as in chex; mapped over and looped over an added axis of three; the gradient; arguments
sharded over all devices."""
_COPIES = 3

type Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
type Variant = str | Transform
type Options = FuseOptions | Literal["own"] | None


def chosen(variants: Variant | Iterable[Variant] | None) -> tuple[Variant, ...]:
    """The variants that are asked for; None: all that have names.

    Raises:
      ValueError: one is neither a name nor a function.
    """
    if variants is None:
        return NAMES
    found = (variants,) if isinstance(variants, str) or callable(variants) else tuple(variants)
    for variant in found:
        if not callable(variant) and variant not in NAMES:
            raise ValueError(f"there is no variant {variant!r}: a variant is one of {', '.join(map(repr, NAMES))}, or a "
                             "function that transforms a function, as `self.variant` of chex.variants")  # fmt: skip
    if not found:
        raise ValueError("`variants` is empty: nothing would be tested")
    return found


def name_of(variant: Variant) -> str:
    """The name of a variant in messages and tests."""
    if isinstance(variant, str):
        return variant
    kind = getattr(variant, "type", None)  # chex sets it
    return str(getattr(kind, "name", "") or getattr(variant, "__name__", type(variant).__name__)).lower()


@dataclass(frozen=True)
class Run:
    """A function, with its arguments, and what is expected of it. The context (`overrides`) says whether it runs fused or plain."""

    function: Callable[..., Any]
    leaves: Sequence[Any]
    expected: Callable[[], PlainResults]


class VariedCall:
    """A call of a function by its leaves: its variants, its plans, and the results of the plain function, which variants share.

    Args:
      fn: a fused function; one that calls some, which are what is run and planned then; or any other, which is fused as a whole.
      args, kwargs: of the call; values are drawn for a `jax.ShapeDtypeStruct`.
      options: as for `pallasfuse.testing.assert_equivalent`.

    Raises:
      TypeError: `fn` is no function, an argument that is not static is no array, or `options` are none.
      TraceError: the function cannot be traced with these arguments.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> None:
        if isinstance(fn, functools.partial) and isinstance(fn.func, FusedFunction):  # a bound method, for one
            args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
        if not callable(fn):
            raise TypeError(f"the first argument is the function to test, got {type(fn).__name__}")
        if options not in (None, "own") and not isinstance(options, FuseOptions):
            raise TypeError(f"options is a FuseOptions, 'own' or None, got {options!r}")
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.override: Override = "every kernel" if options is None else None if options == "own" else options
        fused = fn if isinstance(fn, FusedFunction) else fuse(fn, options=None if options == "own" else options)
        self.leaves = [self._checked(x, n) for n, x in enumerate(fused.leaves(args, kwargs))]

        def whole(*leaves: Any) -> Any:
            return fused.with_leaves(args, kwargs, leaves)

        def as_written(*leaves: Any) -> Any:
            more, named = jax.tree.unflatten(jax.tree.structure((args, kwargs)), leaves)
            return fn(*more, **named)

        calls_fused = fn is not fused and any(True for _ in fused_calls(self.traced(as_written, self.leaves)))
        self._run = as_written if calls_fused else whole

    def _checked(self, leaf: Any, number: int) -> Any:
        if not _is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
            raise TypeError(f"{self.name}: among its arguments is {leaf!r}, which is no array: name it in static_argnums or "
                            "static_argnames of pallasfuse.fuse, and test the fused function")  # fmt: skip
        return drawn(leaf, np.random.default_rng(number))

    def traced(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Jaxpr:
        """The jaxpr of a function as it runs fused."""
        try:
            with overridden(self.override):
                return jax.make_jaxpr(function)(*leaves)
        except (TypeError, jax.errors.JAXTypeError) as error:
            raise TraceError(f"{self.name} could not be traced: {error}\nName the arguments that are not arrays in static_argnums "
                             "or static_argnames of pallasfuse.fuse, and test the fused function.") from error  # fmt: skip

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans of the call, one for each distinct fused call in it: the layers of a model are often the same."""
        calls = fused_calls(self.traced(self._run, self.leaves))
        return [call.plan_here() for call in {(str(c.jaxpr), c.options): c for c in calls}.values()]

    def variant(self, variant: Variant) -> Run:
        """How a variant is run."""
        run, leaves = self._run, self.leaves
        if not isinstance(variant, str):
            return Run(variant(run), leaves, lambda: self._plain)
        match variant:
            case "without_jit":
                return Run(run, leaves, lambda: self._plain)
            case "with_jit":
                return Run(jax.jit(run), leaves, lambda: self._plain)
            case "without_device":
                return Run(run, jax.device_get(leaves), lambda: self._plain)
            case "with_device":
                placed = [jax.device_put(x) if _is_array(x) else x for x in leaves]
                return Run(run, placed, lambda: self._plain)
            case "vmap":
                axes = [0 if _is_array(x) else None for x in leaves]
                return Run(jax.jit(jax.vmap(run, in_axes=axes)), self._stacked_leaves, lambda: self._plain_stacked)
            case "scan":
                return Run(jax.jit(self._scanned), self._stacked_leaves, lambda: self._plain_stacked)
            case "grad":
                return Run(jax.jit(self._gradient), leaves, lambda: self._plain_gradient)
            case "sharded":
                return Run(jax.jit(run), _sharded(leaves), lambda: self._plain)
            case _:
                raise AssertionError(variant)

    def unusable(self, variant: Variant) -> str:
        """Says why the plain function, or the devices at hand, do not allow a variant; empty if they do."""
        if not isinstance(variant, str):
            return ""
        if variant == "sharded" and len(jax.devices()) < 2:
            return "there is only one device (XLA_FLAGS=--xla_force_host_platform_device_count=4 makes four of a CPU)"
        if variant in ("vmap", "scan") and not any(map(_is_array, self.leaves)):
            return "there is no array among its arguments"
        if variant == "grad" and not any(map(_is_float, self.leaves)):
            return "there is no array of floats among its arguments"
        run = self.variant(variant)
        try:
            with overridden("plain"):
                jax.eval_shape(run.function, *run.leaves)
        except Exception as error:
            return f"the plain function itself fails ({type(error).__name__}: {str(error)[:300]})"
        return ""

    def _scanned(self, *stacked: Any) -> Any:
        changing = [n for n, x in enumerate(self.leaves) if _is_array(x)]

        def body(carry: None, slices: list[Any]) -> tuple[None, Any]:
            return carry, self._run(*_with(stacked, changing, slices))

        return jax.lax.scan(body, None, [stacked[n] for n in changing])[1]

    def _gradient(self, *leaves: Any) -> Any:
        """The gradient of the sum of the float outputs, weighted: with equal weights, many would be zero."""
        floats = [n for n, x in enumerate(leaves) if _is_float(x)]

        def loss(changing: list[Any]) -> Any:
            results = [x for x in jax.tree.leaves(self._run(*_with(leaves, floats, changing))) if _is_float(x)]
            if not results:
                raise TypeError("no output is a float")
            total = jnp.zeros((), jnp.float32)
            for x in results:
                total += jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape))
            return total

        return jax.grad(loss)([leaves[n] for n in floats])

    @cached_property
    def _plain_function(self) -> PlainFunction:
        return PlainFunction(self._run, self.leaves)

    @cached_property
    def _plain(self) -> PlainResults:
        return PlainResults(self._plain_function, [self.leaves])

    @cached_property
    def _plain_gradient(self) -> PlainResults:
        return PlainResults(PlainFunction(self._gradient, self.leaves), [self.leaves])

    @cached_property
    def _plain_stacked(self) -> PlainResults:
        arrays = [n for n, x in enumerate(self.leaves) if _is_array(x)]
        stacked = self._stacked_leaves
        several = [_with(stacked, arrays, [stacked[a][n] for a in arrays]) for n in range(_COPIES)]
        return PlainResults(self._plain_function, several, stacked=True)

    @cached_property
    def _stacked_leaves(self) -> list[Any]:
        return [_copies(x, np.random.default_rng((n, 1))) if _is_array(x) else x for n, x in enumerate(self.leaves)]


def _with(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    changed = list(leaves)
    for n, x in zip(places, values, strict=True):
        changed[n] = x
    return changed


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def _is_float(x: Any) -> bool:
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _copies(x: Any, random: np.random.Generator) -> Any:
    """An array and smaller ones of the same signs, along a new first axis; what is no float (lengths, masks) stays as it is."""
    if not _is_float(x):
        return jnp.stack([x] * _COPIES)
    wide = np.asarray(x, np.float64)
    smaller = [(wide * (1 - random.random(x.shape) / 2)).astype(x.dtype) for _ in range(_COPIES - 1)]
    return np.stack([np.asarray(x), *smaller])


def _sharded(leaves: Sequence[Any]) -> list[Any]:
    """Each array along the first dimension that the number of devices divides."""
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))

    def placed(x: Any) -> Any:
        if not _is_array(x):
            return x
        along = next((n for n, extent in enumerate(x.shape) if extent and extent % count == 0), None)
        spec = jax.sharding.PartitionSpec(*("devices" if n == along else None for n in range(len(x.shape))))
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    return [placed(x) for x in leaves]
