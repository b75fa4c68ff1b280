"""Which gathers may be looked up, as text; and that each is what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import _compat
from pallasfuse.ir.lookup import looked_up
from pallasfuse.ir.loop_program import External
from pallasfuse.jaxpr_frontend import convert

PAGES, TABLE = jnp.arange(7 * 4 * 3 * 5.0).reshape(7, 4, 3, 5), jnp.array([[6, 0, -9, 3], [2, 2, 50, 1]])
ROWS = jnp.arange(4 * 9 * 5.0).reshape(4, 9, 5)
INDICES = jnp.array([[6, 0, 3], [8, 8, 20], [1, -3, 2], [7, 5, 4]])


def read(x):
    """Something is reduced along the last axis, which is what makes kernels read `x`."""
    return jax.nn.softmax(x * 2)


def rows(*indices, mode="clip", fill=None):
    return lambda x, t: read(jnp.take(x, t, axis=0, mode=mode, fill_value=fill))


FOUND = {
    "pages": (lambda x, t: read(x[t]), "t4[o, p, q, r, s] = x[t3[o, p], q, r, s]"),
    "joined": (lambda x, t: read(x[t].reshape(2, 16, 3, 5)), "t5[u, v, w, y] = x[t3[u, v / 4] * 4 + v % 4, w, y]"),
    "flat": (lambda x, t: read(x[t].reshape(32, 15)), ""),
    "clipped": (rows(mode="clip"), ""),
    "filled": (rows(mode="fill"), ", nan where out of range"),
    "filled with a number": (rows(mode="fill", fill=1.5), ", 1.5 where out of range"),
    "later rows": (lambda x, t: read(jnp.take(x, t, axis=2, mode="clip")), ""),
    "joined behind": (lambda x, t: read(jnp.take(x, t, axis=1, mode="clip").reshape(7, 2, 12, 5)), "* 3 + "),
    "joined with more": (lambda x, t: read(jnp.take(x, t, axis=1, mode="clip").reshape(7, 2, 60)), "* 15 + "),
    "turned": (lambda x, t: read(x.transpose(2, 0, 3, 1)[t]), " = x[q, s, t4[o, p], r]"),
    "turned twice": (lambda x, t: read(x.transpose(2, 0, 3, 1).swapaxes(0, 1)[t]), " = x[t5[o, p], s, q, r]"),
    "turned, and joined behind": (
        lambda x, t: read(jnp.take(x.swapaxes(0, 2), t, axis=1, mode="clip").reshape(3, 2, 28, 5)),
        "= t0[u, t1[v, w / 7] * 7 + w % 7, y]",
    ),
    "computed, and more of it is read": (lambda x, t: read((x * 0.5)[t]), "t5[o, p, q, r, s] = t0[t4[o, p], q, r, s]"),
    "units": (lambda x, t: read(x[:, None][t[:, None]].reshape(2, 1, 16, 3, 5)), "* 4 + "),
}


def lookups(function, *arguments):
    program = convert(jax.make_jaxpr(function)(*arguments)).program
    return [n.lookup for n in program.nests if isinstance(n, External) and n.lookup is not None]


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("case", FOUND)
def test_what_is_gathered_may_be_looked_up(case):
    """The values are those of the gather, wherever the table points; a wrong axis gives other ones."""
    function, text = FOUND[case]
    found = lookups(function, PAGES, TABLE)
    assert text in str(found[-1])
    jaxpr = jax.make_jaxpr(function)(PAGES, TABLE)
    converted = convert(jaxpr)
    names = {v: n for n, v in converted.variable.items()}
    values = dict(zip(converted.jaxpr.invars, (PAGES, TABLE), strict=True))
    for eqn in converted.jaxpr.eqns:  # XLA's own results, equation by equation
        given = [a.val if hasattr(a, "val") else values[a] for a in eqn.invars]
        values.update(zip(eqn.outvars, _compat.bind(eqn, given), strict=True))
    by_name = {names[v]: np.asarray(x) for v, x in values.items()}
    for lookup in found:
        source, table = (by_name[t.name].reshape([a.extent for a in t.axes]) for t in (lookup.source, lookup.table))
        want = by_name[lookup.result.name].reshape([a.extent for a in lookup.result.axes])
        assert np.array_equal(looked_up(lookup, source, table), want, equal_nan=True)


def test_a_batch_of_tables_and_sources():
    (found,) = lookups(jax.vmap(lambda x, t: read(x[t])), ROWS, INDICES)
    assert str(found) == "t4[n, o, p] = x[n, t3[n, o], p]"


OTHERS = {
    "by two indices": (lambda x, t: read(x[t, t]), 0),
    "a slice": (lambda x, t: read(lax.dynamic_slice(x, (t[0, 0], 0, 0, 0), (2, 4, 3, 5))), 0),
    "left by the user": (lambda x, t: read(pf.leave(lambda a, b: a[b])(x, t)), 0),
    "nothing": (lambda x, t: read(x[t[:, :0]]).sum(), 0),
    "integers that are filled": (lambda x, t: jnp.take(x.astype(jnp.int32), t, axis=0, mode="fill").sum(-1), 0),
    "parts of rows": (lambda x, t: read(lax.gather(x, t[..., None], PART, (1, 2, 3, 5), mode="clip")), 0),
    "joined with what stands before its rows": (
        lambda x, t: read(lax.gather(x, t[..., None], BEHIND, (7, 4, 1, 5), mode="clip").reshape(2, 28, 4, 5)), 1,
    ),
    "a part that is sliced away": (lambda x, t: read(x[t][..., :2]), 1),
    "another order before it is joined": (lambda x, t: read(jnp.swapaxes(x[t], 1, 2).reshape(2, 4, 60)), 1),
    "a permuting reshape": (lambda x, t: read(lax.reshape(x[t], (2, 4, 15, 4), (0, 1, 3, 4, 2))), 1),
    "joined by a permuting reshape": (lambda x, t: read(lax.reshape(x[t], (2, 16, 15), (0, 2, 1, 3, 4))), 1),
    "few rows of a scaled source": (lambda x, t: read((x * 0.5)[t[:1]]), 0),
    "few rows of another type": (lambda x, t: read(x.astype(jnp.bfloat16)[t[:1]]), 0),
    "few rows of a scaled source that is turned": (lambda x, t: read(jnp.moveaxis(x * 0.5, 2, 0)[t[0, :2]][None]), 0),
    "another type before it is joined": (lambda x, t: read(x[t].astype(jnp.bfloat16).reshape(2, 16, 15)), 1),
}  # fmt: skip
BEHIND = lax.GatherDimensionNumbers((2, 3, 4), (2,), (2,))
PART = lax.GatherDimensionNumbers((2, 3, 4), (0,), (0,))


@pytest.mark.parametrize("case", OTHERS)
def test_others_stay(case):
    """Where a gather's own result is looked up, but is then changed, what it is changed to is not."""
    function, count = OTHERS[case]
    found = lookups(function, PAGES, TABLE)
    assert len(found) == count
    assert all(x.block == 1 and len(x.result.axes) == 5 for x in found)
