"""Rows that a rolled loop looks up by a table: on the CPU, tile by tile, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import execution
from pallasfuse.emission.lookups import stored
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import XLA_CPU

BATCH, PAGES, PAGE, HEADS, WIDTH, POOL = 3, 5, 6, 2, 4, 8


def attend(q, length, keys, values):
    """Attention of one query for each sequence over the keys that it has."""
    scores = jnp.einsum("bhd,bjhd->bhj", q, keys)
    scores = jnp.where(jnp.arange(keys.shape[1]) < length[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bhj,bjhd->bhd", jax.nn.softmax(scores), values)


def by_pages(mode=None):
    """Attention over pages. mode: of `jnp.take`."""

    def function(q, length, k_pages, v_pages, table):
        def gathered(pages):
            rows = pages[table] if mode is None else jnp.take(pages, table, axis=0, mode=mode)
            return rows.reshape(table.shape[0], -1, *pages.shape[2:])

        return attend(q, length, gathered(k_pages), gathered(v_pages))

    return function


def heads_first(q, length, k_pages, v_pages, table):
    """The same with all pages of a head in one place."""
    keys, values = (
        p[:, table].reshape(HEADS, table.shape[0], -1, WIDTH).transpose(1, 2, 0, 3) for p in (k_pages, v_pages)
    )
    return attend(q, length, keys, values)


def arguments(seed=0, dtype=jnp.float32, index=jnp.int32, low=0, high=POOL):
    random = np.random.default_rng(seed)
    q = random.normal(size=(BATCH, HEADS, WIDTH))
    k, v = random.normal(size=(2, POOL, PAGE, HEADS, WIDTH))
    length = np.array([PAGES * PAGE, 7, 1])
    table = random.integers(low, high, (BATCH, PAGES))
    return (
        jnp.asarray(q, dtype), jnp.asarray(length, jnp.int32), jnp.asarray(k, dtype), jnp.asarray(v, dtype),
        jnp.asarray(table, index),
    )  # fmt: skip


def kernel_of(function, *given, rolled=None, grid=None, **options):
    """The only kernel of a function, its plan, and what the plan computes. rolled, grid: tiles of its axes."""
    jaxpr = jax.make_jaxpr(function)(*given)
    plan = make_plan(jaxpr, XLA_CPU, pf.FuseOptions(**options))
    if rolled is not None or grid is not None:
        group = plan.kernels[0].group
        tiles = [(a.name, grid or a.extent) for a in group.parallel if grid] + [(group.rolled.name, rolled)] * bool(
            rolled
        )
        plan = make_plan(jaxpr, XLA_CPU, pf.FuseOptions(tiles=tuple(tiles), **options))
    (kernel,) = plan.kernels
    (result,) = jax.jit(lambda *a: execution.execute(plan, [*jaxpr.consts, *a]))(*given)
    return kernel, plan, np.asarray(result, np.float64)


def exact(function, *given):
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if x.dtype != jnp.int32 and x.dtype.kind not in "iu" else x for x in given]
        return np.asarray(function(*wide))


@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("tile", [1, 2, 3, 5, 6, 7, 12, 18, 24, 29, 30])
def test_tiles_of_pages(tile):
    """Whole pages, parts of one, and tiles that begin and end inside of pages."""
    given = arguments()
    kernel, plan, got = kernel_of(by_pages(), *given, rolled=tile)
    assert len(kernel.lookups) == 2
    assert all(step.primitive.name != "gather" for step in plan.steps if step is not kernel)
    assert kernel.program.tile(kernel.group.rolled) == tile
    np.testing.assert_allclose(got, exact(by_pages(), *given), rtol=2e-6, atol=2e-6)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("tile", [5, 6, 12])
def test_text_evaluation_and_emission_agree(tile):
    """The tile program over the pages, evaluated in float64 and emitted, against the one over stored rows."""
    given = arguments()
    kernel, _, _ = kernel_of(by_pages(), *given, rolled=tile)
    program = kernel.program
    assert [str(x).partition(" = ")[2] for x in program.lookups] == LOOKUPS
    assert all(f"  {x}\n" in str(program) for x in program.lookups)
    names = dict(zip(("q", "length", "k_pages", "v_pages"), given, strict=False))
    tables = {t: given[-1] for t in kernel.reads if t not in names}
    inputs = {t.name: (names | tables)[t.name].reshape([a.extent for a in t.axes]) for t in program.given}
    wide = evaluate_tiles(program, {n: np.asarray(x) for n, x in inputs.items()}, move_last_block_back=True)
    ours = execution.emit(XLA_CPU, program, inputs)
    for name, array in ours.items():
        np.testing.assert_allclose(np.asarray(array), wide[name], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(wide[name].ravel(), exact(by_pages(), *given).ravel(), rtol=1e-12)


LOOKUPS = [
    "k_pages[t3[i, a2 / 6] * 6 + a2 % 6, j, k]",
    "v_pages[t9[i, a2 / 6] * 6 + a2 % 6, j, a8]",
]


@pytest.mark.sampled(10, cover=())
@pytest.mark.parametrize("mode", [None, "clip", "fill", "wrap"])
@pytest.mark.parametrize("index", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_entries_that_are_out_of_range(mode, index):
    """Negative ones, large ones, and the limits of their type mean what they mean to the gather."""
    limits = np.iinfo(index)
    table = np.array([[0, 7, 8, 3, 100], [1, limits.max, limits.min, 2, 5], [limits.max // 2 + 1, 0, 1, 7, 9]], index)
    with jax.enable_x64(True):
        *others, _ = arguments()
        given = (*others, jnp.asarray(table))
        kernel, _, got = kernel_of(by_pages(mode), *given)
        want = np.asarray(jax.jit(by_pages(mode))(*given))
    assert len(kernel.lookups) == 2
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    assert (mode != "fill") or np.isnan(got).any()


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("parts", [1, 2])
def test_types_and_parts(dtype, parts):
    given = arguments(dtype=dtype)
    kernel, _, got = kernel_of(by_pages(), *given, parts=parts, rolled=6)
    assert len(kernel.lookups) == 2
    assert len(kernel.phases) == parts
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(got, exact(by_pages(), *given), rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("tile", [6, 7, 30])
def test_pages_of_each_head(tile):
    q, length, k, v, table = arguments()
    given = (q, length, *(jnp.asarray(np.transpose(x, (2, 0, 1, 3))) for x in (k, v)), table)
    kernel, _, got = kernel_of(heads_first, *given, rolled=tile)
    assert len(kernel.lookups) == 2
    np.testing.assert_allclose(got, exact(heads_first, *given), rtol=2e-6, atol=2e-6)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(("grid", "rolled"), [(None, None), (2, 3), (1, 7), (3, 9)])
def test_rows_by_a_table_of_positions(grid, rolled):
    """A small table of biases by the distance of positions: only the numbers of its rows are stored."""
    random = np.random.default_rng(1)
    x, biases = random.normal(size=(2, 4, 7, 9)).astype(np.float32), random.normal(size=(5, 4)).astype(np.float32)

    def biased(x, biases):
        distance = jnp.minimum(jnp.abs(jnp.arange(7)[:, None] - jnp.arange(9)), 4)
        return jax.nn.softmax(x + biases[distance].transpose(2, 0, 1))

    kernel, _, got = kernel_of(biased, jnp.asarray(x), jnp.asarray(biases), grid=grid, rolled=rolled)
    assert len(kernel.lookups) == 1
    np.testing.assert_allclose(got, exact(biased, x, biases), rtol=2e-6, atol=2e-6)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(("grid", "rolled"), [(None, None), (2, 5), (3, 16)])
def test_each_of_a_batch_has_rows_of_its_own(grid, rolled):
    random = np.random.default_rng(2)
    x, table = random.normal(size=(4, 9, 16)).astype(np.float32), random.integers(-9, 9, (4, 6)).astype(np.int32)

    def function(x, table):
        return jax.nn.softmax(jax.vmap(lambda a, t: a[t])(x, table))

    kernel, _, got = kernel_of(function, jnp.asarray(x), jnp.asarray(table), grid=grid, rolled=rolled)
    assert len(kernel.lookups) == 1
    np.testing.assert_allclose(got, exact(function, x, table), rtol=2e-6, atol=2e-6)


def test_what_would_have_been_stored():
    given = arguments()
    kernel, _, _ = kernel_of(by_pages(), *given)
    arrays = {"k_pages": given[2], "v_pages": given[3], "t3": given[4], "t9": given[4]}
    found = stored([*kernel.lookups.values()], arrays)
    for pages, array in zip(given[2:4], found.values(), strict=True):
        assert np.array_equal(np.asarray(array).ravel(), np.asarray(pages[given[4]]).ravel())
