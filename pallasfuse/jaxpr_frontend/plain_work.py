"""Equations that have no nest, as records for the price (`ir.plain_work`): their shapes, types and parameters say it all."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.first_time import Later
from pallasfuse.ir import dtypes
from pallasfuse.ir.boundary import Boundary, NamedBoundary
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.plain_work import (
    Branches,
    Convolution,
    Drawn,
    Elimination,
    EliminationKind,
    Fourier,
    Nothing,
    Ordering,
    PlainWork,
    Priced,
    Running,
    Special,
    Trips,
    Unknown,
    Windows,
)
from pallasfuse.jaxpr_frontend.converted import Converted, named_boundary
from pallasfuse.jaxpr_frontend.inlining import ALL_CALLS, bodies
from pallasfuse.jaxpr_frontend.plans import dtype_of, shape_of
from pallasfuse.primitive_names import KERNEL_OF_LOOP

type Convert = Callable[[Jaxpr], Converted]
"""Converts a body."""


def work_of(eqn: JaxprEqn, convert: Convert) -> PlainWork | None:
    """Returns the record of an equation's work; None where it only moves elements, or where nothing more is known of it.

    Bodies of loops and branches are converted when somebody asks for them.
    """
    name = eqn.primitive.name
    if any(not isinstance(n, int) for atom in (*eqn.invars, *eqn.outvars) for n in shape_of(atom)):
        return None
    if name in _WORK:
        return _WORK[name](eqn)
    if name == "reshape" and eqn.params["dimensions"] is None:  # of what XLA stores: another one has a nest
        return Nothing()
    if name == KERNEL_OF_LOOP:
        return Priced(eqn.params["of"].price.us)
    if name == "scan":
        return _trips(eqn, convert)
    if name == "cond" or name in ALL_CALLS:
        return Branches(tuple(_program(_later(body, convert)) for body in bodies(eqn)))
    if name.startswith("reduce_window"):
        return _windows(eqn)
    return Unknown(name) if name in _UNKNOWN or "callback" in name else None


def run_of(eqn: JaxprEqn) -> int:
    """Returns how many elements lie side by side in each piece that positions choose, of a gather or a scatter; else 0."""
    numbers: Any = eqn.params.get("dimension_numbers")
    pieces: Any = eqn.outvars[0]
    if eqn.primitive.name == "gather":
        window, without = numbers.offset_dims, numbers.collapsed_slice_dims
    elif eqn.primitive.name.startswith("scatter"):
        window, without, pieces = numbers.update_window_dims, numbers.inserted_window_dims, eqn.invars[2]
    else:
        return 0
    source, positions, shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), shape_of(pieces)
    if any(not isinstance(n, int) for n in (*source, *positions, *shape)) or math.prod(positions[:-1]) <= 1:
        return 0
    own = [d for d in range(len(source)) if d not in {*without, *numbers.operand_batching_dims}]
    run, last = 1, len(source) - 1
    for d in reversed(range(len(shape))):
        if d not in window or own[window.index(d)] != last:
            break
        run, last = run * shape[d], last - 1
        if shape[d] != source[last + 1]:
            break
    return run


def chosen_within(eqn: JaxprEqn) -> int:
    """Returns how many elements, one after the other, positions choose from for neighbours in what is read or added; 0: from all.

    The outer dimensions of a gather's result are those of the operand, as long as both begin with the same ones, whole. So are
    those of what is added to an array, as far as each has positions of its own: others come after the positions for XLA's threads.
    """
    numbers: Any = eqn.params.get("dimension_numbers")
    if numbers is None or any(not isinstance(n, int) for a in eqn.invars for n in shape_of(a)):
        return 0
    source, from_dimension = shape_of(eqn.invars[0]), dict[int, int]()
    if eqn.primitive.name == "gather":
        result, window, by_itself = shape_of(eqn.outvars[0]), numbers.offset_dims, numbers.start_indices_batching_dims
        own = [
            d for d in range(len(source)) if d not in {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        ]
        from_dimension = dict(zip(window, own, strict=True))
    elif combines(eqn):
        result, window, by_itself = (
            shape_of(eqn.invars[2]),
            numbers.update_window_dims,
            numbers.scatter_indices_batching_dims,
        )
    else:
        return 0
    batch = [d for d in range(len(result)) if d not in window]
    for at, of_positions in zip(numbers.operand_batching_dims, by_itself, strict=True):
        from_dimension[batch[of_positions]] = at
    outer = 0
    while outer < len(source) and from_dimension.get(outer) == outer and result[outer] == source[outer]:
        outer += 1
    return math.prod(source[outer:])


def combines(eqn: JaxprEqn) -> bool:
    """Does an update make one element of what is there and what comes, rather than to put one in the place of the other?"""
    return eqn.primitive.name.startswith("scatter-")


_KEPT_APART = frozenset({"optimization_barrier", "rng_uniform", "pure_callback"})
"""Operations of which XLA keeps each."""


def operation_of(eqn: JaxprEqn) -> str:
    """Returns a text that is the same for operations that compute the same of equal operands.

    Empty for those with bodies or effects, those that XLA keeps, and where the text of a parameter leaves out a part of an array.
    """
    if eqn.effects or bodies(eqn) or eqn.primitive.name in _KEPT_APART:
        return ""
    places: dict[Any, int] = {}
    operands = [repr(a.val) if isinstance(a, Literal) else places.setdefault(a, len(places)) for a in eqn.invars]
    text = f"{eqn.primitive.name} {operands} {sorted(eqn.params.items())}"
    return "" if "..." in text else text


def chosen_by_platform(jaxpr: Jaxpr) -> frozenset[Var]:
    """The numbers of branches that a platform decides: such a branch stands in the program that XLA gets, and no choice."""
    return frozenset(v for e in jaxpr.eqns if e.primitive.name == "platform_index" for v in e.outvars)


def _later(body: Jaxpr, convert: Convert) -> Later[Converted]:
    return Later(lambda: convert(body))


def _program(converted: Later[Converted]) -> Later[LoopProgram]:
    return Later(lambda: converted.value.program)


def _size(atom: Any) -> int:
    return math.prod(shape_of(atom))


def _element_bytes(atom: Any) -> float:
    return float(dtypes.itemsize_bytes(dtype_of(atom)))


def _bytes(*atoms: Any) -> float:
    return sum(_size(a) * _element_bytes(a) for a in atoms)


_MOST_IN_LAST_PLACE = 4
"""Arrays of a convolution with so many dimensions, at most, have their channels last: one of images, and two of windows."""


def _convolution(eqn: JaxprEqn) -> PlainWork:
    images, weights, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    of_results, of_channels, *window = (shape_of(weights)[d] for d in numbers.rhs_spec)
    groups = params["feature_group_count"] * params["batch_group_count"]
    count, _, *made = (shape_of(result)[d] for d in numbers.out_spec)
    # where zeros stand between the elements, a library computes as many smaller convolutions without them
    apart = math.prod(params["lhs_dilation"])
    lengths = [shape_of(images)[d] for d in numbers.lhs_spec[2:]]
    met = math.prod(map(_met, window, lengths, params["lhs_dilation"], params["rhs_dilation"]))
    summed = max(1, math.prod(window) * of_channels // apart)
    of_weights = math.prod(made) < math.prod(window) and max(params["window_strides"], default=1) == 1
    is_forward = apart == 1 and not of_weights
    at_one_end = is_forward and any(low != high for low, high in params["padding"])
    takes_holes = at_one_end or (len(window) == 1 and not is_forward)
    return Convolution(
        groups, count * math.prod(made), max(1, of_results // groups), summed, dtype_of(images),
        _bytes(images, weights, result), tuple(window), max(1, count), of_channels, apart,
        _holes(window, params["rhs_dilation"]) if takes_holes else 1.0, of_weights, _bytes(images) if at_one_end else 0.0,
        _turned(eqn, of_weights=of_weights), lies_otherwise(eqn), max(1, met * of_channels),
        params["batch_group_count"] > 1, of_weights and params["feature_group_count"] > 1 == params["batch_group_count"],
    )  # fmt: skip


_OF_A_LIBRARY = frozenset({"float16", "bfloat16", "float32", "complex64", "complex128"})
"""The types of elements of which XLA's CPU backend has convolutions by a library, or by several of them."""


