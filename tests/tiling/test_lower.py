"""Tile programs mean what the loop programs mean, for any tiles and both kinds of tails."""

from dataclasses import replace

import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import apply, const, mul, read, select, substitute
from pallasfuse.ir.reducers import MAX, MIN, SUM
from pallasfuse.ir.tile_program import Contract, Let, Loop, Reduce, Statement, Store, verify
from pallasfuse.price.visited_tiles import visited_share
from pallasfuse.resources.exponentials import coarse_values
from pallasfuse.targets import INTERPRET, TRITON, XLA_CPU
from pallasfuse.tiling import units
from pallasfuse.tiling.arithmetic import rewrite
from pallasfuse.tiling.choose import choose
from pallasfuse.tiling.lower import lower as lower_phases
from tests.programs_by_name import (
    PROGRAMS,
    close,
    grouping,
    only_group,
    program,
    random_inputs,
    schedule_of,
    tensors_of,
    values,
)


def lower(*args, **kwargs):
    """The one program of a kernel whose rolled axis is not split."""
    (program,) = lower_phases(*args, **kwargs)
    return program


SCHEDULES = [(1, 1), (1, 3), (3, 4), (2, 5), (4, 3), (3, 8), (8, 3), (99, 99)]
MASKED = {"causal", "window", "prefix", "empty_rows", "constant_window"}
"""Tiles that masks skip are not read: a value there that is not finite makes no NaN."""
MACHINES = [("exact", False), ("exact", True), ("masked", False)]


def kernels(name, grid_tile, rolled_tile, tails):
    for chosen in grouping(name).groups:
        yield lower(chosen, schedule_of(chosen, grid_tile, rolled_tile), tails, tensors_of(program(name)))


