"""A loop whose trips begin with what the one before has left takes as long as its longest chain of operations, at least."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.ir.statements import Loop, every
from pallasfuse.price import gpu
from pallasfuse.price.dependent_steps import clocks_of_trip
from pallasfuse.targets import TRITON

STATE = jax.ShapeDtypeStruct((32,), jnp.float32)


def attention(q, k, v):
    return jnp.einsum("hts,hsd->htd", jax.nn.softmax(jnp.einsum("htd,hsd->hts", q, k), -1), v)


def filtered(x):
    """Each row's running sum of squares, by a loop that only adds."""
    return lax.scan(lambda s, row: (0.9 * s + row, 0.9 * s + row), jnp.zeros(x.shape[1:]), x)[1]


def programs_of(function, *shapes, price=True):
    arguments = [s if isinstance(s, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    plan = pf.fuse(function, options=pf.FuseOptions(target="triton", price=price)).explain(*arguments)
    return [p.program for k in plan.kernels for p in k.phases] + [x.kernel for x in plan.loops]


def loop_of(step):
    """The kernel of a loop of 64 trips that hand on a vector of 32."""
    (program,) = programs_of(lambda x: lax.scan(lambda s, _: (step(s), None), x, length=64)[0], STATE)
    return program


def clocks(step, load_clocks=0.0):
    return clocks_of_trip(loop_of(step), load_clocks)


@pytest.mark.parametrize(
    ("function", "shapes", "steps"), [(attention, [(2, 1024, 64)] * 3, False), (filtered, [(512, 4096)], True)]
)
def test_steps_are_loops_that_go_on_from_one_position_to_the_next(function, shapes, steps):
    programs = [
        p for p in programs_of(function, *shapes, price=steps) if any(isinstance(s, Loop) for s in every(p.body))
    ]
    assert programs
    assert any(p.is_recurrent for p in programs) == steps


def test_operations_that_need_each_other_add_up_and_others_do_not():
    after, beside = clocks(lambda s: s * s * s * s * s), clocks(lambda s: (s * s) * (s + s) * (s - 2.0))
    assert after == 4 * clocks(lambda s: s * s)
    assert beside < after


def test_other_lanes_and_warps_are_waited_for():
    alone = clocks(lambda s: s * 0.5)
    of_lanes = clocks(lambda s: s * 0.5 + jnp.sum(s))
    assert of_lanes > alone + 5 * 24  # five exchanges of 32 lanes

    def over_warps(x):
        return lax.scan(lambda s, _: (s - 0.1 * jnp.sum(s), None), x, length=64)[0]

    (wide,) = programs_of(over_warps, jax.ShapeDtypeStruct((4096,), jnp.float32))
    (narrow,) = programs_of(over_warps, STATE)
    assert wide.warps > 1
    assert clocks_of_trip(wide, 0.0) > clocks_of_trip(narrow, 0.0) + 60


def test_a_sum_of_each_row_is_exchanged_before_it_meets_what_is_spread_in_another_way():
    def rows(x, meets):
        def step(s, _):
            sums = jnp.sum(s[0], axis=1)
            if meets == "sums":
                sums = jnp.tanh(sums) + s[1]
            return (s[0] - 0.1 * sums[:, None], s[1] * 0.5), None

        return lax.scan(step, (x, x[:, 0]), length=64)[0]

    matrix = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    found = {}
    for meets in ("rows", "sums"):
        (program,) = programs_of(lambda x, meets=meets: rows(x, meets), matrix)
        found[meets] = replace(program, tiles=tuple((axis, axis.extent) for axis, _ in program.tiles))
    four, sixteen = (
        {meets: clocks_of_trip(replace(p, warps=warps), 0.0) for meets, p in found.items()} for warps in (4, 16)
    )
    assert four["sums"] > four["rows"] + 40  # the sums of a tile's rows go back to rows as they are
    assert sixteen["sums"] - sixteen["rows"] > four["sums"] - four["rows"]  # a barrier waits for every warp


def test_what_is_loaded_or_is_one_number_is_held_as_its_reader_wants():
    def halved(x):
        return lax.scan(lambda s, _: (s * 0.5 + 0.1, None), x, length=64)[0]

    def by_columns(x, d):
        return lax.scan(lambda s, row: (s * d + row, None), x, d[None] * jnp.arange(64.0)[:, None])[0]

    def by_number(x):
        """The largest sum of a row is one number, which meets the matrix at the end of the trip."""
        return lax.scan(lambda s, _: (s * 0.5 + jnp.max(jnp.sum(s, 1)), None), x, length=64)[0]

    def beside_number(x):
        def step(c, _):
            return (c[0] * 0.5 + 0.1, jnp.max(jnp.sum(c[0], 1))), None

        return lax.scan(step, (x, x[0, 0]), length=64)[0]

    found = []
    cases = (halved, [(16, 64)]), (by_columns, [(16, 64), (64,)]), (by_number, [(16, 64)]), (beside_number, [(16, 64)])
    for function, shapes in cases:
        (program,) = programs_of(function, *shapes)
        tiles = tuple((a, 1 if a.name == "trip" else a.extent) for a, _ in program.tiles)
        found.append(clocks_of_trip(replace(program, tiles=tiles, warps=4), 0.0))
    alone, loaded, summed, beside = found
    assert loaded == alone
    assert summed == beside + alone / 2  # an addition, of two operations


def test_functions_of_the_special_unit_take_longer():
    assert clocks(jnp.exp) > clocks(lambda s: s * s) + 16


def test_what_a_trip_loads_is_waited_for():
    (program,) = programs_of(filtered, (512, 4096))
    assert clocks_of_trip(program, 500.0) - clocks_of_trip(program, 100.0) == pytest.approx(400.0)


def test_the_price_knows_how_long_trips_take():
    def price(step):
        program = loop_of(step)
        (waiting,) = (
            t for t in gpu.price([program], TRITON.device, gpu.Emission()).terms if t.name == "waiting for loads"
        )
        return waiting.us

    few, many = (price(lambda s, n=n: lax.fori_loop(0, n, lambda _, v: v * 0.5 + 1.0, s)) for n in (1, 3))
    trip_us = 4.0 * 2 / (TRITON.device.clock_ghz * 1e3)
    assert many - few == pytest.approx(64 * 2 * trip_us, rel=0.5)
