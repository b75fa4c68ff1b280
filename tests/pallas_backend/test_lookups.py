"""Rows that a Pallas kernel looks up by a table: in interpret mode, tile by tile, against the plain function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import pallasfuse as pf
from pallasfuse import execution
from pallasfuse.emission import pallas_kernel
from pallasfuse.jaxpr_frontend import called
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import INTERPRET
from tests.xla_backend.test_lookups import POOL, arguments, by_pages, heads_first


def operations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for body in called(eqn):
            yield from operations(body)


def test_positions_behind_the_end_of_looked_up_rows_are_hidden_and_follow_each_other():
    """No minimum keeps 128 positions in rows of 96: behind it, Triton would load one element at a time."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 96)), jnp.float32)
    rows = jnp.asarray(np.random.default_rng(1).integers(0, 24, (6, 5)), jnp.int32)

    def of_rows(x, rows):
        return jax.nn.logsumexp(x.at[rows].get(mode="clip"), axis=-1)

    options = pf.FuseOptions(target="triton", price=False, check=False, parts=1)
    plan = pf.fuse(of_rows, options=options).explain(x, rows)
    ((program,),) = [[p.program for p in k.phases] for k in plan.kernels]
    ((lookup,), (wide,)) = program.lookups, [t for _, t in program.tiles if t > 96]
    given = {lookup.source.name: x, lookup.table.name: rows}
    traced = jax.make_jaxpr(lambda: pallas_kernel.call(program, given, interpret=True))()
    least = [eqn for eqn in operations(traced.jaxpr) if eqn.primitive.name == "min"]
    assert not [eqn for eqn in least if wide in eqn.outvars[0].aval.shape]
    ends = sorted(int(x.val) for eqn in least for x in eqn.invars if isinstance(x, Literal))
    assert ends == [rows.shape[1] - 1, x.shape[0] - 1]  # the last place of a row of the table, and its largest entry
    (found,) = pallas_kernel.call(program, given, interpret=True).values()
    np.testing.assert_allclose(np.asarray(found).reshape(6, 5), of_rows(x, rows), rtol=2e-6)


def compare(function, *given, **options):
    """The kernel looks something up, and computes what the function does; returns how much, and the result."""
    jaxpr = jax.make_jaxpr(function)(*given)
    plan = make_plan(jaxpr, INTERPRET, pf.FuseOptions(**options))
    (kernel,) = plan.kernels
    assert kernel.target is INTERPRET
    (got,) = jax.jit(lambda *a: execution.execute(plan, [*jaxpr.consts, *a]))(*given)
    np.testing.assert_allclose(got, jax.jit(function)(*given), rtol=2e-6, atol=2e-6)
    return len(kernel.lookups), np.asarray(got)


@pytest.mark.deep  # `test_pages_of_each_head` reads pages in tiles, too
@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("tile", [1, 4, 16, 30])
def test_tiles_of_pages(tile):
    """Tiles begin and end inside of pages; the last one reaches past the end of the axis, and of the table."""
    assert compare(by_pages(), *arguments(low=-3, high=POOL + 2), tiles=(("a2", tile),))[0] == 2


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("parts", [2, 3])
def test_parts(parts):
    assert compare(by_pages(), *arguments(), parts=parts, tiles=(("a2", 8),))[0] == 2


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("index", [np.int8, np.uint8, np.int32, np.uint32])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_entries_that_are_out_of_range(mode, index):
    limits = np.iinfo(index)
    table = np.array([[0, 7, 6, 3, 1], [1, limits.max, limits.min, 2, 5], [limits.max // 2 + 1, 0, 8, 7, 9]], index)
    *others, _ = arguments()
    found, got = compare(by_pages(mode), *others, jnp.asarray(table), tiles=(("a2", 8),))
    assert found == 2
    assert np.isnan(got).any() == (mode == "fill")
    assert np.isfinite(got[0]).all()


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("tile", [8, 30])
def test_pages_of_each_head(tile):
    """The rows are no first dimension of the source."""
    q, length, k, v, table = arguments()
    pages = (jnp.asarray(np.transpose(x, (2, 0, 1, 3))) for x in (k, v))
    assert compare(heads_first, q, length, *pages, table, tiles=(("a2", tile),))[0] == 2


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("tiles", [(), (("n", 2), ("o", 4)), (("n", 4), ("o", 5), ("p", 8))])
def test_each_of_a_batch_has_rows_of_its_own(tiles):
    random = np.random.default_rng(2)
    x, table = random.normal(size=(4, 9, 16)).astype(np.float32), random.integers(-9, 9, (4, 6)).astype(np.int32)

    def function(x, table):
        return jax.nn.softmax(jax.vmap(lambda a, t: a[t])(x, table))

    assert compare(function, jnp.asarray(x), jnp.asarray(table), tiles=tiles)[0] == 1


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("tiles", [(), (("j", 2), ("k", 4), ("l", 4)), (("i", 2), ("l", 16))])
def test_rows_by_a_table_of_positions(tiles):
    random = np.random.default_rng(1)
    x, biases = random.normal(size=(2, 4, 7, 9)).astype(np.float32), random.normal(size=(5, 4)).astype(np.float32)

    def biased(x, biases):
        distance = jnp.minimum(jnp.abs(jnp.arange(7)[:, None] - jnp.arange(9)), 4)
        return jax.nn.softmax(x + biases[distance].transpose(2, 0, 1))

    assert compare(biased, jnp.asarray(x), jnp.asarray(biases), tiles=tiles)[0] == 1


def test_one_row_for_all():
    """A table of one element, as an array without axes."""

    def function(x, rows, n):
        return jax.nn.softmax(x * rows[n[None]])

    x, rows = np.random.default_rng(3).normal(size=(2, 5, 9)).astype(np.float32)
    assert compare(function, jnp.asarray(x), jnp.asarray(rows), jnp.int32(3))[0] == 1


def test_what_is_filled_in_is_not_outside():
    """Tiles have more rows than the array: what lies outside reads as zero, also where a number is filled in."""
    x = jnp.asarray(np.random.default_rng(4).normal(size=(7, 6)), jnp.float32)
    index = jnp.array([2, 5, 1, 3, 99])

    def function(x, index):
        g = jnp.take(x, index, axis=0, mode="fill", fill_value=1.5)
        return jnp.einsum("ik,jk->ij", g, g).sum(1)

    assert compare(function, x, index)[0] >= 1

    def attention(x, index):
        g = jnp.take(x, index, axis=0, mode="fill", fill_value=1.5)
        return jax.nn.softmax(g @ g.T * 0.1) @ g

    assert compare(attention, x, index)[0] >= 1
