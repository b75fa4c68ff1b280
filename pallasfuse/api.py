"""The user's interface: `fuse` and the object it returns.

Modules that make plans are imported by the methods that need them: with SymPy and the emitters they take longer than JAX
itself, and a program that imports this one may never make a plan.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Protocol, Self, overload

import jax
import numpy as np

from pallasfuse import _compat, leaving
from pallasfuse.algorithms import for_platform
from pallasfuse.errors import FusionError, TraceError
from pallasfuse.first_time import IMPORTS, Once
from pallasfuse.options import FuseOptions
from pallasfuse.overrides import is_plain, options_here
from pallasfuse.primitive_names import FUSED_CALL
from pallasfuse.references import portable, reference_to, restored
from pallasfuse.targets import find

if TYPE_CHECKING:
    from pallasfuse.plan import Plan
    from pallasfuse.primitive import FusedCall
    from pallasfuse.stages import Traced


class FusedFunction[**P, R]:
    """A function whose dependent reductions are fused when it is compiled. Call it as the original.

    Works eagerly and under `jax.jit`, `vmap`, `scan` and `checkpoint`; its gradient is that of the original function.
    Arguments may be sharded over automatic or explicit mesh axes (`docs/streaming.md`). It is copied and pickled as functions are:
    a copy is the same object, and a pickle names the place where another process finds it. Without such a place, its function, its
    options and its static arguments are pickled.
    """

    __name__: str
    __wrapped__: Callable[P, R]
    _binding: "tuple[FusedFunction[..., R], Any] | None" = None
    """The fused function and the instance that a method is bound to; None for any other function."""

    def __init__(
        self,
        function: Callable[P, R],
        options: FuseOptions,
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._warning = Once()
        self._given_argnums = tuple(static_argnums)
        self._static_argnums, self._static_argnames = _both_ways(function, static_argnums, static_argnames)
        self.renew()
        self._plain = self._jit(function)
        self._unfused: set[Any] = set()
        """Signatures of calls that failed as they were fused."""

    def _jit(self, run: Callable[..., Any]) -> Any:
        return jax.jit(
            _with_signature_of(self._function, run), static_argnums=self._static_argnums or None,
            static_argnames=self._static_argnames or None, inline=True,
        )  # fmt: skip

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R
        if self._unfused and self._signature(args, kwargs) in self._unfused:
            result = self._plain(*args, **kwargs)
            return result
        try:
            result = self._compiled_for(args, kwargs)(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            with IMPORTS:
                from pallasfuse.recovery import may_recover
            leaves = self.leaves(args, kwargs)
            if not may_recover(self._options, leaves):
                raise
            result = self._recovered(error, leaves, args, kwargs)
        return result

    def _compiled_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the compiled function that runs this call.

        Inside a loop there is one for every choice of arguments that do not change in the loop.
        """
        loop = _compat.enclosing_loop()
        if loop is None:
            return self._jitted
        fixed = tuple(not _compat.changes_in(loop, x) for x in self.leaves(args, kwargs))
        if fixed not in self._in_loops:
            self._in_loops[fixed] = self._jit(functools.partial(self._run_in_loop, fixed))
        return self._in_loops[fixed]

    def _recovered(self, error: Exception, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that failed, without the kernels that are to blame."""
        from pallasfuse.recovery import recover

        plan = self.trace(*args, **kwargs).fuse().tile().plan
        if not plan.fuses:
            raise error
        self.renew()  # the program that failed is kept otherwise
        result, unfused = recover(
            self._name, error, plan, leaves, lambda: self._jitted(*args, **kwargs), lambda: self._plain(*args, **kwargs)
        )
        if unfused:
            self._unfused.add(self._signature(args, kwargs))
        return result

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a key that two calls share when they are compiled together."""
        static = self._static_positions(args)
        fixed = (
            [args[n] for n in sorted(static)],
            sorted((k, v) for k, v in kwargs.items() if k in self._static_argnames),
        )
        types = tuple((jax.numpy.shape(x), jax.dtypes.result_type(x)) for x in self.leaves(args, kwargs))
        return str(fixed), types

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__[S, **Q](
        self: "FusedFunction[Concatenate[S, Q], R]", instance: S, owner: type | None = None
    ) -> "FusedFunction[Q, R]": ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A bound method. An instance that is a pytree of arrays is an argument, compiled for once, and one that is static is
        compiled for as `jax.jit` does, by its hash; any other is read anew at each access, as its attributes may have changed."""
        if instance is None or self._binding is not None:
            return self
        leaves = jax.tree.leaves(instance)
        is_leaf = len(leaves) == 1 and leaves[0] is instance
        is_pytree = not is_leaf and all(isinstance(x, jax.Array | np.ndarray | int | float) for x in leaves)
        if is_pytree or self._instance_name() in self._static_argnames:
            return _MethodOfArgument(self, instance)
        bound = functools.partial(self._function, instance)
        functools.update_wrapper(bound, self._function)
        shifted = tuple(n - 1 if n > 0 else n for n in self._given_argnums if n != 0)
        method: FusedFunction[..., R] = FusedFunction(bound, self._options, shifted, self._static_argnames)
        method._binding = self, instance
        return method

    def _instance_name(self) -> str | None:
        """The name of the first parameter, which a method calls its instance; None where there is none."""
        try:
            return next(iter(inspect.signature(self._function).parameters), None)
        except (TypeError, ValueError):
            return None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._binding is not None:
            return _bound(*copy.deepcopy(self._binding, memo))
        function = copy.deepcopy(self._function, memo)
        return self if function is self._function else _fused_again(function, *self._how())

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._binding is not None:
            return _bound, self._binding
        place = reference_to(self)
        if place is None:
            return _fused_again, (portable(self._function), *self._how())
        return place.name if place.depth == 0 else (restored, (place,))

    def _how(self) -> tuple[Any, ...]:
        """Returns what `fuse` was told."""
        return self._options, self._given_argnums, self._static_argnames

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the arguments that are not static, in the order of the jaxpr's inputs."""
        static = self._static_positions(args)
        dynamic = tuple(a for n, a in enumerate(args) if n not in static)
        return jax.tree.leaves((dynamic, {k: v for k, v in kwargs.items() if k not in self._static_argnames}))

    def with_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> Any:
        """The call with other values for its `leaves`."""
        static = self._static_positions(args)
        dynamic = [a for n, a in enumerate(args) if n not in static]
        named = {k: v for k, v in kwargs.items() if k not in self._static_argnames}
        arrays, renamed = jax.tree.unflatten(jax.tree.structure((dynamic, named)), leaves)
        remaining = iter(arrays)
        return self(*(a if n in static else next(remaining) for n, a in enumerate(args)), **kwargs | renamed)

    def _static_positions(self, args: tuple[Any, ...]) -> set[int]:
        return {n % len(args) for n in self._static_argnums if -len(args) <= n < len(args)} if args else set()

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Traces a call over automatic mesh axes, and returns (jaxpr, tree of the result).

        Raises:
          TraceError: the function itself speaks of explicit ones.
        """
        mesh = _compat.explicit_mesh(self.leaves(args, kwargs))
        if mesh is None:
            return self._trace_as_typed(args, kwargs)
        with IMPORTS:
            from pallasfuse.primitive import automatic
        static = self._static_positions(args)
        plain_args = tuple(a if n in static else jax.tree.map(_untyped, a) for n, a in enumerate(args))
        plain = {k: v if k in self._static_argnames else jax.tree.map(_untyped, v) for k, v in kwargs.items()}
        try:
            with jax.sharding.use_abstract_mesh(automatic(mesh)):
                return self._trace_as_typed(plain_args, plain)
        except ValueError as error:
            raise TraceError(f"{self._name} could not be traced: {error}\nIts arguments are typed by explicit mesh axes, which are "
                             "automatic inside a fused function: pass sharded arrays as arguments instead of capturing them, and "
                             "leave `out_sharding` and `reshard` outside.") from error  # fmt: skip

    def _trace_as_typed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        static = {k: v for k, v in kwargs.items() if k in self._static_argnames}
        function = functools.partial(self._function, **static) if static else self._function
        static_argnums = tuple(n for n in self._static_argnums if -len(args) <= n < len(args))
        make = jax.make_jaxpr(function, static_argnums=static_argnums, return_shape=True)
        jaxpr, shapes = make(*args, **{k: v for k, v in kwargs.items() if k not in static})
        return for_platform(jaxpr, jax.default_backend()), jax.tree.structure(shapes)

    def _run_in_loop(self, fixed: tuple[bool, ...], /, *args: Any, **kwargs: Any) -> Any:
        return self._run_with(fixed, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_with((), args, kwargs)

    def _run_with(self, fixed: tuple[bool, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the call itself. fixed: which leaves of the arguments do not change in the loop around it; empty: there is none."""
        if is_plain():
            return self._function(*args, **kwargs)
        if jax.config.jax_disable_jit or (
            (jax.config.jax_debug_nans or jax.config.jax_debug_infs)
            and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        ):  # the user looks at values: those of every operation, in the function's own order
            return self._function(*args, **kwargs)
        options = options_here(self._options)
        with IMPORTS:
            from pallasfuse.loop_invariants import outside_of_loop
            from pallasfuse.primitive import call_fused, call_typed
        jaxpr, out_tree = self._trace(args, kwargs)
        leaves = self.leaves(args, kwargs)
        whole = leaving.stays_whole(jaxpr)
        if whole is not None:  # it keeps the original function, in its order
            if options.strict:
                raise FusionError(f"strict: {self._name} has {whole}, and stays with XLA as a whole: move them out of the fused "
                                  "function")  # fmt: skip
            return self._function(*args, **kwargs)
        mesh = _compat.explicit_mesh(leaves)
        if mesh is None and any(fixed) and options.schedule is None:  # a schedule is of the function as it is written
            jaxpr, leaves = outside_of_loop(jaxpr, fixed, leaves)
        how = options, self._name, self._warning, leaves
        results = call_fused(jaxpr, *how) if mesh is None else call_typed(mesh, jaxpr, self._types(args, kwargs), *how)
        return jax.tree.unflatten(out_tree, results)

    def _types(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Returns the types of the results by JAX's own rules for explicit mesh axes; None where these rules do not decide."""
        try:
            return _compat.result_types(self._trace_as_typed(args, kwargs)[0])
        except Exception:  # what else may be wrong with the function has shown over automatic axes
            return None

    def trace(self, *args: Any, **kwargs: Any) -> "Traced":
        """The first stage: arguments are arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          TraceError: the function cannot be traced with these arguments.
        """
        with IMPORTS:
            from pallasfuse import stages
        try:
            jaxpr, out_tree = self._trace(args, kwargs)
            leaves = self.leaves(args, kwargs)
        except (TypeError, jax.errors.JAXTypeError) as error:
            raise TraceError(f"{self._name} could not be traced: {error}\nPass arrays or jax.ShapeDtypeStruct, and name the "
                             "arguments that are not arrays in static_argnums or static_argnames.") from error  # fmt: skip
        avals = tuple(jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x)) for x in leaves)
        call = stages.Call(
            jaxpr, avals, lambda flat: jax.tree.unflatten(out_tree, flat), lambda *a, **k: self.leaves(a, k),
            self._options, self._name, lambda: self._jitted.trace(*args, **kwargs),
        )  # fmt: skip
        return stages.trace(call)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower what a call with these arguments runs, as `jax.jit(f).lower(...)` does: `compile` and the analyses are JAX's own.

        Its kernels are those of a call, checked on the device at hand; `trace(...).fuse().tile().lower()` lowers a plan
        as it stands.
        """
        lowered: jax.stages.Lowered = self._jitted.lower(*args, **kwargs)
        return lowered

    def explain(self, *args: Any, target: str | None = None, **kwargs: Any) -> "Plan":
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s); print it to read the derivation.

        `target` plans for another target than the function's own, or for those that stand in for it where these are predicted to
        be faster; its device is not needed. What a call has measured on its device is in `verdicts`, and kernels that lost are
        not among `kernels`; nothing is measured here.
        """
        with IMPORTS:
            from pallasfuse.check import check, wanted
            from pallasfuse.stages import target_at_hand
        if target is not None:
            return self.trace(*args, **kwargs).fuse(target).tile().plan
        plan, device = self.planned(*args, **kwargs)
        if device is None or not wanted(self._options):
            return plan
        call = self.call_of(args, kwargs)
        if call is None:
            return check(plan, device, measure=False)
        return call.settled(target_at_hand(None, self._options), device, measure=False)

    def planned(self, *args: Any, **kwargs: Any) -> "tuple[Plan, Any]":
        """The plan for these arguments before anything is measured, and the device of a call; None where there are several."""
        with IMPORTS:
            from pallasfuse.check import wanted
            from pallasfuse.recovery import device_of
        concrete = [x for x in self.leaves(args, kwargs) if not isinstance(x, jax.core.Tracer)]
        device = device_of(concrete)
        one_device = device is not None
        timed = one_device and wanted(self._options)
        plan = self._plan_of_call(args, kwargs, device)
        return plan or self.trace(*args, **kwargs).fuse(timed=timed, one_device=one_device).tile().plan, device

    def _plan_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any) -> "Plan | None":
        """Returns a call's plan; None where it is more than one equation. device: None where the arguments are on several."""
        with IMPORTS:
            from pallasfuse.stages import target_at_hand
        call = self.call_of(args, kwargs)
        if call is None:
            return None
        return call.plan(call.judged(target_at_hand(None, self._options), device))

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "FusedCall | None":
        """The equation that a call is traced to; None where it is more than one, or another."""
        try:
            (eqn,) = self._jitted.trace(*args, **kwargs).jaxpr.eqns
            call: FusedCall = eqn.params["call"]
        except Exception:  # `trace` says what is wrong with a function, and has more cases
            return None
        return call if eqn.primitive.name == FUSED_CALL and call.options == self._options else None

    def renew(self) -> None:
        """Forget what was compiled, so that the next call uses what was measured since."""
        self._jitted = self._jit(self._run)
        self._in_loops: dict[tuple[bool, ...], Any] = {}

    def __repr__(self) -> str:
        return f"<pallasfuse.fuse of {self._name}>"