@pytest.mark.sampled(20, cover=())
@pytest.mark.parametrize(("grid_tile", "rolled_tile"), [(1, 3), (2, 5), (4, 3), (99, 99)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_tiles_in_multiples(name, grid_tile, rolled_tile):
    for chosen in grouping(name).groups:
        schedule = schedule_of(chosen, grid_tile, rolled_tile)
        kernel = lower(chosen, schedule, "masked", tensors_of(program(name)), multiple=3)
        check(name, kernel)
        check(name, verify(rewrite(kernel)))
        check(name, verify(rewrite(units.rewrite(kernel, coarse_values(kernel)), pins=True)))


@pytest.mark.sampled(20, cover=("tails", "back", "grid_tile", "rolled_tile", "parts"))
@pytest.mark.parametrize(("tails", "back"), MACHINES)
@pytest.mark.parametrize(("grid_tile", "rolled_tile", "parts"), [(1, 1, 2), (2, 3, 2), (3, 2, 4), (2, 1, 99)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_split(name, grid_tile, rolled_tile, parts, tails, back):
    for chosen in grouping(name).groups:
        schedule = schedule_of(chosen, grid_tile, rolled_tile)
        schedule = replace(schedule, parts=min(parts, schedule.trips))
        known = values(name)
        phases = lower_phases(chosen, schedule, tails, tensors_of(program(name)))
        assert (len(phases) > 1) == (schedule.parts > 1)
        for phase in phases:
            states = evaluate_tiles(phase, {t.name: known[t.name] for t in phase.inputs}, move_last_block_back=back)
            known = {**states, **known}  # results of the last phase are compared with what is known
        for tensor, value in states.items():
            close(value, known[tensor], message=f"{tensor} of\n{phase}")


def check(name, kernel, *, back=False):
    want = values(name)
    got = evaluate_tiles(kernel, {t.name: want[t.name] for t in kernel.inputs}, move_last_block_back=back)
    for tensor, value in got.items():
        close(value, want[tensor], message=f"{tensor} of\n{kernel}")


@pytest.mark.sampled(30, cover=("tails", "back", "schedule"))
@pytest.mark.parametrize(
    ("tails", "back"), MACHINES, ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else ""
)
@pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else ""
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_tile_programs_equal_the_loop_program(name, schedule, tails, back):
    for kernel in kernels(name, *schedule, tails):
        check(name, kernel, back=back)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize(
    "schedule",
    [(2, 5), (99, 99)],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_cheaper_arithmetic_keeps_the_value(name, schedule, tails):
    for kernel in kernels(name, *schedule, tails):
        check(name, verify(rewrite(kernel)))


def spoiled(name, value):
    """Inputs with one bad element each, or (value zero) with a first half of zeros."""
    loops, random = program(name), np.random.default_rng(9)
    inputs = random_inputs(loops, seed=3)
    for array in inputs.values():
        if value == 0:
            array[..., : array.shape[-1] // 2] = 0
        else:
            array.flat[random.integers(array.size)] = value
    with np.errstate(all="ignore"):
        return evaluate(loops, inputs)


@pytest.mark.sampled(12, cover=("value",))
@pytest.mark.parametrize(
    "value",
    [0.0, np.inf, -np.inf, np.nan],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - MASKED))
def test_special_values_end_where_they_do_in_the_program(name, value):
    if name == "layer_norm_dot" and np.isinf(value):
        pytest.skip("moving a frame multiplies the sum of the weights by 0, which an infinite weight makes NaN")
    want = spoiled(name, value)
    for schedule in [(1, 1), (2, 3), (3, 4), (99, 99)]:
        for kernel in kernels(name, *schedule, "masked"):
            got = evaluate_tiles(kernel, {t.name: want[t.name] for t in kernel.inputs})
            for tensor, result in got.items():
                close(result, want[tensor], tolerance=1e-8, message=f"{tensor} of\n{kernel}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_full_tiles_need_no_loop_over_the_rolled_axis(name):
    for kernel in kernels(name, 99, 99, "exact"):
        assert not any(isinstance(s, Loop) for s in kernel.body)


@pytest.mark.parametrize("name", PROGRAMS)
def test_masked_tiles_are_powers_of_two(name):
    for kernel in kernels(name, 3, 5, "masked"):
        for _, tile in kernel.tiles:
            assert tile & (tile - 1) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [XLA_CPU, INTERPRET, TRITON], ids=lambda t: t.name)
@pytest.mark.parametrize("name", PROGRAMS)
def test_chosen_schedules_are_legal_and_right(name, target):
    for chosen in grouping(name).groups:
        schedules = choose(chosen, target)
        assert schedules
        for schedule in schedules:
            assert [a for a, _ in schedule.grid] == list(chosen.parallel)
            assert schedule.rolled == chosen.rolled
            for axis, tile in (*schedule.grid, (schedule.rolled, schedule.rolled_tile)):
                assert 1 <= tile <= axis.extent
            check(name, lower(chosen, schedule, target.tails, tensors_of(program(name))))


# --- what kernels skip


def shares(name, grid_tile, rolled_tile):
    chosen = only_group(name)
    schedule = schedule_of(chosen, grid_tile, rolled_tile)
    return visited_share([lower(chosen, schedule, "masked", tensors_of(program(name)))])


def test_masks_shorten_loops():
    # rows i of 5 visit j <= i + 4 of 13
    assert shares("causal", 1, 1) == pytest.approx(sum(range(5, 10)) / 65)
    assert shares("window", 1, 1) == pytest.approx(20 / 65)
    assert shares("attention", 1, 1) == 1.0
    assert shares("softmax", 2, 4) == 1.0


def test_a_late_frame_is_not_carried():
    """One rounding in the end instead of one for each tile, and no logarithm in the loop."""
    chosen = only_group("picked")
    assert [f.late for fold in chosen.folds for f in fold.frames if "log" in str(f.value)] == [True]
    kernel = lower(chosen, schedule_of(chosen, 2, 5), "exact", tensors_of(program("picked")))
    (loop,) = (s for s in kernel.body if isinstance(s, Loop))
    assert not any("log" in str(s) for g in loop.segments for s in g.body)
    assert [c.name for c in loop.carries if c.name.endswith(".old")] == ["t12.frame0.old"]


def test_a_late_frame_is_carried_where_another_fold_reads_the_unfinished_value():
    chosen = only_group("picked")
    last = chosen.folds[-1]
    fold_name, frames = "reader", {f.name: f"reader.{f.name}" for f in last.frames}
    names = {read(f.name, f.axes, f.value.dtype): read(frames[f.name], f.axes, f.value.dtype) for f in last.frames}
    reader = replace(
        last,
        nest=replace(last.nest, name=fold_name),
        frames=tuple(replace(f, name=frames[f.name], unfinished=(*f.unfinished, last.name)) for f in last.frames),
        accumulators=tuple(
            replace(a, name=f"reader.{n}", term=substitute(a.term, names), update=None)
            for n, a in enumerate(last.accumulators)
        ),
        finish=const(0.0, "float32"),
    )
    group = replace(chosen, folds=(*chosen.folds, reader))
    kernel = lower(group, schedule_of(group, 2, 5), "exact", tensors_of(program("picked")))
    (loop,) = (s for s in kernel.body if isinstance(s, Loop))
    assert sum(c.name.endswith(".old") for c in loop.carries) == 2
    check("picked", kernel)


def test_masked_tiles_reappear_only_where_needed():
    chosen = only_group("causal")
    kernel = lower(chosen, schedule_of(chosen, 1, 1), "exact", tensors_of(program("causal")))
    (loop,) = (s for s in kernel.body if isinstance(s, Loop))
    selects = {
        g.label: any("select(l <=" in str(s.value) for s in g.body if isinstance(s, Reduce)) for g in loop.segments
    }
    assert selects["unmasked"] is False
    assert selects.get("masked", True) is True
    assert [a.name for a in kernel.descending] == ["i"]


GOLDEN_TILES = """\
kernel fused_t0_t6 grid(i:5/2)
  t0.acc0[i]: float32 = -inf
  t6.acc0[i]: float32 = 0
  t6.frame0.old[i]: float32 = 0
  for j in [0, 3) by 4:
    x.i_j = load x[i, j]
    t0.acc0.tile[i] = max(x.i_j[i, j]; j)
    t0.acc0.next[i] = max(t0.acc0[i], t0.acc0.tile[i])
    t6.frame0[i] = select(abs(t0.acc0.next[i]) < inf, t0.acc0.next[i], 0)
    t6.frame0.from[i] = select(t0.acc0[i] == -inf, t6.frame0[i], t6.frame0.old[i])
    t6.acc0.tile[i] = sum(exp(x.i_j[i, j] - t6.frame0[i]); j)
    t6.acc0.next[i] = t6.acc0[i] * exp(t6.frame0.from[i] - t6.frame0[i]) + t6.acc0.tile[i]
    yield t0.acc0 <- t0.acc0.next, t6.acc0 <- t6.acc0.next, t6.frame0.old <- t6.frame0
  for j in [0, 1) by 1 from 12:  # tail
    x.i_j = load x[i, j]
    t0.acc0.tile[i] = max(x.i_j[i, j]; j)
    t0.acc0.next[i] = max(t0.acc0[i], t0.acc0.tile[i])
    t6.frame0[i] = select(abs(t0.acc0.next[i]) < inf, t0.acc0.next[i], 0)
    t6.frame0.from[i] = select(t0.acc0[i] == -inf, t6.frame0[i], t6.frame0.old[i])
    t6.acc0.tile[i] = sum(exp(x.i_j[i, j] - t6.frame0[i]); j)
    t6.acc0.next[i] = t6.acc0[i] * exp(t6.frame0.from[i] - t6.frame0[i]) + t6.acc0.tile[i]
    yield t0.acc0 <- t0.acc0.next, t6.acc0 <- t6.acc0.next, t6.frame0.old <- t6.frame0
  t6.value[i] = select(abs(t0.acc0[i]) < inf, t6.acc0[i], t6.acc0[i] * exp(t6.frame0.old[i] - t0.acc0[i]))
  for j in [0, 3) by 4 backwards:
    x.i_j = load x[i, j]
    store t8[i, j] = exp(x.i_j[i, j] - t0.acc0[i]) / t6.value[i]
  for j in [0, 1) by 1 from 12 backwards:  # tail
    x.i_j = load x[i, j]
    store t8[i, j] = exp(x.i_j[i, j] - t0.acc0[i]) / t6.value[i]"""


def test_golden_tile_program():
    chosen = only_group("softmax")
    kernel = lower(chosen, schedule_of(chosen, 2, 4), "exact", tensors_of(program("softmax")))
    assert str(kernel) == GOLDEN_TILES


# --- cheaper arithmetic, by example


def arithmetic(*statements: Statement) -> list[Statement]:
    chosen = only_group("softmax")
    base = lower(chosen, schedule_of(chosen, 99, 99), "exact", tensors_of(program("softmax")))
    return list(rewrite(replace(base, body=statements)).body)


(I,) = only_group("softmax").parallel  # noqa: E741
J = only_group("softmax").rolled
X, R = read("x.t", (I, J), "float32"), read("r", (I,), "float32")
LOG2_E = float(np.log2(np.e))


def number(value):
    return const(value, "float32")


K = Axis("k", 16)


def rewritten(value, products=None):
    """`value` after the rewrite, where x.t is the product of operands of type `products`."""
    before = []
    if products is not None:
        lhs, rhs = read("q", (I, K), products), read("k", (J, K), products)
        before = [Contract("x.t", (I, J), lhs, rhs, (K,), "float32")]
    statement = arithmetic(*before, Let("a", (I, J), value))[-1]
    assert isinstance(statement, Let)
    return str(statement.value)


def test_division_by_a_power_of_two_is_a_product():
    assert rewritten(apply("div", X, number(4.0))) == "x.t[i, j] * 0.25"
    assert rewritten(apply("div", mul(X, number(3.0)), number(2.0))) == "x.t[i, j] * 1.5"
    for kept in (
        apply("div", X, number(3.0)),
        apply("div", X, number(2.0**-120)),
        apply("div", X, number(0.0)),
        apply("div", X, number(np.inf)),
        apply("div", X, R),
        apply("div", number(1.0), X),
    ):
        assert rewritten(kept) == str(kept)


@pytest.mark.parametrize("products", ["float16", "bfloat16"])
def test_half_precision_products_are_coarse(products):
    assert rewritten(apply("div", X, number(3.0)), products) == f"x.t[i, j] * {1 / 3}"
    assert rewritten(apply("exp", apply("sub", X, R)), products) == f"exp2((x.t[i, j] - r[i]) * {LOG2_E})"
    assert rewritten(apply("exp", mul(X, number(0.5))), products) == f"exp2(x.t[i, j] * {0.5 * LOG2_E})"
    for kept in (
        apply("exp", number(1.0)),
        apply("exp", R),
        apply("div", R, number(3.0)),
        apply("div", X, number(0.0)),
    ):
        assert rewritten(kept, products) == str(kept)


@pytest.mark.parametrize("products", [None, "float32"])
def test_exact_values_keep_their_exponentials(products):
    for kept in (apply("exp", apply("sub", X, R)), apply("exp", mul(X, number(0.5))), apply("div", X, number(3.0))):
        assert rewritten(kept, products) == str(kept)


def test_what_is_computed_from_coarse_values_is_coarse():
    lhs, rhs = read("q", (I, K), "float16"), read("k", (J, K), "float16")
    body = [Contract("s", (I, J), lhs, rhs, (K,), "float32"), Let("y", (I, J), mul(read("s", (I, J), "float32"), X)),
            Reduce("m", (I,), MAX, read("y", (I, J), "float32"), (J,)),
            Let("e", (I,), apply("exp", read("m", (I,), "float32"))), Let("f", (I,), apply("exp", R))]  # fmt: skip
    *_, first, second = arithmetic(*body)
    assert str(first.value) == f"exp2(m[i] * {LOG2_E})"
    assert str(second.value) == "exp(r[i])"


def test_a_positive_factor_leaves_a_maximum():
    masked = select(apply("lt", X, R), mul(X, number(0.5)), number(-np.inf))
    for reducer, value, raw in ((MAX, mul(X, number(0.5)), "x.t[i, j]"), (MIN, mul(number(0.5), X), "x.t[i, j]"),
                                (MAX, masked, "select(x.t[i, j] < r[i], x.t[i, j], -inf)")):  # fmt: skip
        first, second = arithmetic(Reduce("m", (I,), reducer, value, (J,)))
        assert isinstance(first, Reduce)
        assert isinstance(second, Let)
        assert (str(first.value), str(second.value)) == (raw, "m.raw[i] * 0.5")


@pytest.mark.parametrize(
    ("reducer", "value"),
    [
        (MAX, mul(X, number(-0.5))),
        (MAX, mul(X, number(np.inf))),
        (MAX, mul(X, number(0.0))),
        (SUM, mul(X, number(0.5))),
        (MAX, select(apply("lt", X, R), mul(X, number(0.5)), number(-1.0))),
        (MAX, mul(X, R)),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_other_factors_stay(reducer, value):
    (statement,) = arithmetic(Reduce("m", (I,), reducer, value, (J,)))
    assert isinstance(statement, Reduce)
    assert statement.value is value


def test_products_become_contractions():
    kinds = {}
    for kernel in kernels("attention", 2, 4, "masked"):
        (loop,) = (s for s in kernel.body if isinstance(s, Loop))
        for g in loop.segments:
            kinds |= {s.name: type(s) for s in g.body}
        assert any(isinstance(s, Store) for s in kernel.body)
    assert sum(k is Contract for k in kinds.values()) == 2
