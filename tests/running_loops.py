"""Programs with loops, whose kernels are run in the interpreter."""

import jax
import jax.numpy as jnp

from pallasfuse import _compat
from pallasfuse.decompositions.writing import traced_as
from pallasfuse.emission import pallas_kernel
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.loop_calls import loops_as_kernels, recurrence_p
from pallasfuse.recurrences import AsKernel
from pallasfuse.targets import default_for

DEVICE = default_for("cuda", frozenset({"9.0"})).device


def scans_of(function, *args):
    jaxpr = flatten(jax.make_jaxpr(function)(*args))
    return jaxpr, [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


def as_numbers(x):
    """An array, or the words of keys."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def run(jaxpr, *args, ways=None):
    """The results of a jaxpr: scans by what `ways` gives for them, kernels of loops in the interpreter."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*jaxpr.consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [a.val if isinstance(a, _compat.Literal) else known[a] for a in eqn.invars]
        if eqn.primitive is recurrence_p:
            results = eqn.params["of"].by_kernel(
                *values, run=lambda p, given: pallas_kernel.call(p, given, interpret=True)
            )
        elif eqn.primitive.name == "while":
            results = _until_it_ends(eqn, values)
        else:
            other = (ways or {}).get(id(eqn))
            results = _compat.bind(eqn, values) if other is None else other(*values)
        known.update(zip(eqn.outvars, results, strict=True))
    return [a.val if isinstance(a, _compat.Literal) else known[a] for a in jaxpr.outvars]


def _until_it_ends(eqn, values):
    """The results of a loop that goes on while its condition holds, with the kernels in its body in the interpreter."""
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first, known, state = values[:of_condition], values[of_condition:][:of_body], values[of_condition + of_body :]
    while jnp.any(run(condition, *first, *state)[0]):
        state = run(body, *known, *state)
    return state


def written(eqn, rule):
    """The jaxpr of what stands for a loop; there must be something."""
    assert rule is not None, "it has no kernel"
    return flatten(traced_as(eqn, rule, eqn.invars))


def with_kernels(jaxpr, loops, *args):
    """The results of a jaxpr with the kernels of its loops, and how many there are."""
    rule, ways, count = AsKernel(DEVICE), {}, 0
    for eqn in loops:
        found = rule(eqn)
        if found is not None:
            form = written(eqn, found)
            count += len(loops_as_kernels(form))
            ways[id(eqn)] = lambda *values, w=form: run(w, *values)
    return run(jaxpr, *args, ways=ways), count
