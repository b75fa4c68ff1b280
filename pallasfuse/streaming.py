"""`fold`: a function over a whole axis, as init, update, combine and finish over chunks of it."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse import _compat
from pallasfuse.errors import FusionError, TraceError
from pallasfuse.options import FuseOptions
from pallasfuse.partial import MissingArgument, Partial, derive
from pallasfuse.plan import Plan
from pallasfuse.references import OfThisProcess, portable, reference_to, restored

Array = Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["of"])
@dataclass(frozen=True, slots=True)
class FoldState:
    """The knowledge about a part of the streamed axis: a pytree of arrays, of the same shapes whatever was seen.

    It can be carried by `lax.scan`, batched, donated, sent and stored. Meaning belongs to the fold that made it.
    """

    values: dict[str, Array]
    of: "_Derived"

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n}: {v.dtype}{list(v.shape)}" for n, v in self.values.items() if hasattr(v, "shape"))
        return f"FoldState({shapes})"


@dataclass(frozen=True, eq=False)
class _Derived(OfThisProcess):
    """A fold for one set of argument shapes."""

    partial: Partial
    trees: tuple[Any, ...]
    """The tree structure of each argument."""
    avals: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes and types of all leaves; streamed ones have the whole axis."""
    names: tuple[str, ...]
    out_tree: Any

    @property
    def streamed(self) -> tuple[int | None, ...]:
        return self.partial.streamed

    @property
    def length(self) -> int:
        return self.partial.axis.extent


