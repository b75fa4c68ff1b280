"""Emitted loops keep tiles in their order, and products read the cheaper of their sides in strides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.tile_program import Loop, every
from pallasfuse.xla_backend import loops
from tests.ir.test_tile_orders import COLUMN, ROW, SUM, F, of_product, order_of


def operations(program):
    """The names of the operations on whole tiles of the emitted kernel, and the shapes of the left side of its product."""
    inputs = {t.name: jnp.ones([a.extent for a in t.axes], F) for t in program.inputs}
    jaxpr = jax.make_jaxpr(lambda xs: loops.run(program, xs))(inputs)
    names = [e.primitive.name for e in jaxpr.eqns]
    (dot,) = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    return names, dot.invars[0].aval.shape


def test_what_lies_in_one_order_is_not_turned():
    program = of_product((ROW, SUM), (SUM, COLUMN), (ROW, COLUMN))
    names, lhs = operations(program)
    assert "transpose" not in names
    assert lhs == (8, 64)


def test_the_left_side_is_read_along_its_rows():
    """Weights whose neighbours are of different columns are the right side, whichever the program has there."""
    swapped = of_product((SUM, COLUMN), (ROW, SUM), (ROW, COLUMN))
    assert operations(swapped) == operations(of_product((ROW, SUM), (SUM, COLUMN), (ROW, COLUMN)))


@pytest.mark.parametrize("first", [True, False])
def test_the_smaller_side_is_read_in_strides(first):
    sides = ((SUM, ROW), (SUM, COLUMN)) if first else ((SUM, COLUMN), (SUM, ROW))
    program = of_product(*sides, (COLUMN, ROW))
    assert operations(program)[1] == (64, 8)
    assert order_of(program).index("i") < order_of(program).index("j")


def test_a_product_that_is_stored_in_another_order_is_made_in_its_own():
    """XLA would exchange its sides, and read the larger one in strides; what lies as it is made needs no barrier."""
    assert "optimization_barrier" in operations(of_product((ROW, SUM), (SUM, COLUMN), (COLUMN, ROW)))[0]
    assert "optimization_barrier" not in operations(of_product((ROW, SUM), (SUM, COLUMN), (ROW, COLUMN)))[0]


def test_carried_values_have_the_order_of_all_tiles():
    """The order of a sum that a loop carries is not that of the program."""
    rng = np.random.default_rng(0)
    x, y, z = (jnp.asarray(rng.normal(size=s), F) for s in ((6, 17), (8, 6), (24, 17)))

    def two(x, y, z):
        return jnp.einsum("ji,kj->ik", jnp.tanh(jnp.einsum("di,jd->ji", x, y)), z[:, :8])

    options = pf.FuseOptions(target="xla", price=False)
    (kernel,) = pf.fuse(two, options=options).explain(x, y, z).kernels
    program = kernel.phases[0].program
    short = tuple((a.name, 4) for a in program.order if a.extent > 4)
    options = pf.FuseOptions(target="xla", price=False, tiles=short[:2])
    plan = pf.fuse(two, options=options).explain(x, y, z)
    carried = [c for s in every(plan.kernels[0].phases[0].program.body) if isinstance(s, Loop) for c in s.carries]
    assert any(len(c.axes) > 1 for c in carried)
    np.testing.assert_allclose(pf.fuse(two, options=options)(x, y, z), two(x, y, z), rtol=2e-5, atol=2e-5)


def dequantised(x, w, scale, offset):
    return jnp.einsum("ikl,klj->ij", x, (w.astype(F) - offset[:, None]) * scale[:, None])


def attention_of_heads_inside(q, k, v):
    p = jax.nn.softmax(jnp.einsum("ihd,mhd->him", q, k) / 8, axis=-1)
    return jnp.einsum("him,mhd->ihd", p, v)


PROGRAMS = {
    "dequantised": (dequantised, ((6, 4, 32), F), ((4, 32, 48), "uint8"), ((4, 48), F), ((4, 48), F)),
    "heads inside": (attention_of_heads_inside, *[((40, 3, 16), F)] * 3),
    "weights first": (lambda w, x: jnp.tanh(jnp.einsum("kj,ik->ji", w, x)).sum(-1), ((32, 48), F), ((6, 32), F)),
}


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("tile", [None, 8])
def test_results_are_those_of_the_program(name, tile):
    function, *arguments = PROGRAMS[name]
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.uniform(0.5, 9, shape), dtype) for shape, dtype in arguments]
    options = pf.FuseOptions(target="xla", price=False)
    plan = pf.fuse(function, options=options).explain(*arrays)
    assert plan.kernels
    if tile is not None:
        grid = [a.name for a, _ in plan.kernels[0].schedule.grid if a.extent > tile]
        assert grid
        options = pf.FuseOptions(target="xla", price=False, tiles=tuple((name, tile) for name in grid))
    found = pf.fuse(function, options=options)(*arrays)
    wanted = function(*arrays)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6 * float(jnp.abs(wanted).max()))
