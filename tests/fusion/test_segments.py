"""Segments of long programs: they cover the program, stay within the limits, and are cut where little is alive."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.fusion.segments import MOST_NESTS, MOST_REDUCTIONS, segments
from pallasfuse.ir.loop_program import Nest, verify
from pallasfuse.jaxpr_frontend import convert

ROWS = jax.ShapeDtypeStruct((16, 512), jnp.float32)


def program_of(function):
    return convert(jax.make_jaxpr(function)(ROWS)).program


def layers(count):
    def function(x):
        for _ in range(count):
            e = jnp.exp(x - x.max(-1, keepdims=True))
            x = x + e / e.sum(-1, keepdims=True)
        return x

    return function


def test_a_program_within_the_limits_is_one_segment():
    program = program_of(layers(MOST_REDUCTIONS // 2))
    assert list(segments(program)) == [program]


@pytest.mark.parametrize("count", [MOST_REDUCTIONS // 2 + 1, MOST_REDUCTIONS, 100])
def test_layers_are_cut_where_only_one_value_is_alive(count):
    program = program_of(layers(count))
    parts = list(segments(program))
    assert [n.name for p in parts for n in p.nests] == [n.name for n in program.nests]
    for part in parts:
        verify(part)
        assert len(part.nests) <= MOST_NESTS
        assert sum(isinstance(n, Nest) and n.is_reduction for n in part.nests) <= MOST_REDUCTIONS
        assert len(part.inputs) == len(part.outputs) == 1
    assert parts[-1].outputs == program.outputs


def test_elementwise_chains_are_cut_by_length():
    def function(x):
        for n in range(3 * MOST_NESTS):
            x = jnp.sin(x) if n % 2 else jnp.cos(x)
        return x

    parts = list(segments(program_of(function)))
    assert 3 <= len(parts) <= 6
    assert all(len(p.nests) <= MOST_NESTS for p in parts)


def test_maps_of_positions_are_part_of_each_segment_that_reads_them():
    def function(x):
        visible = jnp.arange(x.shape[1]) <= jnp.arange(x.shape[0])[:, None]
        for _ in range(MOST_REDUCTIONS):
            x = x - jnp.where(visible, x, 0.0).sum(-1, keepdims=True)
        return x + 1

    parts = list(segments(program_of(function)))
    assert len(parts) == 1
    parts = list(segments(program_of(lambda x: function(function(x)))))
    assert len(parts) > 1
    for part in parts:
        verify(part)
        assert all(t.dtype != "bool" for t in part.inputs)


def test_every_output_is_made_by_a_segment():
    def function(x):
        results = []
        for _ in range(30):
            x = x - x.sum(-1, keepdims=True)
            results.append(x)
        return results

    program = program_of(function)
    made = [t for p in segments(program) for t in p.outputs]
    assert set(program.outputs) <= set(made)
