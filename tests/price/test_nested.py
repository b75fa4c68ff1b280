"""Prices of programs with loops inside loops: what an inner loop does counts in every trip of the loops around it."""

from dataclasses import replace

import pytest

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Const, Expr, apply, const, read
from pallasfuse.ir.tile_program import Loop, block_start, every, most
from pallasfuse.price.block_work import Examiner, examine
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.ranges import hiding_nothing
from pallasfuse.price.visited_tiles import operations_per_score
from pallasfuse.targets import TRITON, XLA_CPU, XLA_GPU
from tests.ir.nested_programs import EXAMPLES, H, J, K, N
from tests.ir.test_tile_program import bounded


def program(name):
    return EXAMPLES[name].program("masked")


def loaded(work):
    return {a.tensor: a.bytes for a in work.accesses if not a.is_store}


def test_trips_of_inner_loops_multiply():
    """Three trips over n, and in each three over k."""
    work = examine(program("deep"))
    assert work.blocks == 3 * 2
    c, e = work.products
    assert (c.times, e.times) == (9, 3)
    assert c.flops == 2 * 8 * 16 * 8 * 9
    assert e.flops == 2 * 8 * 16 * 16 * 3
    assert loaded(work) == {"a": 4 * 8 * 8 * 9, "b": 4 * 8 * 16 * 9, "d": 4 * 16 * 16 * 3}
    assert (work.trips, work.most_trips, work.started, work.loops) == (12, 12, 4, 2)


def test_a_trip_loads_what_its_own_loop_loads():
    assert examine(program("deep")).loads_in_a_trip == max(4 * 8 * 8 + 4 * 8 * 16, 4 * 16 * 16)


def test_pieces_of_a_window():
    """Three windows of sixteen positions in tiles of four; of blocks of 32 positions, pieces of eight."""
    rows = examine(program("row_sum"))
    assert loaded(rows) == {"x": 4 * 4 * 4 * 12}
    assert rows.trips == 3 + 12
    pieces = examine(program("pieces"))
    assert pieces.blocks == 3 * 2
    assert loaded(pieces) == {"x": 4 * 4 * 8 * 4}


def test_inner_trips_that_depend_on_where_the_outer_loop_is():
    """A triangle: the inner loop over k goes as far as the outer one over n has come."""
    deep = program("deep")
    outer = deep.body[0]
    inner = outer.segments[0].body[0]
    reached = apply("add", apply("div", read(block_start(N), (), "int32"), const(16, "int32")), const(1, "int32"))
    shorter = replace(inner, segments=(replace(inner.segments[0], stop=reached),))
    body = (shorter, *outer.segments[0].body[1:])
    triangle = replace(deep, body=(replace(outer, segments=(replace(outer.segments[0], body=body),)), *deep.body[1:]))
    work = examine(triangle)
    assert work.products[0].times == 1 + 2 + 3
    assert work.most_trips == 3 + 3 * 3


def test_buffers_cost_where_parts_are_copied():
    flat = examine(program("flat"))
    assert flat.kept_bytes >= 4 * 8 * 32
    parts = 3 * 2 * 2 + 2  # a get and a set for each tile of h in every trip over n, and the gets of the results
    assert flat.statements - (1 + parts) == 9 + 6 + 2  # products, and the stores


@pytest.mark.parametrize("target", [XLA_CPU, XLA_GPU, TRITON])
@pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "places"])  # a loop without loads and stores
def test_every_target_has_a_price(name, target):
    """That rises with what the innermost loop has to do."""

    def longer(body):
        return tuple(
            replace(s, segments=tuple(replace(g, stop=twice(g.stop), body=longer(g.body)) for g in s.segments))
            if isinstance(s, Loop)
            else s
            for s in body
        )

    def twice(stop: Expr) -> Expr:
        return const(64 * stop.value, "int32") if isinstance(stop, Const) else stop

    own = program(name)
    much = replace(own, body=longer(own.body))
    assert 0 < price_kernel([(own, target)]).us < price_kernel([(much, target)]).us


def test_tiles_of_one_level_are_not_priced_alone():
    with pytest.raises(InvalidProgramError, match="have one tile each"):
        Examiner(program("row_sum")).work({J: 8})
    with pytest.raises(InvalidProgramError, match="have one tile each"):
        Examiner(program("pieces")).work({J: 8})
    assert Examiner(program("deep")).work({K: 16}).products[0].summed == 16


def test_operations_of_inner_loops_count():
    assert operations_per_score(program("exponentials")) == operations_per_score(program("kept")) + 1 > 0


def test_bounds_by_data_of_inner_loops():
    """Where ranges hide nothing, a loop inside another one is as long as its axis, too."""
    ranged = bounded()
    loop = next(s for s in ranged.body if isinstance(s, Loop))
    around = Axis("h", H.extent)
    outer = replace(
        loop,
        axis=around,
        carries=(),
        segments=(replace(loop.segments[0], body=(loop,), start=const(0, "int32"), stop=const(1, "int32")),),
    )
    nested = replace(ranged, body=tuple(outer if s is loop else s for s in ranged.body))
    free = [s for s in every(hiding_nothing(nested).body) if isinstance(s, Loop)]
    assert len(free) == 2
    for s in free:
        read_by_bounds = frozenset().union(*(e.tensors for g in s.segments for e in (g.start, g.stop)))
        assert most("j.left") not in read_by_bounds
