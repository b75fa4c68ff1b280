"""Short axes written out: the same results, and no tile that has such an axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.expr import postorder
from pallasfuse.ir.statements import Contract, Load, Loop, Reduce, Store, every, expressions
from pallasfuse.ir.unrolling import MOST_COPIES, unroll, unrollable

N, M = 48, 80


def forces(x, y):
    """The sum of what every point of y does to each point of x, by their distance in three coordinates."""
    d = y[None] - x[:, None]
    inverse = jax.lax.rsqrt(jnp.sum(d * d, -1) + 0.1)
    return jnp.sum(d * inverse[..., None] ** 3, 1), jnp.sum(inverse, 1)


def nearest(x, y):
    return jnp.min(jnp.sum((x[:, None] - y[None]) ** 2, -1), 1)


def farthest_along_an_axis(x, y):
    """The largest coordinate of a difference, added up."""
    return jnp.sum(jnp.exp(-jnp.max(jnp.abs(x[:, None] - y[None]), -1)), 1)


def by_product(x, y):
    """Distances by a product over the coordinates."""
    return jnp.sum(jnp.exp(-(jnp.sum(x * x, -1)[:, None] - 2 * x @ y.T + jnp.sum(y * y, -1))), 1)


def with_positions(x, y):
    """Coordinates count by their number."""
    d = (y[None] - x[:, None]) * jnp.arange(x.shape[1], dtype=jnp.float32)
    return jnp.sum(jnp.tanh(d), 1), jnp.sum(jnp.sum(d * d, -1), 1)


PROGRAMS = [forces, nearest, farthest_along_an_axis, by_product, with_positions]


def points(length, seed):
    return [
        jnp.asarray(np.random.default_rng(seed + n).standard_normal((m, length)), jnp.float32)
        for n, m in enumerate((N, M))
    ]


def programs(function, length, target="interpret"):
    """The kernels for so many points that these, and not the launch, take the time."""
    options = pf.FuseOptions(check=False, price=False)
    many = [jax.ShapeDtypeStruct((16 * n, length), jnp.float32) for n in (N, M)]
    plan = pf.fuse(function, target=target, options=options).explain(*many)
    return [phase.program for k in plan.kernels for phase in k.phases]


@pytest.mark.sampled(4, cover=("length",))
@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize("function", PROGRAMS)
def test_the_results_are_the_same(function, length):
    args = points(length, 1)
    fused = pf.fuse(function, target="interpret", options=pf.FuseOptions(check=False, price=False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), fused(*args), function(*args))


@pytest.mark.parametrize("target", ["interpret", "triton"])
@pytest.mark.parametrize("function", PROGRAMS)
def test_no_tile_has_a_short_axis(function, target):
    found = [p for p in programs(function, 3, target) if p.unrolled]
    assert found
    for program in found:
        own = unroll(program, program.unrolled)
        assert sorted(own.positions.values()) == list(range(3)) * (len(own.positions) // 3)
        assert not {a for a, _ in own.program.tiles} & set(program.unrolled)
        for s in every(own.program.body):
            made = getattr(s, "axes", ()) if not isinstance(s, Loop) else [a for c in s.carries for a in c.axes]
            assert not set(made) & set(program.unrolled)
            used = {a for e in expressions(s) for n in postorder(e) for a in n.axes}
            used |= set(s.indices) if isinstance(s, Load | Store) else set()
            used |= set(s.over) if isinstance(s, Reduce | Contract) else set()
            assert not used & set(program.unrolled)


@pytest.mark.parametrize("function", PROGRAMS)
def test_longer_axes_stay(function):
    assert not any(p.unrolled for p in programs(function, 5))


def test_what_matrix_units_sum_up_stays():
    """Two half-type operands whose product has rows and columns: four elements are padded, and still cheaper."""
    half = [jnp.ones((n, 4), jnp.bfloat16) for n in (N, M)]
    plan = pf.fuse(by_product, target="triton", options=pf.FuseOptions(check=False, price=False)).explain(*half)
    products = [
        s for k in plan.kernels for phase in k.phases
        for s in every(unroll(phase.program, unrollable(phase.program)).program.body) if isinstance(s, Contract)
    ]  # fmt: skip
    assert products


def test_a_program_without_short_axes_is_itself():
    (program,) = programs(nearest, 5)
    assert unrollable(program) == ()
    assert unroll(program, ()).program == program


def test_loops_carry_each_position():
    many = [jax.ShapeDtypeStruct((n, 3), jnp.float32) for n in (1 << 14, 1 << 14)]
    plan = pf.fuse(forces, target="triton", options=pf.FuseOptions(check=False)).explain(*many)
    (program,) = [phase.program for k in plan.kernels for phase in k.phases]
    before = next(s for s in every(program.body) if isinstance(s, Loop))
    after = next(s for s in every(unroll(program, program.unrolled).program.body) if isinstance(s, Loop))
    along = sum(bool(set(program.unrolled) & set(c.axes)) for c in before.carries)
    assert along == 1
    assert len(after.carries) == len(before.carries) + 2


def test_several_axes_make_few_copies():
    """What lies along four short axes would be written out 256 times."""

    def far(a, b):
        return jnp.sum(jnp.exp(-jnp.sum((a[:, None] - b.transpose((0, 4, 3, 2, 1))[None]) ** 2, (2, 3, 4, 5))), 1)

    a, b = (
        jnp.asarray(np.random.default_rng(n).standard_normal((m, 4, 4, 4, 4)) * 0.1, jnp.float32)
        for n, m in enumerate((20, 24))
    )
    options = pf.FuseOptions(check=False, price=False)
    fused = pf.fuse(far, target="interpret", options=options)
    for kernel in fused.explain(a, b).kernels:
        for phase in kernel.phases:
            assert np.prod([x.extent for x in phase.program.unrolled]) <= MOST_COPIES
    np.testing.assert_allclose(fused(a, b), far(a, b), rtol=1e-4)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_two_axes_at_once(dtype):
    def widest(x, y):
        d = jnp.abs(x[:, None] - y[None])
        return jnp.max(jnp.max(jnp.sum(d, -1), -1), 1), jnp.sum(jnp.max(jnp.sum(d, -1), -1), 1)

    x, y = (jnp.asarray(np.random.default_rng(n).integers(-9, 9, (m, 3, 2)), dtype) for n, m in enumerate((N, M)))
    fused = pf.fuse(widest, target="interpret", options=pf.FuseOptions(check=False, price=False))
    assert any(len(p.program.unrolled) == 2 for k in fused.explain(x, y).kernels for p in k.phases)
    jax.tree.map(np.testing.assert_array_equal, fused(x, y), widest(x, y))