def library_orders(numbers: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of the images, the weights and the result of a convolution in the order of XLA's libraries.

    Images and results lie there by image, positions and channel, and weights by positions, channel and result.
    """
    images, weights, results = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    return (
        (images[0], *images[2:], images[1]), (*weights[2:], weights[1], weights[0]), (results[0], *results[2:], results[1])
    )  # fmt: skip


def lies_otherwise(eqn: JaxprEqn) -> bool:
    """Does XLA's CPU backend have a library for a convolution, if only its dimensions lay in another order?"""
    is_in_order = all(list(order) == sorted(order) for order in library_orders(eqn.params["dimension_numbers"]))
    return not is_in_order and is_of_a_library(eqn) and eqn.params["batch_group_count"] == 1


def is_of_a_library(eqn: JaxprEqn) -> bool:
    """Does XLA's CPU backend have a library for convolutions of such types?"""
    return {dtype_of(a) for a in (*eqn.invars, *eqn.outvars)} <= _OF_A_LIBRARY


def _met(window: int, length: int, apart: int, holes: int) -> int:
    """Counts the elements of an image that a window can meet along one dimension: no more than there are.

    apart: the distance between elements of the image. holes: that between elements of the window.
    """
    return min(-(-window // apart), length, -(-((length - 1) * apart + 1) // holes))


def _turned(eqn: JaxprEqn, *, of_weights: bool) -> tuple[bool, bool, bool]:
    """Says for both operands and the result of a convolution whether XLA has their dimensions in another order than the program.

    Images are first, and channels last, or second where windows have three dimensions (24 programs with convolutions and their
    gradients, compiled for an H100). In the gradient of weights, images stand for channels, and channels for images.
    """
    numbers = eqn.params["dimension_numbers"]

    def is_turned(atom: Any, images: int, channels: int) -> bool:
        shape = shape_of(atom)
        order = [d for d in range(len(shape)) if d not in (images, channels)]
        order = [channels, *order] if len(shape) > _MOST_IN_LAST_PLACE else [*order, channels]
        long = [d for d in (images, *order) if shape[d] != 1]
        return long != sorted(long)

    images, weights, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    own, other, made = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if of_weights:
        return is_turned(images, own[1], own[0]), is_turned(weights, other[1], other[0]), False
    return is_turned(images, own[0], own[1]), False, is_turned(result, made[0], made[1])


def _holes(window: Sequence[int], dilated: Sequence[int]) -> float:
    """The elements of a window, holes counted, over those that it has.

    XLA writes out holes as zeros where a library cannot have them: beside padding that differs at both ends, of which it writes out
    the zeros, too. Elsewhere, but for gradients, they cost nothing, or up to twice as much where windows are long with them and
    have many channels (63 convolutions of one dimension and 16 of two on an H100): not priced.
    """
    return math.prod(((n - 1) * d + 1) / max(1, n) for n, d in zip(window, dilated, strict=True))


def _is_last(axis: int, shape: tuple[int, ...]) -> bool:
    return math.prod(shape[axis + 1 :]) == 1


def _sort(eqn: JaxprEqn) -> PlainWork:
    shape, axis = shape_of(eqn.invars[0]), eqn.params["dimension"]
    each = sum(map(_element_bytes, eqn.invars))
    keys, others = eqn.invars[: eqn.params["num_keys"]], eqn.invars[eqn.params["num_keys"] :]
    by_integers = all(dtypes.is_integer(dtype_of(a)) for a in keys)
    # an operand of integers is taken for the positions
    apart = eqn.params["is_stable"] and not any(dtypes.is_integer(dtype_of(a)) for a in others)
    return Ordering(_rows(shape, axis), shape[axis], each, not _is_last(axis, shape), None, by_integers, apart)


def _largest(eqn: JaxprEqn) -> PlainWork:
    shape = shape_of(eqn.invars[0])
    axis = eqn.params.get("axis", len(shape) - 1) % len(shape)
    each = sum(map(_element_bytes, eqn.outvars))
    return Ordering(_rows(shape, axis), shape[axis], each, not _is_last(axis, shape), eqn.params["k"])


def _rows(shape: tuple[int, ...], axis: int) -> int:
    return math.prod(n for d, n in enumerate(shape) if d != axis)


def _running(eqn: JaxprEqn) -> PlainWork:
    (operand, *_), axis = eqn.invars, eqn.params["axis"]
    shape = shape_of(operand)
    each = _element_bytes(operand)
    of_logarithms = eqn.primitive.name == "cumlogsumexp"
    return Running(_rows(shape, axis), shape[axis], each, of_logarithms)


def _windows(eqn: JaxprEqn) -> PlainWork | None:
    window = eqn.params.get("window_dimensions")
    if window is None:
        return None
    result, operand = eqn.outvars[0], eqn.invars[0]
    return Windows(_size(result), math.prod(window), _element_bytes(operand), _bytes(operand))


def _ragged_product(eqn: JaxprEqn) -> PlainWork:
    """Returns the record of a product whose rows belong to groups: XLA multiplies all of them with the matrices of all groups.

    That is one sum, over the groups, too, of rows that are zero for the other groups and are stored. Of a product whose
    sum is ragged, no copies are counted.
    """
    rows, matrices, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    shape = shape_of(matrices)
    groups = math.prod(shape[d] for d in numbers.rhs_group_dimensions)
    shared, terms = (math.prod(shape[d] for d in dims) for dims in (batch, summed))
    columns = math.prod(shape) // max(1, groups * shared * terms)
    count = _size(result) // max(1, shared * columns)
    masked = groups * _bytes(rows)
    moved = _bytes(rows, matrices, result) + 2 * masked
    return Convolution(shared, count, columns, groups * terms, dtype_of(rows), moved, channels=groups * terms)


def _transform(eqn: JaxprEqn) -> PlainWork:
    (operand, *_), (result,) = eqn.invars, eqn.outvars
    lengths = tuple(eqn.params["fft_lengths"])
    arrays = _size(operand) // max(1, math.prod(shape_of(operand)[len(shape_of(operand)) - len(lengths) :]))
    return Fourier(arrays, lengths, _bytes(operand, result))


def _factorisation(kind: EliminationKind, operations: Callable[[int, int], float]) -> Callable[[JaxprEqn], PlainWork]:
    """Returns what makes the record of a factorisation, from the number of operations for a matrix of m rows and n columns."""

    def of(eqn: JaxprEqn) -> PlainWork:
        *batch, m, n = shape_of(eqn.invars[0])
        matrices = math.prod(batch)
        moved = _bytes(eqn.invars[0], *eqn.outvars)
        return Elimination(min(m, n), matrices * operations(m, n), moved, kind, matrices, rows=m)

    return of


def _triangular(eqn: JaxprEqn) -> PlainWork:
    matrix, right = eqn.invars
    *batch, size, _ = shape_of(matrix)
    matrices, moved = math.prod(batch), _bytes(matrix, right, *eqn.outvars)
    sides = _size(right) // max(1, size * matrices)
    return Elimination(size, 2.0 * size * _size(right), moved, "solved", matrices, sides, rows=size)


def _drawn(eqn: JaxprEqn) -> PlainWork:
    known = [v for v in eqn.outvars if dtype_of(v) in dtypes.SUPPORTED]
    return Drawn(int(_bytes(*known) / 4) if known else 2 * sum(map(_size, eqn.outvars)))


def _trips(eqn: JaxprEqn, convert: Convert) -> PlainWork:
    constants, carried = _compat.scan_counts(eqn) or (len(eqn.invars), len(eqn.outvars))
    sliced, stacked = len(eqn.invars) - constants - carried, len(eqn.outvars) - carried
    (body,) = bodies(eqn)
    inside = _later(body, convert)
    first = len(body.constvars) + constants

    def boundary() -> NamedBoundary:
        converted = inside.value
        last = len(converted.jaxpr.invars)
        return named_boundary(converted, Boundary(
            sliced=tuple(range(last - sliced, last)),
            carried=tuple((last - sliced - carried + n, n) for n in range(carried)),
            stacked=tuple(range(carried, carried + stacked)),
        ))  # fmt: skip

    return Trips(eqn.params["length"], _program(inside), first, Later(boundary))


_WORK: dict[str, Callable[[JaxprEqn], PlainWork]] = {
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_product,
    "sort": _sort,
    "top_k": _largest,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _running),
    "fft": _transform,
    "cholesky": _factorisation("factored", lambda m, n: n**3 / 3),
    "lu": _factorisation("pivoted", lambda m, n: 2 * m * n * min(m, n) / 3),
    **dict.fromkeys(
        ("geqrf", "qr", "householder_product"), _factorisation("reflected", lambda m, n: 2 * max(m, n) * min(m, n) ** 2)
    ),
    "triangular_solve": _triangular,
    **dict.fromkeys(("random_bits", "random_seed", "random_split", "random_fold_in", "threefry2x32"), _drawn),
    **dict.fromkeys(
        (
            "lgamma",
            "digamma",
            "igamma",
            "igammac",
            "polygamma",
            "zeta",
            "bessel_i0e",
            "bessel_i1e",
            "regularized_incomplete_beta",
            "igamma_grad_a",
            "random_gamma_grad",
        ),
        lambda eqn: Special(eqn.primitive.name, _size(eqn.outvars[0])),
    ),
    **dict.fromkeys(("random_wrap", "random_unwrap", "platform_index", "optimization_barrier"), lambda _: Nothing()),
}
_UNKNOWN = frozenset({
    "while", "eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal", "ffi_call", "pallas_call", "shard_map",
    "custom_partitioning",
})  # fmt: skip
"""Loops that end when something holds, iterations of a library, and what is written in another language."""
