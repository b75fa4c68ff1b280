"""Integers are drawn below what programs mean by them."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.index_ranges import index_ranges

TABLE = jax.ShapeDtypeStruct((1000, 8), jnp.float32)
KEYS = jax.ShapeDtypeStruct((4, 61, 16), jnp.float32)
ROWS = jax.ShapeDtypeStruct((4,), jnp.int32)
KEY = jax.eval_shape(lambda: jax.random.key(0))
SMALL = jax.ShapeDtypeStruct((), jnp.int4)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
BOTH = jax.ShapeDtypeStruct((9, 2), jnp.int32)
PAIRS = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))


def ranges(function, *avals):
    jaxpr = jax.make_jaxpr(function)(*avals).jaxpr
    return index_ranges(jaxpr.eqns, jaxpr.invars)


def masked(keys, lengths):
    known = jnp.arange(61)[None, :] < jnp.maximum(lengths, 1)[:, None]
    return jnp.where(known[..., None], keys, 0.0)


def window(keys, place):
    near = jnp.abs(jnp.arange(61) + 3 - place)
    return jnp.where((jnp.arange(61) <= place)[None, :, None], keys, 0.0) + near[None, :, None]


def in_a_loop(table, rows):
    return jax.lax.scan(lambda total, row: (total + table[row], None), jnp.zeros(8), rows)[0]


def normalised_by_a_call(table, rows):
    """As `jnp.take` and modules of Flax do it."""
    return table[jax.jit(lambda n: jnp.where(n < 0, n + 1000, n))(rows)]


def of_two_uses(table, keys, rows):
    return table[rows].sum() + masked(keys, rows).sum()


@pytest.mark.parametrize(
    ("function", "avals", "want"),
    [
        (lambda table, rows: table[rows], (TABLE, ROWS), [None, 1000]),
        (lambda table, rows: table.at[rows].add(1.0), (TABLE, ROWS), [None, 1000]),
        (lambda table, n: jax.lax.dynamic_slice_in_dim(table, n, 10), (TABLE, NUMBER), [None, 991]),
        (lambda table, n: jax.lax.dynamic_update_slice(table, jnp.zeros((10, 8)), (n, 0)), (TABLE, NUMBER), [None, 991]),
        (lambda keys, rows, places: keys[rows, places], (KEYS, ROWS, ROWS), [None, 4, 61]),
        (lambda keys, places: keys.at[jnp.arange(4), places].set(0.0), (KEYS, ROWS), [None, 61]),
        (lambda keys, both: jax.lax.gather(keys, jnp.maximum(both, 0), PAIRS, (1, 1, 16)), (KEYS, BOTH), [None, (4, 61)]),
        (lambda keys, both: jax.lax.gather(keys, both.T.reshape(9, 2), PAIRS, (1, 1, 16)), (KEYS, BOTH), [None, 61]),
        (lambda keys, both: jax.lax.gather(keys, both[:, ::-1], PAIRS, (1, 1, 16)), (KEYS, BOTH), [None, 61]),
        (lambda keys, both: keys[0, both] * jax.lax.gather(keys, both, PAIRS, (1, 1, 16))[:, None], (KEYS, BOTH), [None, (4, 61)]),
        (masked, (KEYS, ROWS), [None, 61]),
        (window, (KEYS, NUMBER), [None, 61]),
        (jax.jit(masked), (KEYS, ROWS), [None, 61]),
        (in_a_loop, (TABLE, ROWS), [None, 1000]),
        (normalised_by_a_call, (TABLE, ROWS), [None, 1000]),
        (jax.grad(lambda table, rows: jnp.take(table, rows, axis=0).sum()), (TABLE, ROWS), [None, 1000]),
        (of_two_uses, (TABLE, KEYS, ROWS), [None, None, 1000]),
        (lambda table, rows: table[rows] * (rows[:, None] == jnp.arange(2)).sum(), (TABLE, ROWS), [None, 1000]),
        (lambda x, key: x + jax.random.normal(key.reshape(1)[0], x.shape), (TABLE, KEY), [None, None]),
        (lambda table, n: jax.lax.dynamic_slice_in_dim(table, n.astype(jnp.int32), 1), (TABLE, SMALL), [None, 1000]),
        (lambda rows: jax.nn.one_hot(rows, 17), (ROWS,), [17]),
        (lambda rows: rows * 2 + 1, (ROWS,), [None]),
        (lambda keys, n: jax.lax.cond(n > 0, masked, lambda k, m: k, keys, jnp.full(4, n)),
         (KEYS, NUMBER), [None, 61]),
    ],
)  # fmt: skip
def test_integers_stay_below_what_they_index_or_are_compared_with(function, avals, want):
    assert ranges(function, *avals) == want
