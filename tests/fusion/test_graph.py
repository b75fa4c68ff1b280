"""What depends on what in a loop program: bits of integers say the same as sets."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.fusion.graph import Graph
from pallasfuse.jaxpr_frontend import convert


def norm_and_attend(x, w):
    y = (x - x.mean(-1, keepdims=True)) / jnp.std(x, -1, keepdims=True)
    q, k, v = jnp.split(y @ w, 3, -1)
    return jax.nn.softmax(q @ k.T) @ v


def two_results(x, w):
    return jnp.cumsum(x, 0).max(), jnp.sort(x @ w, -1), jnp.exp(w)


@pytest.mark.parametrize("function", [norm_and_attend, two_results])
def test_ancestors_are_all_that_is_read_transitively(function):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8, 24))]
    program = convert(jax.make_jaxpr(function)(*shapes)).program
    graph = Graph(program)
    expected: dict[str, frozenset[str]] = {}
    for nest in program.nests:
        expected[nest.name] = nest.reads.union(*(expected.get(t, frozenset()) for t in nest.reads))
    assert dict(graph.ancestors) == expected and len(graph.ancestors) == len(program.nests)
    for name in expected:
        covers = frozenset({name})
        assert {n for n in expected if graph.depends(n, covers)} == {
            n for n, above in expected.items() if name in above
        }
        maps = {
            n for n, above in expected.items() if name in above and n in graph.nests and not graph.nests[n].is_reduction
        }
        assert graph.computed_by(covers) == covers | maps
    (first, *_) = program.inputs
    assert {n for n in expected if graph.depends(n, [first.name])} == {
        n for n, a in expected.items() if first.name in a
    }
    assert not graph.depends(first.name, expected) and not graph.depends("no such tensor", expected)
