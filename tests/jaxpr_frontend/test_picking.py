"""A gather of one element along an axis is a sum with one term; whatever else a gather does is left to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.ir.loop_program import External, Nest
from tests.jaxpr_frontend.programs import check, converted, reasons

ROWS, COLUMNS = 7, 11
X = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
SPECIAL = X.copy()
SPECIAL[:, 3], SPECIAL[:, 5], SPECIAL[:, 8] = np.nan, np.inf, -np.inf
"""In every row, beside what is taken."""
X3 = np.random.default_rng(1).normal(size=(2, ROWS, COLUMNS))
LABELS = {
    "in range": np.array([0, 10, 3, 4, 5, 9, 1]),
    "negative": np.array([-1, -11, -3, 0, 10, -7, 2]),
    "out of range": np.array([11, -12, 400, -400, 10, 10**9, -(10**9)]),
}


def along(x, n, **options):
    return jnp.take_along_axis(x, n[:, None], axis=-1, **options)[:, 0]


def raw(mode, fill=None):
    """A gather of one element of every row, without the normalisation of indices that jnp does."""
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    return lambda x, n: lax.gather(x, n[:, None], numbers, (1, 1), mode=mode, fill_value=fill)


PICKS = {
    "take_along_axis": along,
    "take_along_axis, clip": lambda x, n: along(x, n, mode="clip"),
    "take_along_axis, promise": lambda x, n: along(x, n, mode="promise_in_bounds"),
    "take_along_axis, fill": lambda x, n: along(x, n, mode="fill", fill_value=2.5),
    "position and index": lambda x, n: jnp.asarray(x)[jnp.arange(ROWS), n],
    "position and index, fill": lambda x, n: jnp.asarray(x).at[jnp.arange(ROWS), n].get(mode="fill", fill_value=-1.0),
    "position and index, clip": lambda x, n: jnp.asarray(x).at[jnp.arange(ROWS), n].get(mode="clip"),
    "vmap": jax.vmap(lambda row, i: row[i]),
    "first axis": lambda x, n: jnp.asarray(x).T[n, jnp.arange(ROWS)],
    "gather, clip": raw("clip"),
    "gather, fill": raw("fill"),
    "gather, fill with a number": raw("fill", 0.1),
    "gather, promise": raw("promise_in_bounds"),
}


def picks(result):
    return [n for n in result.program.nests if isinstance(n, Nest) and n.picks]


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("x", [X, SPECIAL], ids=["finite", "special"])
@pytest.mark.parametrize("name", PICKS)
def test_it_is_what_jax_takes(name, x, labels):
    result = check(PICKS[name], x, LABELS[labels].astype(np.int32))
    (nest,) = picks(result)
    assert str(nest.reducer) == "sum" and len(nest.reduced) == 1
    assert not any("gather" in reason for reason in reasons(result))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("name", ["take_along_axis", "position and index", "vmap", "gather, fill"])
def test_types_of_indices(name, dtype):
    labels = np.array([0, 10, 3, 4, 5, 9, 1]) if np.iinfo(dtype).min == 0 else np.array([0, -1, 3, -11, 5, 9, 10])
    assert picks(check(PICKS[name], SPECIAL, labels.astype(dtype)))


def test_batches():
    n = np.random.default_rng(2).integers(-COLUMNS, COLUMNS, (2, ROWS))
    for function in (
        lambda x, n: jnp.take_along_axis(x, n[..., None], axis=-1)[..., 0],
        lambda x, n: x[jnp.arange(2)[:, None], jnp.arange(ROWS), n],
        jax.vmap(lambda a, i: a[jnp.arange(ROWS), i]),
        lambda x, n: jnp.take_along_axis(jnp.swapaxes(x, 1, 2), n[:, None], axis=1)[:, 0],
        lambda x, n: jnp.take_along_axis(x.reshape(-1, COLUMNS), n.reshape(-1, 1), axis=-1),
    ):
        (nest,) = picks(check(function, X3, n))
        assert [a.extent for a in nest.reduced] == [COLUMNS]


LEFT = {
    "rows of a table": lambda x, n: jnp.exp(x)[n],
    "several elements of a row": lambda x, n: jnp.take_along_axis(x, jnp.stack([n, n + 1], 1), axis=-1),
    "a slice at each index": jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (3,))),
    "two indices": lambda x, n: x[n % ROWS, n],
    "other rows": lambda x, n: x[jnp.arange(ROWS)[::-1], n],
    "shifted rows": lambda x, n: x[(jnp.arange(ROWS) + 1) % ROWS, n],
    "fewer rows": lambda x, n: x[jnp.arange(3), n[:3]],
    "integers": lambda x, n: along((4 * x).astype(jnp.int32), n),
    "indices that cannot count": lambda x, n: jax.vmap(lambda row, i: row[i])(jnp.tile(x, 20), n.astype(jnp.int8)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_gathers_are_left_to_xla(name):
    result = check(LEFT[name], X, np.array([0, 10, 3, 4, 5, 9, 1]))
    assert not picks(result)
    (gather,) = (n for n in result.program.nests if isinstance(n, External) and "gather" in n.reason)
    assert "left to XLA" in gather.reason


def test_a_pick_alone_is_no_kernel():
    """XLA reads one element of each row for it; nothing of ours may read them all."""
    plan = pf.fuse(along, options=pf.FuseOptions(price=True)).explain(
        jax.ShapeDtypeStruct((4096, 50_000), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    )
    assert plan.kernels == ()
    assert [f.operation for f in plan.fallbacks if f.operation == "gather"] == ["gather"]


def test_the_condition_is_named():
    plan = pf.fuse(lambda x, n: x.max(-1) - along(x, n)).explain(
        jax.ShapeDtypeStruct((4096, 50_000), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    )
    assert len(plan.kernels) == 1 and plan.fallbacks == ()
    assert "a -0.0 that is taken by its index is 0.0" in plan.conditions and plan.exceptions == ()


def test_what_is_made_of_the_element_is_computed_after_the_sum():
    """No frame: the sum has one term, so what the rolled maximum and the logarithm do to it waits for both."""
    plan = pf.fuse(lambda x, n: along(jax.nn.log_softmax(x), n)).explain(
        jax.ShapeDtypeStruct((4096, 50_000), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    )
    (kernel,) = plan.kernels
    (fold,) = (f for f in kernel.group.folds if f.nest.picks)
    assert fold.frames == () and kernel.group.passes == 1 and plan.exceptions == ()


def test_names_are_kept():
    assert str(picks(converted(along, X, LABELS["in range"]))[0].source)
