"""Axis unification: what is the same axis, what is read over renamed axes, how splits spread, what is refused."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import External, Nest
from pallasfuse.jaxpr_frontend import Converted, axes_of, conversion
from pallasfuse.jaxpr_frontend.dimensions import Dimensions
from tests.jaxpr_frontend.programs import check, converted, reasons, text


def spaced(dims: Dimensions, *extents: int) -> list[int]:
    space = dims.space()
    return [dims.fresh(extent, (space,)) for extent in extents]


def extents(dims: Dimensions, symbols: list[int]) -> list[int]:
    return [dims.extent(s) for s in dims.leaves(symbols)]


@pytest.mark.parametrize(
    ("before", "after", "factors"),
    [
        ((4, 6), (4, 6), [4, 6]),
        ((24,), (4, 6), [4, 6]),
        ((4, 6), (24,), [4, 6]),
        ((6, 4), (3, 8), [3, 2, 4]),
        ((4, 6), (2, 12), [2, 2, 6]),
        ((8, 9), (2, 4, 3, 3), [2, 4, 3, 3]),
        ((2, 3, 4), (6, 4), [2, 3, 4]),
        ((), (), []),
    ],
)
def test_common_factors(before: tuple[int, ...], after: tuple[int, ...], factors: list[int]) -> None:
    dims = Dimensions()
    a, b = spaced(dims, *before), spaced(dims, *after)
    assert dims.match(a, b) is not None
    assert dims.leaves(a) == dims.leaves(b)
    assert extents(dims, a) == factors


@pytest.mark.parametrize(("before", "after"), [((4, 6), (3, 8)), ((4, 6), (6, 4)), ((10, 3), (3, 10))])
def test_factors_that_do_not_nest_are_refused_and_nothing_is_split(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    dims = Dimensions()
    a, b = spaced(dims, *before), spaced(dims, *after)
    assert dims.match(a, b) is None
    assert extents(dims, a) == list(before)
    assert extents(dims, b) == list(after)


def test_symbols_of_one_space_are_kept_apart_but_are_split_alike() -> None:
    dims = Dimensions()
    i, j = spaced(dims, 6, 6)
    assert dims.match([i], [j]) is not None
    assert dims.leaves([i]) != dims.leaves([j])
    assert dims.match([j], spaced(dims, 2, 3)) is not None
    assert extents(dims, [i]) == extents(dims, [j]) == [2, 3]
    assert len(set(dims.leaves([i, j]))) == 4


def test_merging_is_transitive_through_spaces() -> None:
    """a = b and b = c put a and c in one class, so a symbol that shares a space with a cannot join c."""
    dims = Dimensions()
    a, other = spaced(dims, 5, 5)
    (b,), (c,) = spaced(dims, 5), spaced(dims, 5)
    assert dims.match([a], [b]) is not None
    assert dims.match([b], [c]) is not None
    assert dims.match([c], [other]) is not None
    assert dims.leaves([a]) == dims.leaves([c]) != dims.leaves([other])


def test_the_factors_of_one_symbol_are_kept_apart() -> None:
    dims = Dimensions()
    (a,) = spaced(dims, 9)
    p, q = spaced(dims, 3, 3)
    assert dims.match([a], [p, q]) is not None
    (b,) = spaced(dims, 9)
    assert dims.match([a], [b]) is not None
    (r,) = spaced(dims, 3)
    assert dims.match([p], [r]) is not None
    assert dims.match([r], [q]) is not None  # b and a are (p, q), with p = r
    assert len(set(dims.leaves([b]))) == 2


def test_factors_stay_in_the_spaces_of_what_they_split() -> None:
    dims = Dimensions()
    a, b = spaced(dims, 6, 2)
    left, right = (dims.fresh(e, ()) for e in (3, 2))
    assert dims.match([a], [left, right]) is not None
    assert dims.match([right], [b]) is not None
    assert dims.leaves([right]) != dims.leaves([b])


def test_factors_of_alike_symbols_are_alike() -> None:
    dims = Dimensions()
    i, j = spaced(dims, 12, 12)
    assert dims.match([i], [j]) is not None
    assert dims.match([i], spaced(dims, 3, 4)) is not None
    assert dims.match([i], spaced(dims, 3, 2, 2)) is not None
    assert extents(dims, [i]) == extents(dims, [j]) == [3, 2, 2]


def test_splits_that_chase_each_other_stop() -> None:
    """x and x' are alike and face each other at an offset: every cut of one cuts the other."""
    dims = Dimensions()
    x, y = spaced(dims, 12, 2)
    z, w = spaced(dims, 2, 12)
    assert dims.match([x], [w]) is not None
    assert dims.match([x, y], [z, w]) is None
    assert extents(dims, [x]) == extents(dims, [w])


