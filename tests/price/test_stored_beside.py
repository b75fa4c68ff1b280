"""Maps that XLA is to store beside kernels that compute them, too."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse.execution import as_function
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.stored_beside import stored_beside
from pallasfuse.targets import TRITON

ROWS, PLACES = jax.ShapeDtypeStruct((1024, 1536), jnp.float32), jax.ShapeDtypeStruct((1024, 1536), jnp.int32)


def mixed(x, y, z, i):
    return jnp.sin(x) * jnp.cos(y) + jnp.exp(z)


def shifted(x, y, z, i, reduction=jnp.sum):
    """The sum of a map, and the map between places that are chosen."""
    mixture = mixed(x, y, z, i)
    left, right = (jnp.take_along_axis(mixture, at, axis=1) for at in (i, i + 1))
    return reduction(mixture, axis=1), jnp.tanh((left + right) / 2)


def scaled(x, y, z, i):
    mixture = mixed(x, y, z, i)
    return mixture.sum(1), jnp.tanh(mixture)


def few(x, y, z, i):
    mixture = mixed(x, y, z, i)
    left, right = (jnp.take_along_axis(mixture, at, axis=1) for at in (i[:, :8], i[:, 8:16]))
    return mixture.sum(1), jnp.tanh((left + right) / 2)


def beside(function, *, replaced=True):
    """The maps beside a kernel that computes the sum from the arguments."""
    program = convert(flatten(jax.make_jaxpr(function)(ROWS, ROWS, ROWS, PLACES))).program
    made = frozenset(program.outputs[:1] if replaced else ())
    read = frozenset(t.name for t in program.inputs[:3] if replaced)
    names = stored_beside(program, TRITON.device, made, read)
    return [n.source.summary.split("(")[-1] for n in program.nests if n.name in names]


def test_a_map_that_a_gather_chooses_from_is_stored():
    assert beside(shifted) == ["mixed)"]


def together(x, y, z, i):
    """One loop stores the map and what it computes from it; gathers read the map."""
    mixture = mixed(x, y, z, i)
    left, right = (jnp.take_along_axis(mixture, at, axis=1) for at in (i, i + 1))
    return jnp.sum(mixture, axis=1), jnp.tanh((left + right) / 2), mixture * 2 + 1


@pytest.mark.parametrize("function", [scaled, few, together])
def test_not_one_that_is_read_in_order_or_of_which_few_elements_are_taken_or_whose_loop_stores_more(function):
    assert beside(function) == []


def test_nor_where_no_kernel_computes_it():
    assert beside(shifted, replaced=False) == []


def test_the_program_says_so_to_xla():
    """The barrier is around the map that the gathers read, and nothing else."""

    function = partial(shifted, reduction=jax.nn.logsumexp)
    options = pf.FuseOptions(check=False, price=False)
    plan = pf.fuse(function, options=options).explain(ROWS, ROWS, ROWS, PLACES, target="triton")
    (kernel,) = plan.kernels
    names = stored_beside(plan.program, plan.target.device, frozenset(kernel.stores), frozenset(kernel.reads))
    assert len(names) == 1
    text = str(jax.make_jaxpr(as_function(replace(plan, stored_beside=names)))(ROWS, ROWS, ROWS, PLACES))
    assert text.count("optimization_barrier") == 1
    assert "optimization_barrier" not in str(jax.make_jaxpr(as_function(plan))(ROWS, ROWS, ROWS, PLACES))