class StreamedFunction:
    """A function whose reductions along one axis are taken chunk by chunk. Made by `fold`; pure JAX.

    `update` is `combine` with the state of a chunk, so chunks may come in any order and have any size, and states may be combined
    in any order: of every position of the axis, one. Positions that no chunk brings contribute nothing, as do those
    outside [0, length).
    """

    def __init__(self, function: Callable[..., Any], axis: Any, length: int | None) -> None:
        functools.update_wrapper(self, function)  # type: ignore[arg-type]  # it is not called: its methods are
        self._function, self._axis, self._length = function, axis, length
        self._derived: dict[Any, _Derived] = {}
        self._lock = Lock()

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def __repr__(self) -> str:
        return f"<pallasfuse.fold of {self._name}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamedFunction":
        function = copy.deepcopy(self._function, memo)
        return self if function is self._function else StreamedFunction(function, self._axis, self._length)

    def __reduce__(self) -> str | tuple[Any, ...]:
        place = reference_to(self)
        if place is None:
            return _fold_again, (portable(self._function), self._axis, self._length)
        return place.name if place.depth == 0 else (restored, (place,))

    # --- what a user calls

    def init(self, *args: Any) -> FoldState:
        """The state of no positions. args: arrays or `jax.ShapeDtypeStruct`s; the streamed dimensions of the whole axis, or, with
        `length=`, of any chunk.

        Raises:
          FusionError: the function cannot be run in chunks; says why, and what to do.
          TraceError: it cannot be traced with these arguments.
        """
        derived = self._derive(args)
        return FoldState(derived.partial.identity(), derived)

    def update(self, state: FoldState, *args: Any, start: Array | int) -> FoldState:
        """`state` and one chunk more.

        Args:
          args: as of the function; of streamed arguments the chunk.
          start: the position of the chunk's first element on the axis; an int or an int32 scalar.
        """
        _refuse_explicit_axes(self._name, [x for x in jax.tree.leaves(args) if _is_value(x)])
        size = self._check_chunk(state.of, args)
        if size == 0:
            return state
        start = _position(start)
        if isinstance(start, int) and not -_LARGEST <= start <= _LARGEST:
            raise ValueError(f"{self._name}: start={start} is no position of an axis of {state.of.length}")
        chunk = state.of.partial.local(jax.tree.leaves(args), size, start)
        return self.combine(state, FoldState(chunk, state.of), args=args)

    def combine(self, *states: FoldState, args: Sequence[Any] = ()) -> FoldState:
        """The state of all positions that these states have seen. Associative and commutative, up to rounding.

        args: the function's arguments (None for those that are not at hand), where the repair of a state reads any; it raises
          a TypeError that names them where they are missing.
        """
        self._check_states(states)
        if len(states) == 1:
            return states[0]
        stacked = {n: jnp.stack([s.values[n] for s in states]) for n in states[0].values}
        return self._merged(stacked, len(states), states[0].of, args)

    def merge(self, state: FoldState, axis_name: Any, *, args: Sequence[Any] = ()) -> FoldState:
        """Inside `shard_map` or `vmap`: the states along a named axis, combined; the same on each device. Only states travel.

        args: as in `combine`; arguments that are the same along the named axis.
        """
        self._check_states((state,))
        stacked = {n: _compat.all_gather(v, axis_name) for n, v in state.values.items()}
        parts = next(iter(stacked.values())).shape[0]
        return self._merged(stacked, parts, state.of, args)

    def finish(self, state: FoldState, *args: Any) -> Any:
        """The function's result for what the state has seen.

        args: those that the function reads after its reductions; the others, streamed ones among them, may be None or left out.
        """
        self._check_states((state,))
        leaves = self._leaves(state.of, args)
        results = self._needs(state.of, lambda: state.of.partial.finish(state.values, leaves), "finish")
        return jax.tree.unflatten(state.of.out_tree, results)

    def explain(self, *args: Any) -> Plan:
        """The plan of the whole function: print it to read the derivation."""
        return self._derive(args).partial.plan

    # --- arguments

    def _merged(self, stacked: dict[str, Array], parts: int, of: _Derived, args: Sequence[Any]) -> FoldState:
        leaves = self._leaves(of, tuple(args))
        return FoldState(self._needs(of, lambda: of.partial.merge(stacked, parts, leaves), "combine"), of)

    def _needs[T](self, of: _Derived, run: Callable[[], T], method: str) -> T:
        try:
            return run()
        except MissingArgument as missing:
            how = f"pass the arguments to {method}" + ("" if method == "finish" else " as args=(...)")
            streamed = of.streamed[missing.number] is not None
            raise TypeError(f"{self._name}: {method} needs the value of {of.names[missing.number]}"
                            f"{', a streamed argument' if streamed else ''}: {how}") from None  # fmt: skip

    def _check_states(self, states: Sequence[FoldState]) -> None:
        for state in states:
            if not isinstance(state, FoldState):
                raise TypeError(f"{self._name}: a state is a FoldState, got {type(state).__name__}")
        if not states:
            raise TypeError(f"{self._name}: combine takes one state or more, got none")
        known = list(self._derived.values())
        for state in states:
            if state.of not in known:
                raise ValueError(f"{self._name}: this state was made by another fold: make it with init of this one")
            if state.of is not states[0].of:
                raise ValueError(f"{self._name}: these states were made for arguments of different shapes or lengths")

    def _dimensions(self, args: tuple[Any, ...]) -> list[int | None]:
        """Returns the streamed dimension of every leaf; None for a leaf that each chunk sees whole."""
        axis = self._axis if isinstance(self._axis, tuple | list) else (self._axis,) * len(args)
        if len(axis) != len(args):
            raise TypeError(
                f"{self._name}: axis={self._axis!r} names {len(axis)} arguments, but {len(args)} were given"
            )
        found: list[int | None] = []
        try:
            jax.tree.map(lambda a, part: found.extend([a] * len(jax.tree.leaves(part))), tuple(axis), args,
                         is_leaf=lambda x: x is None)  # fmt: skip
        except ValueError as error:
            raise TypeError(
                f"{self._name}: axis={self._axis!r} is not a prefix of the arguments' structure: {error}"
            ) from error
        return found

    def _whole(self, args: tuple[Any, ...], length: int | None) -> tuple[list[int | None], list[jax.ShapeDtypeStruct]]:
        """Streamed dimensions, counted from the front, and avals over the whole axis."""
        leaves = jax.tree.leaves(args)
        dims: list[int | None] = []
        avals: list[jax.ShapeDtypeStruct] = []
        lengths: dict[int, str] = {}
        for n, (leaf, d) in enumerate(zip(leaves, self._dimensions(args), strict=True)):
            shape = list(jnp.shape(leaf))
            if d is not None:
                if not isinstance(d, int) or not -len(shape) <= d < len(shape):
                    raise ValueError(
                        f"{self._name}: argument leaf {n} has the shape {tuple(shape)}, and no dimension {d}"
                    )
                along = d % len(shape)
                lengths.setdefault(shape[along], f"leaf {n} of shape {tuple(shape)}, dimension {along}")
                shape[along] = shape[along] if length is None else length
            dims.append(None if d is None else d % len(shape))
            weak = bool(getattr(jax.typeof(leaf), "weak_type", False)) if _is_value(leaf) else False
            avals.append(jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.result_type(leaf), weak_type=weak))
        if len(lengths) != 1:
            found = " and ".join(f"{k} ({v})" for k, v in lengths.items()) or "no dimension"
            raise ValueError(
                f"{self._name}: streamed dimensions have one length, but axis={self._axis!r} gives {found}"
            )
        if min(lengths) < 2 and length is None:
            raise ValueError(f"{self._name}: the streamed axis has {min(lengths)} elements, and there is nothing to reduce: give "
                             "arguments of the whole axis, or its length as pallasfuse.fold(..., length=...)")  # fmt: skip
        return dims, avals

    def _derive(self, args: tuple[Any, ...]) -> _Derived:
        dims, avals = self._whole(args, self._length)
        tree = jax.tree.structure(args)
        key = (tree, tuple((a.shape, a.dtype, a.weak_type) for a in avals), tuple(dims))
        with self._lock:
            if key not in self._derived:
                self._derived[key] = self._trace(args, dims, avals)
            return self._derived[key]

    def _trace(self, args: tuple[Any, ...], dims: list[int | None], avals: list[jax.ShapeDtypeStruct]) -> _Derived:
        whole = jax.tree.unflatten(jax.tree.structure(args), avals)
        try:
            jaxpr, shapes = jax.make_jaxpr(self._function, return_shape=True)(*whole)
        except (TypeError, jax.errors.JAXTypeError) as error:
            raise TraceError(f"{self._name} could not be traced over the whole axis: {error}\nPass arrays or jax.ShapeDtypeStruct; "
                             "bind arguments that are not arrays with functools.partial.") from error  # fmt: skip
        if any(isinstance(c, jax.core.Tracer) for c in jaxpr.consts):
            raise FusionError(f"{self._name} closes over values that are being traced, which a fold would keep: pass them as "
                              "arguments (None in `axis`)")  # fmt: skip
        if jaxpr.effects:
            raise FusionError(f"{self._name} has side effects or collectives ({', '.join(map(str, jaxpr.effects))}): "
                              "a fold cannot repeat or move them")  # fmt: skip
        given = _compat.argument_names(jaxpr)
        names = [given[n] if n < len(given) and given[n] else f"argument leaf {n}" for n in range(len(avals))]
        partial = derive(jaxpr, dims, names, FuseOptions(), self._name)
        trees = tuple(jax.tree.structure(a) for a in args)
        return _Derived(partial, trees, tuple(avals), tuple(names), jax.tree.structure(shapes))

    def _leaves(self, of: _Derived, args: tuple[Any, ...]) -> list[Array | None]:
        """The leaves of the arguments that are not streamed; None where they are not given."""
        if len(args) > len(of.trees):
            raise TypeError(f"{self._name} takes {len(of.trees)} arguments, got {len(args)}")
        found: list[Array | None] = []
        for n, tree in enumerate(of.trees):
            at = len(found)
            count = tree.num_leaves
            if n >= len(args) or args[n] is None:
                found += [None] * count
                continue
            leaves, given = jax.tree.flatten(args[n])
            if given != tree:
                raise TypeError(
                    f"{self._name}: argument {n} has the structure {given}, but the state was made for {tree}"
                )
            for k, leaf in enumerate(leaves):
                if of.streamed[at + k] is None:
                    self._check_leaf(of, at + k, leaf, tuple(of.avals[at + k].shape))
                    found.append(leaf)
                else:
                    found.append(None)
        return found

    def _check_leaf(self, of: _Derived, number: int, leaf: Any, shape: tuple[int, ...]) -> None:
        aval = of.avals[number]
        if tuple(jnp.shape(leaf)) != shape or jax.dtypes.result_type(leaf) != aval.dtype:
            raise ValueError(f"{self._name}: {of.names[number]} is {jax.dtypes.result_type(leaf)}{list(jnp.shape(leaf))}, but the "
                             f"state was made for {aval.dtype}{list(shape)}")  # fmt: skip

    def _check_chunk(self, of: _Derived, args: tuple[Any, ...]) -> int:
        """The number of positions in a chunk."""
        self._check_states((FoldState({}, of),))
        trees = tuple(jax.tree.structure(a) for a in args)
        if trees != of.trees:
            raise TypeError(
                f"{self._name}: the arguments have the structure {trees}, but the state was made for {of.trees}"
            )
        leaves = jax.tree.leaves(args)
        sizes = {jnp.shape(x)[d] for x, d in zip(leaves, of.streamed, strict=True) if d is not None and d < jnp.ndim(x)}
        if len(sizes) != 1:
            raise ValueError(f"{self._name}: the streamed dimensions of a chunk have one size, got {sorted(sizes)}")
        size: int = sizes.pop()
        for n, (leaf, aval, d) in enumerate(zip(leaves, of.avals, of.streamed, strict=True)):
            self._check_leaf(of, n, leaf, tuple(size if k == d else s for k, s in enumerate(aval.shape)))
        return size