def is_sound(result: Converted) -> bool:
    """Distinct axes in every tensor and nest, and reads with the extents of the definition (as `verify` says)."""
    defined = {d.name: d for d in result.program.definitions()}
    for node in defined.values():
        space = node.axes + (node.reduced if isinstance(node, Nest) else ())
        if len(set(space)) != len(space):
            return False
        if isinstance(node, Nest):
            for read in postorder(node.body):
                if isinstance(read, Read) and [a.extent for a in read.indices] != [
                    a.extent for a in defined[read.tensor].axes
                ]:
                    return False
    return len({a.name for d in defined.values() for a in d.axes}) == len({a for d in defined.values() for a in d.axes})


def test_second_reading_is_renamed() -> None:
    assert "x[i, j] * t0[j, k]" in text(lambda x: x @ x.T, np.ones((4, 6)))


def test_the_operand_with_more_reductions_behind_it_keeps_its_axes() -> None:
    """Written with the shallow operand first (as einsum does), and with it second."""

    def scores(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = x @ w
        return rows, jax.nn.softmax(rows @ rows.T)

    def first(x: jax.Array, w: jax.Array) -> jax.Array:
        rows, p = scores(x, w)
        return jax.lax.dot_general(rows, p, (((0,), (1,)), ((), ())))

    def second(x: jax.Array, w: jax.Array) -> jax.Array:
        rows, p = scores(x, w)
        return p @ rows

    for function in (first, second):
        result = check(function, np.sin(np.arange(24.0)).reshape(4, 6), np.cos(np.arange(30.0)).reshape(6, 5))
        defined = {n.name: n.axes for n in result.program.nests}
        last = result.program.nests[-1]
        assert isinstance(last, Nest)
        reads = {r.tensor: r.indices for r in postorder(last.body) if isinstance(r, Read)}
        assert {name: axes == defined[name] for name, axes in reads.items()} == {"t0": False, max(reads): True}


def test_an_input_is_renamed_rather_than_what_is_computed_from_it() -> None:
    result = check(lambda x, w: x + x @ w, np.ones((4, 6)), np.ones((6, 6)))
    assert str(result.program).splitlines()[-2].endswith("= x[i, k] + t0[i, k]")


def test_undo_restores_everything() -> None:
    dims = Dimensions()
    a, b = spaced(dims, 24, 6)
    (c,) = spaced(dims, 6)
    mark = dims.mark()
    before = dims.leaves([a, b, c])
    assert dims.match([a], spaced(dims, 4, 6)) == 0
    assert dims.match([b], [c]) == 0
    assert dims.match([a], [*spaced(dims, 2, 2), b]) == 1
    assert dims.leaves([a, b, c]) != before
    dims.undo(mark)
    assert dims.leaves([a, b, c]) == before
    assert dims.match([a], spaced(dims, 3, 8)) == 0
    assert extents(dims, [a, b, c]) == [3, 8, 6, 6]
    assert dims.match([a], [*spaced(dims, 3, 2, 4)]) == 0
    assert dims.match([b], [c]) == 0


def test_split_of_one_reading_splits_the_other() -> None:
    result = check(lambda x: ((x @ x.T).reshape(4, 2, 2).sum(2), x), np.arange(24.0).reshape(4, 6))
    (tensor,) = result.program.inputs
    assert [a.extent for a in tensor.axes] == [2, 2, 6]
    assert is_sound(result)


def test_unit_dimensions_have_no_axis() -> None:
    result = check(lambda x: x[:, None] + x.reshape(1, 4, 1, 6)[0], np.arange(24.0).reshape(4, 6))
    # x[:, None] is (4, 1, 6) and the other is (4, 1, 6): one space of two axes
    assert all(len(n.axes) == 2 for n in result.program.nests)


def test_dimensions_that_no_equation_ties_stay_apart() -> None:
    result = converted(lambda x, y: (jnp.exp(x), jnp.exp(y)), np.ones((4, 6)), np.ones((4, 6)))
    assert len({a for t in result.program.inputs for a in t.axes}) == 4


def test_grouped_heads_through_reshape() -> None:
    result = converted(lambda q: q.reshape(2, 5, 8, 4, 16), np.ones((2, 5, 32, 16)))
    assert [a.extent for a in result.program.inputs[0].axes] == [2, 5, 8, 4, 16]


def test_refused_reshape_names_the_shapes() -> None:
    result = converted(lambda x: x.reshape(3, 8), np.ones((4, 6)))
    assert reasons(result) == ["reshape of (4, 6) to (3, 8) neither splits nor merges the axes"]
    (external,) = result.program.nests
    assert isinstance(external, External)
    assert [a.extent for a in external.axes] == [3, 8]
    assert external.operands == ("x",)


def test_what_has_no_elements_is_left_to_xla_and_nothing_else() -> None:
    result = converted(lambda x, y: (jnp.exp(x).sum(0), x + 1, y + x.sum(0), y[1:1]), np.ones((0, 6)), np.ones(6))
    assert reasons(result) == [
        "exp of an array without elements", "reduce_sum of an array without elements", "add of an array without elements",
        "reduce_sum of an array without elements", "slice of an array without elements",
    ]  # fmt: skip
    (added,) = (n for n in result.program.nests if isinstance(n, Nest))
    assert [a.extent for a in added.axes] == [6]


def test_dimensions_that_only_xla_joins_are_no_axes() -> None:
    """Pairs of features that are stacked and joined stay one axis of the product; where something else reads them, they are two."""

    def pairs(x: Any) -> Any:
        return jnp.stack([x[:, ::2], x[:, 1::2]], -1)

    x, w = np.ones((4, 6)), np.ones((6, 5))
    result = converted(lambda x, w: pairs(x).reshape(4, 6) @ w, x, w)
    assert reasons(result)[-1] == "reshape of what XLA stores: it moves nothing"
    assert [a.extent for a in result.program.nests[-1].reduced] == [6]
    result = converted(lambda x, w: ((p := pairs(x)).reshape(4, 6) @ w, p.sum(1)), x, w)
    product, _ = (n for n in result.program.nests if isinstance(n, Nest) and n.is_reduction)
    assert [a.extent for a in product.reduced] == [3, 2]
    result = converted(lambda x, w: x.reshape(4, 6) @ w, np.ones((4, 3, 2)), w)
    assert reasons(result) == []


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [((6, 4), (2, 3, 4), [(2, 3), (4,)]), ((1, 4, 1), (4,), [(), (4,), ()]), ((0, 6), (0, 6), [(0,), (6,)]),
     ((3, 0, 1), (3, 0), [(3,), (0,), ()])],
)  # fmt: skip
def test_the_axes_of_each_dimension(shape: tuple[int, ...], axes: tuple[int, ...], expected: list[Any]) -> None:
    found = axes_of(shape, [Axis(f"a{n}", extent) for n, extent in enumerate(axes)])
    assert [tuple(a.extent for a in over) for _, over in found] == expected


