"""Updates that add to few places, as sums by place or in float32, against XLA's own in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallasfuse import _compat, device
from pallasfuse.decompositions import Decomposer, updates
from pallasfuse.decompositions.writing import Writer
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.jaxpr_frontend.conversion import convert
from pallasfuse.price.xla import price_xla

MODES = [lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS]


def ways(x, places, changes, dim, mode, window=None):
    """The rules' functions. window: the dimensions of the changes that lie along those of `x`; the last ones by default."""
    window = tuple(range(places.ndim - 1, changes.ndim)) if window is None else window
    numbers = lax.ScatterDimensionNumbers(window, (dim,), (dim,))
    jaxpr = jax.make_jaxpr(lambda *v: lax.scatter_add(*v, numbers, mode=mode))(x, places, changes)
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == "scatter-add")
    return [rule(eqn) for rule in (updates.in_single_steps, updates.by_place, updates.in_copies(2))]


def expected(x, places, changes, dim, mode):
    """The update in float64, one place after the other."""
    found = np.moveaxis(np.asarray(x, np.float64), dim, 0).copy()
    window = found.shape[1:]
    named = np.asarray(places).reshape(-1)
    if mode == lax.GatherScatterMode.CLIP:
        named = np.clip(named, 0, len(found) - 1)
    for at, row in zip(named, np.asarray(changes, np.float64).reshape(-1, *window), strict=True):
        if 0 <= at < len(found):
            found[at] += row
    return np.moveaxis(found, 0, dim)


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("part", range(4))
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_updates_add_what_meets_at_each_place(part, data):
    window = data.draw(st.lists(st.integers(1, 4), max_size=2))
    dim = data.draw(st.integers(0, len(window)))
    outside = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    count = data.draw(st.integers(1, 5))
    dtype, mode = (
        data.draw(st.sampled_from(["bfloat16", "float16", "float32", "int32"])),
        data.draw(st.sampled_from(MODES)),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = jnp.asarray(rng.integers(-4, 5, (*window[:dim], count, *window[dim:])), dtype)
    promised = mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS
    of_places = data.draw(st.sampled_from(["int32", "int8", "uint8"]))
    least, most = (0, count) if promised else (0 if of_places == "uint8" else -2, count + 2)
    places = jnp.asarray(rng.integers(least, most, (*outside, 1)), of_places)
    changes = jnp.asarray(rng.integers(-4, 5, (*outside, *window)), dtype)
    wanted = expected(x, places, changes, dim, mode)
    along = tuple(sorted(data.draw(st.permutations(range(changes.ndim)))[: len(window)]))
    order = iter(range(len(outside))), iter(range(len(outside), changes.ndim))
    changes = jnp.transpose(changes, [next(order[d in along]) for d in range(changes.ndim)])
    written = [run for run in ways(x, places, changes, dim, mode, along) if run is not None]
    half, several = dtype in ("bfloat16", "float16"), np.prod(outside) > 1
    assert len(written) == int(half) + int(several) + int(2 * count <= np.prod(outside))
    for run in written:  # all sums are small whole numbers: each type has them
        (found,) = run(x, places, changes)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float64), wanted)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x, at, u: x.at[at % 4, at % 3].add(u), (4, 3)),
        (lambda x, at, u: jax.vmap(lambda row, n, v: row.at[n % 5].add(v))(x, at.reshape(2, -1), u.reshape(2, -1)), (2, 5)),
        (lambda x, at, u: x.at[:, at % 5].add(jnp.stack([u, -u])), (2, 5)),
        (lambda x, at, u: x.at[at % 4].add(jnp.stack([u, 2 * u, u - 2], 1), mode="clip"), (3, 3)),
        (lambda x, at, u: lax.scatter_add(
            x, (at % 5)[:, None], jnp.stack([u, u], 1)[..., None], lax.ScatterDimensionNumbers((1, 2), (), (0,))
        ), (6, 1)),
        (lambda x, at, u: x.at[(at % 7).astype(jnp.uint8) - 2].add(u, mode="drop"), (4,)),
    ],
    ids=["two dimensions", "each row", "columns", "clipped", "windows", "dropped"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_copies_are_added_to_as_the_array_is(call, shape, dtype):
    x, at = jnp.arange(np.prod(shape)).reshape(shape).astype(dtype), jnp.arange(60)
    arguments = x, at, (at % 3).astype(dtype)
    writer = Writer(flatten(jax.make_jaxpr(call)(*arguments)))
    for eqn in writer.jaxpr.eqns:
        if eqn.primitive.name == "scatter-add":
            writer.instead(eqn, updates.in_copies(2)(eqn))
        else:
            writer.keep(eqn)
    made = writer.written()
    (found,) = _compat.eval_jaxpr(made, made.consts, *arguments)
    np.testing.assert_array_equal(np.asarray(found, "float64"), np.asarray(call(*arguments), "float64"))


def test_copies_keep_unsigned_places():
    """As numbers with a sign the largest would be less than none, and be clipped to the other end."""
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    arguments = jnp.zeros(3), jnp.asarray([[2**32 - 1], [1], [0], [7], [2**32 - 2], [1]], jnp.uint32), jnp.arange(6.0)
    call = partial(lax.scatter_add, dimension_numbers=numbers, mode=lax.GatherScatterMode.CLIP)
    (eqn,) = [e for e in jax.make_jaxpr(call)(*arguments).eqns if e.primitive.name == "scatter-add"]
    np.testing.assert_array_equal(updates.in_copies(2)(eqn)(*arguments)[0], call(*arguments))


def test_neighbours_go_to_different_copies():
    """One by one, each 1 after the large number would be rounded away."""
    places, changes = jnp.zeros((15, 1), "int32"), jnp.asarray([0.0] * 7 + [2.0**24] + [1.0] * 7)
    jaxpr = jax.make_jaxpr(lambda x: x.at[places[:, 0]].add(changes))(jnp.zeros(1))
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
    assert updates.in_copies(8)(eqn)(jnp.zeros(1), places, changes)[0][0] == 2.0**24 + 8


def test_updates_without_places_are_no_copies():
    numbers = lax.ScatterDimensionNumbers((0,), (), ())
    jaxpr = jax.make_jaxpr(partial(lax.scatter_add, dimension_numbers=numbers))(
        jnp.zeros(3), jnp.zeros((5, 4, 0), "int32"), jnp.ones((1, 5, 4))
    )
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
    assert updates.in_copies(2)(eqn) is None


def test_there_are_no_more_places_in_copies_than_updates():
    def rules(places, number, width=1, **how):
        shapes = jnp.zeros((places, width)), jnp.zeros(number, "int32"), jnp.zeros((number, width))
        jaxpr = jax.make_jaxpr(lambda x, at, u: x.at[at].add(u, **how))(*shapes)
        (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
        return [n for n in updates.COPIES if updates.in_copies(n)(eqn) is not None]

    assert rules(10, 79) == []
    assert rules(10, 80) == [8]
    assert rules(10, 5120) == [8, 32, 512]
    assert rules(10, 5120, width=4) == [8]
    assert rules(10, 5120, unique_indices=True) == []


def test_half_types_are_rounded_once():
    places, changes = jnp.zeros((600, 1), "int32"), jnp.full((600, 2), 1.0, "bfloat16")
    for run in ways(jnp.zeros((2, 2), "bfloat16"), places, changes, 0, MODES[0]):
        (found,) = run(jnp.zeros((2, 2), "bfloat16"), places, changes)
        np.testing.assert_array_equal(np.asarray(found, "float32"), [[600, 600], [0, 0]])  # one by one: 256


def test_numbers_that_are_none_stay_where_they_are_added():
    places, changes = jnp.asarray([[0], [1], [7]]), jnp.asarray([[1.0, np.nan], [np.inf, 2.0], [np.nan, np.inf]])
    x = jnp.zeros((2, 2))
    _, run, _ = ways(x, places, changes, 0, MODES[0])
    np.testing.assert_array_equal(run(x, places, changes)[0], [[1.0, np.nan], [np.inf, 2.0]])
    more = jnp.concatenate([places, places]), jnp.concatenate([changes, changes])
    *_, in_copies = ways(x, *more, 0, MODES[0])
    np.testing.assert_array_equal(in_copies(x, *more)[0], [[2.0, np.nan], [np.inf, 4.0]])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.at[jnp.arange(3), jnp.arange(3)].add(1.0),  # places along two dimensions
        lambda x: x.at[2].add(1.0),  # one update
        lambda x: jnp.zeros((200, 4)).at[jnp.arange(5)].add(x[0]),  # many places
        lambda x: lax.scatter_add(
            x, jnp.zeros((3, 1), "int32"), jnp.ones((3, 2, 4), x.dtype), lax.ScatterDimensionNumbers((1, 2), (), (0,))
        ),  # windows of two rows
        lambda x: jax.vmap(lambda row, n: row.at[n].add(1.0))(x, jnp.arange(8).reshape(4, 2)),  # others in each row
    ],
)
def test_other_updates_are_no_sums_by_place(call):
    jaxpr = jax.make_jaxpr(call)(jnp.ones((4, 4)))
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
    assert updates.by_place(eqn) is None
    assert updates.in_single_steps(eqn) is None
    half = jax.make_jaxpr(lambda x: call(x.astype(jnp.bfloat16)))(jnp.ones((4, 4)))
    (eqn,) = [e for e in half.eqns if e.primitive.name == "scatter-add"]
    assert (updates.in_single_steps(eqn) is None) == (_compat.dtype_of(eqn.outvars[0]) != jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_updates_of_an_empty_array_stay(dtype):
    h100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
    jaxpr = jax.make_jaxpr(lambda x, i, u: x.at[i].add(u))(
        jnp.ones((0, 4), dtype), jnp.zeros(5, "int32"), jnp.ones((5, 4), dtype)
    )
    found = Decomposer(h100, (), 1e-9).of(jaxpr)
    assert [e.outvars[0].aval.dtype for e in found.eqns if e.primitive.name == "scatter-add"] == [dtype]
    assert price_xla(convert(jaxpr).program, h100).us > 0


@pytest.mark.parametrize(
    ("dtype", "rows", "width", "places", "written"),
    [
        ("bfloat16", 4096, 768, 2, ["reduce_sum float32"]),  # 28 to 81 us in float32 on an H100; 10 us so
        ("bfloat16", 32768, 128, 1, ["reduce_sum float32"]),  # 1.4 s; 55 us
        ("bfloat16", 4096, 768, 32768, ["scatter-add bfloat16"]),  # 72 us; 104 us in float32
        ("float32", 1 << 20, 1, 8, ["reduce_sum float32"]),  # 445 us; 63 us
        ("float32", 1 << 20, 1, 512, ["scatter-add float32", "reduce_sum float32"]),  # 162 us on an H200; 23 us
        (
            "float32",
            65536,
            64,
            64,
            ["scatter-add float32", "reduce_sum float32"],
        ),  # 15 to 279 us on an H200; 10 to 38 us
        ("float32", 1 << 20, 1, 65536, ["scatter-add float32"]),
    ],
)
def test_where_a_gpu_waits_for_itself(dtype, rows, width, places, written):
    """The forms that are chosen by the price of an H100 take less time, on an H100, or where it says so on an H200."""
    h100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
    shapes = (jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, width), dtype))
    jaxpr = jax.make_jaxpr(lambda at, rows: jnp.zeros((places, width), dtype).at[at].add(rows))(*shapes)
    found = Decomposer(h100, (), h100.price_error).of(jaxpr)
    names = ("scatter-add", "reduce_sum")
    assert [f"{e.primitive.name} {e.outvars[0].aval.dtype}" for e in found.eqns if e.primitive.name in names] == written