def _fold_again(function: Any, axis: Any, length: int | None) -> StreamedFunction:
    """The fold that was pickled by value."""
    return StreamedFunction(restored(function), axis, length)


_LARGEST = 2**30
"""Positions are 32-bit integers, and the last one of a chunk is computed from the first."""


def _is_value(leaf: Any) -> bool:
    return not isinstance(leaf, jax.ShapeDtypeStruct)


def _position(start: Any) -> Array | int:
    """An int where it is known."""
    if isinstance(start, int | np.integer) and not isinstance(start, bool):
        return int(start)
    if jnp.ndim(start) != 0 or not jnp.issubdtype(jax.dtypes.result_type(start), jnp.integer):
        raise TypeError(f"start is the position of the chunk's first element, an integer scalar; got {start!r}")
    wide = jnp.asarray(start)
    limit = min(_LARGEST + 1, int(jnp.iinfo(wide.dtype).max))
    return lax.convert_element_type(jnp.clip(wide, max(-limit, int(jnp.iinfo(wide.dtype).min)), limit), jnp.int32)


def fold(function: Callable[..., Any], axis: Any, *, length: int | None = None) -> StreamedFunction:
    """Computes `function` of a whole axis chunk by chunk: init, update, combine, merge and finish.

    Args:
      function: a `jax.numpy` function of positional arguments that reduces the streamed axis. Along it, its reductions may depend
        on each other, as far as one pass can compute them.
      axis: which dimension of which argument is streamed: a pytree prefix of the arguments, as `in_axes` of `jax.vmap`; None for
        what each chunk sees whole.
      length: of the whole axis, where `init` is given chunks. What the function makes of its length (a mean divides by it, a mask
        compares with it) is made of this number.

    Raises:
      TypeError, ValueError: of `init`, `update`, ...: arguments that do not fit, with what was expected.
    """
    if not callable(function):
        raise TypeError(f"pallasfuse.fold takes a function, got {type(function).__name__}")
    if length is not None and (not isinstance(length, int) or length < 2):
        raise ValueError(
            f"pallasfuse.fold: length is the number of elements of the whole axis, 2 or more; got {length!r}"
        )
    return StreamedFunction(function, axis, length)


def _refuse_explicit_axes(name: str, leaves: Sequence[Any]) -> None:
    """No chunk is partitioned over explicit mesh axes.

    Raises:
      TraceError: an argument is typed by some.
    """
    explicit = _compat.explicit_axes(_compat.explicit_mesh(leaves, current=False))
    if explicit:
        raise TraceError(f"{name}: its arguments are typed by the explicit mesh axes {', '.join(explicit)}, over which no chunk "
                         "is partitioned: make the mesh with axis_types=AxisType.Auto, or use jax.shard_map, and `merge` inside it "
                         "where a reduced axis is sharded")  # fmt: skip
