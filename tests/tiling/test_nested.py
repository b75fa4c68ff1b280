"""Rewrites of tile programs reach into loops inside loops, into what loops begin with, and into what is set in buffers."""

from dataclasses import replace

import numpy as np
import pytest

from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import Apply, apply, const, convert, mul, postorder, sub
from pallasfuse.ir.tile_program import Contract, Loop, Set, TileProgram, every, expressions, verify
from pallasfuse.resources import exponentials
from pallasfuse.targets import MOSAIC_GPU, TRITON, XLA_CPU
from pallasfuse.tiling import arithmetic, contraction, legalize, units
from tests.ir.nested_programs import EXAMPLES, F, I, J, row_sum, tile_of


def changed(program, change) -> TileProgram:
    """Every expression of statements, and those that loops begin with, changed."""

    def statement(s):
        if isinstance(s, Loop):
            carries = tuple(replace(c, init=change(c.init)) for c in s.carries)
            return replace(s, carries=carries, segments=tuple(replace(g, body=block(g.body)) for g in s.segments))
        return replace(s, value=change(s.value)) if isinstance(s, Set) else s

    def block(body):
        return tuple(map(statement, body))

    return verify(replace(program, body=block(program.body)))


def operations(program):
    statements = list(every(program.body))
    roots = [e for s in statements for e in expressions(s)]
    roots += [c.init for s in statements if isinstance(s, Loop) for c in s.carries]
    return [n.op for n in postorder(*roots) if isinstance(n, Apply)]


@pytest.mark.parametrize("name", ["flat", "row_sum", "steps"])
def test_operations_that_a_target_lacks(name):
    """x becomes floor(x) + x - floor(x) where a loop begins and where a buffer is set; then there is no floor any more."""

    def change(x):
        return sub(apply("add", x, apply("floor", x)), apply("floor", x)) if x.axes else x

    example = EXAMPLES[name]
    program = changed(example.program("masked"), change)
    assert "floor" in operations(program)
    rewritten = legalize.rewrite(program, frozenset({"floor"}))
    assert "floor" not in operations(rewritten)
    inputs = example.inputs()
    for output, expected in example.expected(inputs).items():
        np.testing.assert_allclose(evaluate_tiles(rewritten, inputs)[output], expected, rtol=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [XLA_CPU, TRITON, MOSAIC_GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_rewrite_keeps_the_meaning(name, target):
    example = EXAMPLES[name]
    program = arithmetic.rewrite_for(target, example.program("masked"))
    inputs = example.inputs()
    for output, expected in example.expected(inputs).items():
        np.testing.assert_allclose(evaluate_tiles(verify(program), inputs)[output], expected, rtol=1e-9, atol=1e-12)


def test_cheaper_arithmetic_where_loops_begin_and_buffers_are_set():
    def change(x):
        return apply("div", mul(x, const(4.0, F)), const(4.0, F)) if x.axes else x

    for name in ("flat", "row_sum"):
        program = changed(EXAMPLES[name].program("masked"), change)
        assert "div" in operations(program)
        assert "div" not in operations(arithmetic.rewrite(program))


def test_coarse_values_go_through_buffers_and_inner_loops():
    """What comes from a product of half-precision operands, whatever holds it in between."""

    def narrow(s):
        if isinstance(s, Contract):
            return replace(s, lhs=convert(s.lhs, "bfloat16"), rhs=convert(s.rhs, "bfloat16"))
        if isinstance(s, Loop):
            return replace(s, segments=tuple(replace(g, body=tuple(map(narrow, g.body))) for g in s.segments))
        return s

    flat = EXAMPLES["flat"].program("masked")
    coarse = exponentials.coarse_values(replace(flat, body=tuple(map(narrow, flat.body))))
    assert {"c.acc", "e.t", "e.buf", "e.old", "e.all"} <= coarse
    assert coarse.isdisjoint({"a.t", "b.t", "d.t"})
    rows = row_sum("masked")
    outer = rows.body[0]
    side = convert(tile_of("x.t", I, J), "bfloat16")
    made = Contract("s.begin", (I,), side, side, (J,), F)
    begun = replace(outer, carries=tuple(replace(c, init=tile_of("s.begin", I)) for c in outer.carries))
    assert {"s", "s.in", "s.next"} <= exponentials.coarse_values(replace(rows, body=(made, begun, *rows.body[1:])))


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "product"])
def test_changes_of_units_leave_nested_programs_alone(name):
    program = EXAMPLES[name].program("masked")
    coarse = frozenset(n for s in every(program.body) for n in [getattr(s, "name", "")])
    assert units.rewrite(program, coarse) is program
    assert contraction.rewrite(program, coarse) == program
