"""Loops that masks over data bound: they visit what lies between the first and the last visible element, and mean the same."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasfuse.fusion.grouping import group
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64
from pallasfuse.ir.evaluate import evaluate, evaluate_nest
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import Index, add, apply, const, convert, index, postorder, read
from pallasfuse.ir.loop_program import verify
from pallasfuse.ir.tile_program import Load, Loop, block_start, expressions, least, most
from pallasfuse.jaxpr_frontend import convert as converted
from pallasfuse.price.visited_tiles import trips
from pallasfuse.tiling.bounds import guards_of
from pallasfuse.tiling.lower import lower
from pallasfuse.tiling.ranges import conjunction, is_exact
from tests.programs_by_name import FREE, schedule_of, tensors_of

ROWS, COLUMNS, WIDTH = 7, 13, 3
I, J = Axis("i", ROWS), Axis("j", COLUMNS)  # noqa: E741


def weigh(q, k, v, mask, fill):
    return jax.nn.softmax(jnp.where(mask, q @ k.T, fill), -1) @ v


def hidden(q, k, v, m):
    return weigh(q, k, v, m, -jnp.inf)


def filled(q, k, v, m):
    return weigh(q, k, v, m, -1e9)


def hidden_where(q, k, v, m):
    return jax.nn.softmax(jnp.where(m, -1e9, q @ k.T), -1) @ v


def added(q, k, v, m):
    return jax.nn.softmax(q @ k.T + jnp.where(m, 0.0, -1e9), -1) @ v


def with_positions(q, k, v, m):
    return weigh(q, k, v, m & (jnp.arange(COLUMNS) <= 2 * jnp.arange(ROWS)[:, None]), -1e9)


def twice(q, k, v, m):
    causal = jnp.arange(COLUMNS) <= 2 * jnp.arange(ROWS)[:, None]
    return jax.nn.softmax(jnp.where(causal, jnp.where(m, q @ k.T, -1e9), -1e9), -1) @ v


def total(q, k, v, m):
    return jnp.sum(jnp.where(m, jnp.exp(q @ k.T), 0.0), -1)


MASKED = {f.__name__: f for f in (hidden, filled, hidden_where, added, with_positions, twice, total)}


@cache
def grouped(name):
    shapes = [(ROWS, WIDTH), (COLUMNS, WIDTH), (COLUMNS, 2)]
    arguments = [*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), jax.ShapeDtypeStruct((ROWS, COLUMNS), bool)]
    loops = verify(converted(jax.make_jaxpr(MASKED[name])(*arguments)).program)
    return loops, group(loops, FREE).groups


def lowered(name, rows, columns, tails="exact", *, ranges=True, parts=1, **options):
    loops, groups = grouped(name)
    for g in groups:
        schedule = replace(schedule_of(g, rows, columns), ranges=ranges, parts=parts)
        yield lower(g, schedule, tails, tensors_of(loops), **options)


def values_of(name, mask):
    loops, _ = grouped(name)
    random = np.random.default_rng(0)
    inputs = [random.normal(size=[a.extent for a in t.axes]) for t in loops.inputs[:3]]
    arrays = dict(zip((t.name for t in loops.inputs), [*inputs, mask], strict=False))
    with np.errstate(all="ignore"):
        return evaluate(loops, arrays)


def check(programs, known, *, back=False):
    known = dict(known)
    for program in programs:
        given = {t.name: known[t.name] for t in program.given}
        with np.errstate(all="ignore"):
            found = evaluate_tiles(program, given, move_last_block_back=back)
        for name, array in found.items():
            if name in known:
                np.testing.assert_allclose(array, known[name], rtol=1e-9, atol=1e-12)
        known |= found


def bands(seed):
    """Masks of intervals, of scattered elements, of whole rows, and of nothing."""
    random = np.random.default_rng(seed)
    mask = random.random((ROWS, COLUMNS)) < random.choice([0.05, 0.3, 0.9])
    starts, widths = random.integers(0, COLUMNS, (ROWS, 1)), random.integers(0, 5, (ROWS, 1))
    band = (np.arange(COLUMNS) >= starts) & (np.arange(COLUMNS) < starts + widths)
    return [mask, band, mask & (random.random((ROWS, 1)) < 0.6), np.zeros_like(mask), ~np.zeros_like(mask)][seed % 5]


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=13, deadline=None)
@given(
    name=st.sampled_from(sorted(MASKED)), seed=st.integers(0, 500), rows=st.integers(1, 5), columns=st.integers(1, 6),
    machine=st.sampled_from([("exact", False), ("exact", True), ("masked", False)]), parts=st.sampled_from([1, 1, 2, 3]),
)  # fmt: skip
def test_any_mask_in_any_tiles_means_the_same(part, name, seed, rows, columns, machine, parts):
    tails, back = machine
    known = values_of(name, bands(seed))
    for programs in lowered(name, rows, columns, tails, parts=parts):
        check(programs, known, back=back)


def blocks(program, known):
    """The loop of a kernel that carries something, and in every block what its bounds read."""
    ends = {n.name: evaluate_nest(n, known, FLOAT64) for r in program.ranges for n in r.nests}
    (loop,) = [s for s in program.body if isinstance(s, Loop) and s.carries]
    ((axis, tile),) = program.grid
    for begin in range(0, axis.extent, tile):
        start = min(begin, axis.extent - tile)
        at = {block_start(axis): start}
        for r in program.ranges:
            window = slice(start, start + tile) if r.left.axes else ()
            left, right, count = (ends[t.name][window] for t in r.found)
            solid = (right > 0) & (count == left + right - r.axis.extent)
            for t, end in ((r.left, left), (r.right, right)):
                here = np.where(right == 0, r.axis.extent, end) if r.all_if_none else end
                at[most(t.name)] = int(np.max(here))
                at[least(t.name)] = int(np.min(np.where(solid, end, 0)))
        yield loop, at


def visited(program, known):
    """The number of tiles that the loops of a kernel visit, and that of all tiles."""
    ((axis, tile),) = program.grid
    loop, _ = next(blocks(program, known))
    seen = sum(trips(loop, at) for _, at in blocks(program, known))
    return seen, -(-axis.extent // tile) * -(-loop.axis.extent // program.tile(loop.axis))


@pytest.mark.parametrize("name", ["hidden", "filled", "added", "twice", "with_positions"])
def test_tiles_between_the_first_and_the_last_visible_element_are_visited(name):
    columns, rows = np.arange(COLUMNS), np.arange(ROWS)[:, None]
    causal = columns <= 2 * rows
    for ((program,),) in [list(lowered(name, 1, 1))]:
        assert visited(program, values_of(name, causal))[0] == causal.sum()
        assert (
            visited(program, values_of(name, causal & (columns > 2 * rows - 3)))[0]
            == (causal & (columns > 2 * rows - 3)).sum()
        )
        with_gap = causal & (columns != 1)
        between = causal & ((rows > 0) | (columns == 0))
        assert visited(program, values_of(name, with_gap))[0] == between.sum()


@pytest.mark.parametrize(("name", "share"), [("hidden", 0), ("filled", 1)])
def test_rows_without_a_visible_element_are_visited_where_the_fill_is_finite(name, share):
    """They are the mean of everything, as in the program; with an infinite fill they are nothing."""
    mask = np.ones((ROWS, COLUMNS), bool)
    mask[3] = False
    ((program,),) = lowered(name, 1, 1)
    assert visited(program, values_of(name, mask))[0] == (ROWS - 1 + share) * COLUMNS
    assert program.ranges[0].all_if_none == bool(share)
    nothing = np.zeros((ROWS, COLUMNS), bool)
    assert visited(program, values_of(name, nothing))[0] == share * ROWS * COLUMNS


def with_mask(program, known):
    """The number of tiles in which the mask is loaded."""
    return sum(
        trips(replace(loop, segments=(g,)), at)
        for loop, at in blocks(program, known)
        for g in loop.segments
        if any(isinstance(s, Load) and s.dtype == "bool" for s in g.body)
    )


COLUMN, ROW = np.arange(COLUMNS), np.arange(ROWS)[:, None]
SHAPES = {
    "triangle": COLUMN <= 2 * ROW, "band": (COLUMN <= 2 * ROW) & (COLUMN > 2 * ROW - 6), "everything": COLUMN >= 0 * ROW,
    "documents": COLUMN // 4 == ROW // 2, "a row with a gap": (ROW != 3) | (COLUMN != 6), "nothing": COLUMN < 0 * ROW,
    "one row sees nothing": (ROW != 2) & (COLUMN < 9),
}  # fmt: skip


def edges(mask, rows, columns, fill):
    """By hand: the visited whole tiles with something hidden, of blocks whose rows hide something between visible elements all."""
    found = 0
    for begin in range(0, ROWS, rows):
        start = min(begin, ROWS - rows)
        block = mask[start : start + rows]
        seen = block.any(1)
        if not seen.any() and not fill:
            continue
        first = min((int(np.argmax(r)) for r in block if r.any()), default=0)
        last = max((COLUMNS - int(np.argmax(r[::-1])) for r in block if r.any()), default=0)
        if fill and not seen.all():
            first, last = 0, COLUMNS
        solid = all(r.any() and r[int(np.argmax(r)) : COLUMNS - int(np.argmax(r[::-1]))].all() for r in block)
        for at in range(first // columns * columns, last, columns):
            tile = block[:, at : at + columns]
            found += not (solid and tile.all() and tile.shape[1] == columns)
    return found


@pytest.mark.sampled(12, cover=("shape",))
@pytest.mark.parametrize("tiles", [(1, 1), (2, 2), (3, 4)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["hidden", "filled", "hidden_where", "added"])
def test_the_mask_is_loaded_on_the_edges_only(name, shape, tiles):
    mask = SHAPES[shape]
    known = values_of(name, ~mask if name == "hidden_where" else mask)
    ((program,),) = lowered(name, *tiles)
    loop, _ = next(blocks(program, known))
    assert [g.label for g in loop.segments][:3] == ["masked", "unmasked", "masked"]
    assert with_mask(program, known) == edges(mask, *tiles, fill=name != "hidden")
    check([program], known)


def test_positions_are_part_of_what_is_solid():
    """Where a mask over data hides nothing, the tiles below the diagonal have neither mask."""
    known = values_of("twice", SHAPES["everything"])
    ((program,),) = lowered("twice", 2, 3)
    assert with_mask(program, known) == edges(SHAPES["triangle"], 2, 3, fill=True)
    (loop,) = [s for s in program.body if isinstance(s, Loop) and s.carries]
    (middle,) = [g for g in loop.segments if g.label == "unmasked"]
    used = [n for s in middle.body for e in expressions(s) for n in postorder(e)]
    assert not any(isinstance(n, Index) or (n.dtype == "bool" and loop.axis in n.axes) for n in used)
    check([program], known)


def test_without_ranges_everything_is_visited():
    ((program,),) = lowered("hidden", 1, 1, ranges=False)
    assert not program.ranges
    assert visited(program, values_of("hidden", np.zeros((ROWS, COLUMNS), bool)))[0] == ROWS * COLUMNS


@pytest.mark.parametrize("option", ["static_bounds", "together"])
def test_kernels_that_are_planned_ahead_visit_everything(option):
    for programs in lowered("hidden", 2, 3, **{option: True}):
        assert not any(p.ranges for p in programs)


def test_another_mask_that_no_pass_decides_forbids_a_finite_range():
    """It may hide all that the first one leaves of a row, which then is a mean of everything."""

    def both(q, k, v, m):
        return jax.nn.softmax(jnp.where(q[:, :1] + k[:, 0] > 0.0, jnp.where(m, q @ k.T, -1e9), -1e9), -1) @ v

    def infinite(q, k, v, m):
        return jax.nn.softmax(jnp.where(m, jnp.where(q[:, :1] + k[:, 0] > 0.0, q @ k.T, -1e9), -jnp.inf), -1) @ v

    MASKED["both"], MASKED["infinite"] = both, infinite
    (first,), (second,) = grouped("both")[1], grouped("infinite")[1]
    assert guards_of(first, 0, ranged=True).visible is None
    found = guards_of(second, 0, ranged=True)
    assert found.visible is not None
    assert not found.all_if_none


def test_scores_that_were_made_before_may_be_masked_already():
    def before(s, m):
        return jax.nn.softmax(jnp.where(m, s, -1e9), -1).max(-1)

    shapes = [jax.ShapeDtypeStruct((ROWS, COLUMNS), t) for t in (jnp.float32, bool)]
    loops = verify(converted(jax.make_jaxpr(before)(*shapes)).program)
    for g in group(loops, FREE).groups:
        assert all(guards_of(g, p, ranged=True).visible is None for p in range(g.passes))


def test_a_strict_plan_assumes_no_fill():
    _, (found,) = grouped("filled")
    assert guards_of(found, 0, ranged=True).visible is not None
    assert guards_of(replace(found, strict=True), 0, ranged=True).visible is None


X, M, S = read("x", (J,), "float32"), read("m", (I, J), "bool"), read("s", (J,), "int32")


@pytest.mark.parametrize(
    ("predicate", "exact"),
    [
        (M, True),
        (apply("not", M), True),
        (apply("eq", S, read("s", (I,), "int32")), True),
        (apply("and", M, apply("ge", index(I), index(J))), True),
        (apply("ne", X, const(0.0, "float32")), True),
        (apply("lt", X, read("x", (I,), "float32")), True),
        (apply("lt", add(X, const(1.0, "float32")), const(0.0, "float32")), False),
        (apply("lt", convert(S, "float32"), X), False),
        (apply("eq", apply("exp", X), X), False),
        (S, False),
    ],
)
def test_only_what_no_compiler_rounds_is_decided_before(predicate, exact):
    assert is_exact(predicate) == exact


def test_a_conjunction_is_true_where_all_are():
    assert conjunction([M]) is M
    assert conjunction([M, apply("not", M)]) is apply("and", M, apply("not", M))