class _MethodOfArgument[**P, R](FusedFunction[P, R]):
    """A method of an instance that is a pytree of arrays, or static: the fused function, whose first argument is the instance."""

    def __init__(self, unbound: FusedFunction[..., R], instance: Any) -> None:
        functools.update_wrapper(self, unbound._function)
        self._function, self._options = unbound._function, unbound._options
        self._unbound, self._instance = unbound, instance
        self._binding = unbound, instance

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._unbound(self._instance, *args, **kwargs)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return self._unbound.leaves((self._instance, *args), kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> "Traced":
        traced = self._unbound.trace(self._instance, *args, **kwargs)
        return replace(traced, call=replace(traced.call, flatten=lambda *a, **k: self.leaves(a, k)))

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "FusedCall | None":
        return self._unbound.call_of((self._instance, *args), kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._unbound.lower(self._instance, *args, **kwargs)

    def renew(self) -> None:
        self._unbound.renew()


def _fused_again(
    function: Any, options: FuseOptions, static_argnums: Sequence[int], static_argnames: Sequence[str]
) -> FusedFunction[..., Any]:
    """The fused function that was copied or pickled by value."""
    return FusedFunction(restored(function), options, static_argnums, static_argnames)


def _bound(fused: FusedFunction[..., Any], instance: Any) -> Any:
    """The method that was copied or pickled."""
    return fused.__get__(instance, type(instance))


def _untyped(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of a leaf, without sharding."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _with_signature_of(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, for `jax.jit` to check static arguments against and to name the arguments of `function` in its messages."""

    def named(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    named.__name__ = getattr(function, "__name__", type(function).__name__)
    named.__qualname__ = getattr(function, "__qualname__", named.__name__)
    with contextlib.suppress(TypeError, ValueError):  # some callables of extensions have none
        named.__signature__ = inspect.signature(function, follow_wrapped=False)  # type: ignore[attr-defined]
    return named


def _both_ways(
    function: Callable[..., Any], argnums: Sequence[int], argnames: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Static arguments by position and by name, each completed by the other, as `jax.jit` does."""
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return tuple(argnums), tuple(argnames)
    flexible = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else None for p in parameters]
    named = [flexible[n] for n in argnums if -len(flexible) <= n < len(flexible)]
    placed = [flexible.index(name) for name in argnames if name in flexible]
    positions = dict.fromkeys((*argnums, *(n for n in placed if n not in argnums and n - len(flexible) not in argnums)))
    return tuple(positions), tuple(dict.fromkeys((*argnames, *(n for n in named if n is not None))))


class _Decorator(Protocol):
    """The decorator that `fuse` with options alone returns: it fuses a function, and keeps the types of arguments and result."""

    def __call__[**P, R](self, function: Callable[P, R], /) -> FusedFunction[P, R]: ...


@overload
def fuse[**P, R](
    function: Callable[P, R],
    /,
    *,
    target: str | None = ...,
    strict: bool = ...,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    options: FuseOptions | None = ...,
) -> FusedFunction[P, R]: ...
@overload
def fuse(
    *,
    target: str | None = ...,
    strict: bool = ...,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    options: FuseOptions | None = ...,
) -> _Decorator: ...
def fuse(
    function: Callable[..., Any] | None = None,
    /,
    *,
    target: str | None = None,
    strict: bool = False,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    options: FuseOptions | None = None,
) -> Any:
    """Fuse the dependent reductions of a `jax.numpy` function.

    Args:
      function: any function that `jax.jit` accepts. Without it, `fuse(...)` returns a decorator.
      target: 'xla', 'xla_gpu', 'interpret', 'triton', 'mosaic_gpu', 'mosaic_cluster', or None for the best one of the platform.
      strict: raise `FusionError` when anything but layout changes is left to XLA; allow no exceptions (see `FuseOptions`).
      static_argnums, static_argnames: as in `jax.jit`.
      options: everything else; `target` and `strict` override its fields.

    Raises:
      TargetError: `target` is not the name of a target.
    """
    if function is None:
        return functools.partial(fuse, target=target, strict=strict, static_argnums=static_argnums,
                                 static_argnames=static_argnames, options=options)  # fmt: skip
    if not callable(function):
        raise TypeError(f"pallasfuse.fuse takes a function, got {type(function).__name__}")
    if options is not None and not isinstance(options, FuseOptions):
        raise TypeError(f"pallasfuse.fuse: options is a FuseOptions, got {type(options).__name__}")
    base = options or FuseOptions()
    merged = replace(base, target=target or base.target, strict=strict or base.strict)
    if merged.target is not None:
        find(merged.target)
    argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    argnames = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if not all(isinstance(n, int) for n in argnums) or not all(isinstance(n, str) for n in argnames):
        raise TypeError("pallasfuse.fuse: static_argnums are integers and static_argnames are strings, got "
                        f"{static_argnums!r} and {static_argnames!r}")  # fmt: skip
    return FusedFunction(function, merged, argnums, argnames)