# A chain of operations on one array. Each is tried with a choice that Hypothesis makes; the value is compared with JAX.
OPERATIONS = (
    "reshape",
    "merge",
    "transpose",
    "elementwise",
    "sum",
    "max",
    "broadcast",
    "gram",
    "add_first",
    "softmax",
    "flat",
)


def _apply(op: str, choice: int, x: jax.Array, first: jax.Array) -> jax.Array:
    rank = x.ndim
    axis = choice % rank if rank else 0
    match op:
        case "reshape" if rank:
            n = x.shape[axis]
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            d = divisors[choice % len(divisors)]
            return x.reshape(*x.shape[:axis], d, n // d, *x.shape[axis + 1 :])
        case "merge" if rank > 1:
            axis %= rank - 1
            return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        case "transpose" if rank > 1:
            return jnp.moveaxis(x, axis, choice % (rank - 1))
        case "elementwise":
            return jnp.tanh(x) * x + 0.5
        case "sum" if rank > 1:
            return x.sum(axis) / x.shape[axis]
        case "max" if rank > 1:
            return x.max(axis, keepdims=bool(choice % 2))
        case "broadcast" if rank < 4 and x.size < 200:
            return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], 2, *x.shape[axis:]))
        case "gram" if rank > 1 and x.size < 200:
            rows = x.reshape(x.shape[0], -1)
            return rows @ rows.T / rows.shape[1]
        case "add_first" if x.size == first.size:
            return x + first.reshape(x.shape)
        case "flat":
            return jnp.exp(-jnp.abs(x)).reshape(-1)
        case "softmax" if rank:
            return jax.nn.softmax(x, axis=axis)
    return x


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("part", range(4))
def test_random_chains(part: int) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=st.sampled_from([(4, 6), (12,), (2, 3, 4), (6, 6), (1, 8), (4, 4, 2)]),
        steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 11)), min_size=1, max_size=7),
    )
    def run(shape: tuple[int, ...], steps: list[tuple[str, int]]) -> None:
        _check_chain(shape, steps)

    run()


def _check_chain(shape: tuple[int, ...], steps: list[tuple[str, int]]) -> None:
    x = np.sin(np.arange(np.prod(shape)) * 1.7).reshape(shape)

    def function(x: jax.Array) -> jax.Array:
        y = x
        for op, choice in steps:
            y = _apply(op, choice, y, x)
        return y

    result = check(function, x)
    assert is_sound(result)
    assert all("reshape" in r or "ties" in r for r in reasons(result))


@pytest.mark.parametrize(("name", "other"), [("sin", "cos"), ("transpose", "squeeze"), ("reduce_max", "reduce_min")])
def test_the_check_notices_a_wrong_rule(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison behind these tests can fail."""

    def function(x: jax.Array) -> jax.Array:
        return jnp.sin(x).T.max(0)

    x = np.arange(16.0).reshape(4, 4)
    assert check(function, x).program.nests
    monkeypatch.setitem(conversion._RULES, name, conversion._RULES[other])
    with pytest.raises(AssertionError, match="Not equal"):
        check(function, x)
