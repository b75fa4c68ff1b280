"""Mask extents and loop bounds against brute force: every position and every tile is enumerated."""

from dataclasses import dataclass

import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import Expr, add, apply, const, convert, index, mul, read, select, sub
from pallasfuse.ir.fold import Accumulator, Fold, Frame
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tile_program import block_start
from pallasfuse.tiling.bounds import guards, plan_loop
from pallasfuse.tiling.masks import Affine, affine, extent, is_positional

I, J, H = Axis("i", 11), Axis("j", 23), Axis("h", 3)  # noqa: E741


def whole(n):
    return const(int(n), "int32")


# --- affine forms


@pytest.mark.parametrize(
    ("expr", "form"),
    [
        (index(J), {J: 1, "": 0}),
        (add(index(J), whole(3)), {J: 1, "": 3}),
        (sub(whole(2), sub(index(I), index(J))), {I: -1, J: 1, "": 2}),
        (mul(whole(-2), add(index(I), whole(5))), {I: -2, "": -10}),
        (mul(index(J), whole(3)), {J: 3, "": 0}),
        (apply("neg", index(J)), {J: -1, "": 0}),
        (sub(index(J), index(J)), {"": 0}),
        (convert(index(J), "int64"), {J: 1, "": 0}),
        (convert(index(J), "float32"), None),
        (mul(index(J), index(I)), None),
        (apply("div", index(J), whole(2)), None),
        (apply("rem", index(J), whole(2)), None),
        (read("n", (), "float32"), None),
        (mul(convert(index(J), "float32"), const(0.5, "float32")), None),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_affine(expr, form):
    if form is None:
        assert affine(expr) is None
        return
    constant = form.pop("")
    assert affine(expr) == Affine(tuple(sorted(form.items())), constant)


def test_positional_predicates_read_nothing():
    assert is_positional(apply("lt", index(I), index(J)))
    assert not is_positional(apply("lt", index(J), read("length", (), "int32")))
    assert not is_positional(index(J))


# --- random predicates


def random_affine(random: np.random.Generator) -> Expr:
    terms = [mul(index(a), whole(random.integers(-3, 4))) for a in (I, J, H) if random.random() < 0.7]
    expr: Expr = whole(random.integers(-30, 31))
    for term in terms:
        expr = add(expr, term) if random.random() < 0.5 else sub(expr, term)
    return expr


def comparison(random: np.random.Generator, ops=("lt", "le", "gt", "ge")) -> Expr:
    return apply(str(random.choice(ops)), random_affine(random), random_affine(random))


def random_predicate(random: np.random.Generator, depth: int) -> Expr:
    if depth == 0 or random.random() < 0.2:
        if random.random() < 0.1:
            return const(bool(random.integers(2)), "bool")
        return comparison(random, ("lt", "le", "gt", "ge", "eq", "ne"))
    op = str(random.choice(["and", "or", "not"]))
    if op == "not":
        return apply("not", random_predicate(random, depth - 1))
    return apply(op, random_predicate(random, depth - 1), random_predicate(random, depth - 1))


def truth(predicate: Expr) -> np.ndarray:
    """The predicate at every (i, j, h)."""
    return evaluate_expr(predicate, (I, J, H), {})


@dataclass(frozen=True)
class Block:
    """A block of rows; the rest of the axes are whole."""

    start: int
    size: int

    def __call__(self, axis: Axis):
        return (whole(self.start), self.size) if axis == I else (whole(0), axis.extent)

    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


def positions(interval, starts=()) -> np.ndarray:
    """Which positions of j an interval contains."""
    at = dict(starts)
    low = 0 if interval.low is None else int(evaluate_expr(interval.low, (), at))
    high = J.extent if interval.high is None else int(evaluate_expr(interval.high, (), at))
    j = np.arange(J.extent)
    return (low <= j) & (j < high)


def blocks(random: np.random.Generator):
    size = int(random.integers(1, 6))
    return [Block(s, size) for s in range(0, I.extent - size + 1, size)]


@pytest.mark.sampled(5, cover=())
@pytest.mark.parametrize("seed", range(150))
def test_possible_contains_and_certain_is_contained(seed):
    random = np.random.default_rng(seed)
    predicate = random_predicate(random, 3)
    holds = truth(predicate)
    for block in blocks(random):
        got = extent(predicate, J, block)
        inside = holds[block.rows()]
        assert not (inside.any((0, 2)) & ~positions(got.possible)).any(), predicate
        if got.certain is not None:
            assert not (positions(got.certain) & ~inside.all((0, 2))).any(), predicate


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("seed", range(150))
def test_a_single_comparison_is_exact(seed):
    random = np.random.default_rng(1000 + seed)
    predicate = comparison(random)
    if seed % 3 == 0:
        predicate = apply("not", predicate)
    holds = truth(predicate)
    for block in blocks(random):
        got = extent(predicate, J, block)
        np.testing.assert_array_equal(positions(got.possible), holds[block.rows()].any((0, 2)), str(predicate))
        np.testing.assert_array_equal(positions(got.certain), holds[block.rows()].all((0, 2)), str(predicate))


@pytest.mark.parametrize(
    ("predicate", "possible", "certain"),
    [
        (apply("le", index(J), index(I)), "j < 8", "j < 5"),
        (
            apply("and", apply("le", index(J), index(I)), apply("gt", index(J), sub(index(I), whole(3)))),
            "2 <= j < 8",
            None,
        ),
        (apply("or", apply("le", index(J), index(I)), apply("lt", index(J), whole(6))), "j < 8", "j < 6"),
        (apply("eq", index(J), index(I)), "4 <= j < 8", None),
        (apply("ge", mul(index(J), whole(2)), whole(7)), "4 <= j", "4 <= j"),
        (apply("ge", index(I), whole(6)), "j < 23", ""),
        (apply("ge", index(I), whole(9)), "", ""),
        (apply("ge", index(I), whole(2)), "j < 23", "j < 23"),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_rows_four_to_seven(predicate, possible, certain):
    got = extent(predicate, J, Block(4, 4))
    j = np.arange(J.extent)
    ranges = {"": j < 0, "2 <= j < 8": (j >= 2) & (j < 8), "4 <= j < 8": (j >= 4) & (j < 8), "4 <= j": j >= 4,
              **{f"j < {n}": j < n for n in (5, 6, 8, 23)}}  # fmt: skip
    np.testing.assert_array_equal(positions(got.possible), ranges[possible])
    if certain is not None:
        np.testing.assert_array_equal(positions(got.certain), ranges[certain])


def test_what_is_not_affine_may_hold_anywhere():
    for predicate in (apply("eq", apply("rem", index(J), whole(2)), whole(0)),
                      apply("lt", mul(index(I), index(J)), whole(5)),
                      apply("lt", mul(index(J), whole(1000)), whole(5))):  # fmt: skip
        got = extent(predicate, J, Block(0, 4))
        assert positions(got.possible).all()
        assert got.certain is None


# --- loops


def folds(terms, reducers, frames=(), finished=()) -> list[Fold]:
    """One fold per term, along j; `frames` are read at unfinished values, `finished` are reductions of an earlier pass."""
    result = []
    for n, (term, reducer) in enumerate(zip(terms, reducers, strict=True)):
        nest = Nest(f"r{n}", (I,), term, term.dtype, (J,), reducer)
        part = Accumulator(f"r{n}.acc0", (I,), reducer, term, None)
        framed = tuple(Frame(f, (I,), read("r0", (I,), "float32"), ("r0",), ()) for f in frames if f in term.tensors)
        result.append(Fold(nest, 0, (part,), framed, read(part.name, (I,), term.dtype),
                           finished_reads=term.tensors & frozenset(finished)))  # fmt: skip
    return result


def plan(predicate: Expr | None, row_tile: int, tile: int, tails: str):
    x = read("x", (I, J), "float32")
    body = x if predicate is None else select(predicate, x, const(-np.inf, "float32"))
    terms = [body, apply("exp", sub(body, read("m", (I,), "float32")))]
    schedule = Schedule(((I, row_tile),), J, tile)
    return plan_loop({a for a, _ in schedule.grid}, J, schedule.tile, tails, folds(terms, [MAX, SUM], frames=("m",)))


def check_plan(predicate: Expr, row_tile: int, tile: int, tails: str, *, minimal: bool) -> None:
    loop = plan(predicate, row_tile, tile, tails)
    holds = truth(predicate).any(2) if H in predicate.axes else truth(predicate)[:, :, 0]
    everywhere = truth(predicate).all(2)
    for begin_rows in range(0, I.extent, row_tile):
        start = min(begin_rows, I.extent - row_tile) if tails == "exact" else begin_rows
        at = {block_start(I): np.asarray(start)}

        def number(expr, at=at):
            return int(evaluate_expr(expr, (), at))

        rows = slice(start, min(start + row_tile, I.extent))
        visited: list[int] = []
        for trip in loop.trips:
            for t in range(number(trip.start), number(trip.stop)):
                begin = trip.offset + t * trip.tile
                tile_positions = range(begin, begin + trip.tile)
                assert trip.edge or tile_positions.stop <= J.extent, (trip.label, begin)
                inside = [j for j in tile_positions if j < J.extent]
                assert inside
                if trip.true:
                    assert trip.true == {predicate}
                    assert everywhere[rows, inside].all(), f"{trip.label} tile at {begin} of rows {rows} is not certain"
                visited += inside
        assert visited == sorted(set(visited)), "a position is visited twice or out of order"
        needed = np.flatnonzero(holds[rows].any(0))
        assert set(needed) <= set(visited)
        if visited:
            assert visited == list(range(visited[0], visited[-1] + 1))
            assert visited[0] == number(loop.first)
        assert number(loop.to_visit) == len(visited)
        if minimal:
            cells = {int(j) // tile for j in needed}
            full = range(min(cells), max(cells) + 1) if cells else range(0)
            assert {j // tile for j in visited} == set(full), "tiles without need are visited"


def sizes(random):
    return int(random.integers(2, 6)), int(random.integers(1, 9))


@pytest.mark.sampled(3, cover=("tails",))
@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("seed", range(60))
def test_loops_of_random_predicates(seed, tails):
    random = np.random.default_rng(seed)
    check_plan(random_predicate(random, 2), *sizes(random), tails, minimal=False)


def rows_only(random: np.random.Generator) -> Expr:
    """One comparison that varies along i with coefficient one or minus one, and along j."""
    k = [-3, -2, -1, 1, 2, 3][random.integers(6)]
    row = [-1, 1][random.integers(2)]
    op = str(random.choice(["lt", "le", "gt", "ge"]))
    return apply(op, mul(index(J), whole(k)), add(mul(index(I), whole(row)), whole(random.integers(-20, 21))))


@pytest.mark.sampled(3, cover=("tails",))
@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("seed", range(60))
def test_loops_of_one_comparison_visit_no_tile_in_vain(seed, tails):
    random = np.random.default_rng(seed)
    row_tile, tile = sizes(random)
    # blocks that overhang may be planned as if their missing rows were there
    divides = I.extent % row_tile == 0 or tails == "exact"
    check_plan(rows_only(random), row_tile, tile, tails, minimal=divides)


UNALIGNED = [
    (apply("ge", index(J), whole(5)), 4, 3),  # the same for all rows
    (apply("ge", index(J), index(I)), 1, 3),  # one row per block
    (apply("and", apply("gt", index(J), index(I)), apply("le", index(J), add(index(I), whole(4)))), 1, 3),
]


@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize(
    ("predicate", "row_tile", "tile"),
    UNALIGNED,
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_masks_that_start_inside_a_tile(predicate, row_tile, tile, tails):
    check_plan(predicate, row_tile, tile, tails, minimal=True)


@pytest.mark.sampled(4, cover=("tails",))
@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("seed", range(40))
def test_loops_of_blocks_of_one_row(seed, tails):
    random = np.random.default_rng(seed)
    check_plan(rows_only(random), 1, int(random.integers(1, 9)), tails, minimal=True)


@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("tile", [1, 3, 8, 23])
def test_loops_without_masks_visit_everything_once(tile, tails):
    loop = plan(None, 2, tile, tails)
    seen = [j for trip in loop.trips for t in range(int(evaluate_expr(trip.start, (), {})), int(evaluate_expr(trip.stop, (), {})))
            for j in range(trip.offset + t * trip.tile, trip.offset + (t + 1) * trip.tile) if j < J.extent]  # fmt: skip
    assert seen == list(range(J.extent))
    assert loop.guards.predicates == ()
    assert {trip.edge for trip in loop.trips} == (
        {False, True} if tails == "masked" and J.extent % tile and tile < 23 else {False}
    )


def test_segments_of_a_causal_loop():
    loop = plan(apply("le", index(J), index(I)), 4, 4, "masked")
    assert [(t.label, t.edge) for t in loop.trips] == [("unmasked", False), ("masked", True)]


# --- guards

MASK = apply("le", index(J), index(I))


def guards_of(terms, reducers, **reads):
    found = guards(folds(terms, reducers, **reads), J, inner={"x"})
    return found.predicates, found.assumes_finite_factor


def test_guards_are_predicates_outside_of_which_nothing_is_added():
    x = read("x", (I, J), "float32")
    masked = select(MASK, x, const(-np.inf, "float32"))
    weight = read("w", (J,), "float32")
    exponential = apply("exp", sub(masked, read("m", (I,), "float32")))
    assert guards_of([masked], [MAX]) == ((MASK,), False)
    assert guards_of([masked, exponential], [MAX, SUM], frames=("m",)) == ((MASK,), False)
    assert guards_of([masked, mul(exponential, weight)], [MAX, SUM], frames=("m",)) == ((MASK,), True)
    # another reduction of the pass needs every position
    assert guards_of([masked, x], [MAX, SUM]) == ((), False)
    assert guards_of([select(MASK, x, const(-1e3, "float32"))], [MAX]) == ((), False)
    assert guards_of([], []) == ((), False)


X = read("x", (I, J), "float32")


def filled(fill, mask=MASK, x=X, dtype="float32"):
    """A value under a mask that fills in a number, with the terms of a sum of exponentials framed at its maximum."""
    masked = select(mask, x, const(fill, dtype))
    return [masked, apply("exp", sub(masked, read("m", (I,), dtype)))]


@pytest.mark.parametrize("fill", [-1e9, -1e30, np.finfo(np.float32).min])
def test_a_fill_that_is_far_from_all_values_hides_as_an_infinity_does(fill):
    found = guards(folds(filled(fill), [MAX, SUM], frames=("m",)), J, inner={"x"})
    assert found.predicates == (MASK,) and set(found.fills) == {MASK}
    assert {float(np.float32(n)) for n in found.fills[MASK]} == {float(np.float32(fill))}
    assert guards(folds(filled(fill), [MAX, SUM], frames=("m",)), J, inner={"x"}, strict=True).predicates == ()
    assert (
        guards(folds(filled(fill), [MAX, SUM], frames=("m",)), J).predicates == ()
    )  # x may be masked before it is handed over
    added = add(X, select(MASK, const(0, "float32"), const(fill, "float32")))
    terms = [added, apply("exp", sub(added, read("m", (I,), "float32")))]
    assert guards_of(terms, [MAX, SUM], frames=("m",)) == ((MASK,), True)


@pytest.mark.parametrize(
    ("terms", "reducers"),
    [
        (filled(-1e4), [MAX, SUM]),  # a score may be as low
        (filled(1e9), [MAX, SUM]),  # it is the maximum
        (
            filled(-1e9, apply("le", index(J), sub(index(I), const(3, "int32")))),
            [MAX, SUM],
        ),  # the first rows see nothing
        (filled(-1e9, x=sub(X, const(1e9, "float32"))), [MAX, SUM]),  # what is not masked is as far
        ([*filled(-1e9), mul(filled(-1e9)[0], X)], [MAX, SUM, SUM]),  # another sum needs it
        ([filled(-1e9)[0], filled(-1e9)[1]], [SUM, SUM]),  # a mean of it
        ([filled(-1e8)[0], apply("exp", add(filled(-1e8)[0], const(99999992.0, "float32")))], [MAX, SUM]),  # they meet
    ],
    ids=["near", "above", "empty rows", "far itself", "weighted", "mean", "known sum"],
)
def test_a_fill_is_a_number_where_anything_is_in_doubt(terms, reducers):
    assert guards_of(terms, reducers, frames=("m",)) == ((), False)


def test_masks_that_are_added_to_each_other_and_may_cancel():
    other = apply("lt", index(J), const(5, "int32"))
    for second, expected in ((-1e9, (MASK, other)), (1e9, ())):
        s = add(add(X, select(MASK, const(0, "float32"), const(-1e9, "float32"))),
                select(other, const(0, "float32"), const(second, "float32")))  # fmt: skip
        terms = [s, apply("exp", sub(s, read("m", (I,), "float32")))]
        assert guards_of(terms, [MAX, SUM], frames=("m",))[0] == expected


def test_fills_of_half_types_are_far_at_half_their_range():
    lowest = float(np.finfo(np.float16).min)
    for fill, expected in ((lowest, (MASK,)), (0.7 * lowest, (MASK,)), (0.3 * lowest, ())):
        terms = filled(fill, x=read("x", (I, J), "float16"), dtype="float16")
        assert guards_of(terms, [MAX, SUM], frames=("m",))[0] == expected


def test_what_an_earlier_pass_has_finished_may_be_nan():
    masked = select(MASK, read("x", (I, J), "float32"), const(-np.inf, "float32"))
    exponential = apply("exp", sub(masked, read("m", (I,), "float32")))
    assert guards_of([exponential], [SUM], finished=("m",)) == ((), False)
    assert guards_of([mul(select(MASK, exponential, const(0, "float32")), read("r", (I,), "float32"))], [SUM],
                     finished=("m", "r")) == ((), False)  # fmt: skip
    # where the mask replaces the value, nothing of it is left
    assert guards_of([select(MASK, exponential, const(0, "float32"))], [SUM], finished=("m",)) == ((MASK,), False)


def test_a_value_that_is_neither_frame_nor_finished_is_assumed_to_be_finite():
    masked = select(MASK, read("x", (I, J), "float32"), const(-np.inf, "float32"))
    assert guards_of([apply("exp", sub(masked, read("m", (I,), "float32")))], [SUM]) == ((MASK,), True)
