"""Bodies of loops and branches that a form of a program leaves to XLA, and what these have lost in it."""

import jax
import jax.numpy as jnp

from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.loop_calls import loops_as_kernels
from pallasfuse.lost_in_bodies import bodies_left, lost_in_bodies
from pallasfuse.targets import default_for
from pallasfuse.written_out import surely_faster
from tests.test_while_chunks import largest

H100 = default_for("cuda", frozenset({"9.0"})).judged(timed=False, one_device=True)


def test_a_loop_is_known_by_its_line_only_where_all_of_that_line_are_kernels():
    def repeated(step, x):
        return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=50)[0]

    def function(x, w):
        return repeated(jnp.tanh, x), repeated(lambda y: jnp.tanh(y @ w), x)

    def alone(x, w):
        return repeated(jnp.tanh, x)

    x, w = jax.ShapeDtypeStruct((64, 2048), jnp.float32), jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    for of, left in ((function, 2), (alone, 0)):
        jaxpr = jax.make_jaxpr(of)(x, w)
        form = surely_faster(jaxpr, H100)
        assert len(loops_as_kernels(form)) == 1
        assert len(list(bodies_left(flatten(jaxpr), form))) == left


def test_a_loop_that_goes_on_in_chunks_has_lost_nothing():
    jaxpr = flatten(jax.make_jaxpr(largest)(jax.ShapeDtypeStruct((64, 64), jnp.float32)))
    form = surely_faster(jaxpr, H100)
    assert loops_as_kernels(form)
    assert not lost_in_bodies(jaxpr, flatten(form))
    without = jax.make_jaxpr(lambda m: jax.lax.while_loop(lambda v: v[0] < 1, jnp.sin, m[0]))(*jaxpr.in_avals)
    assert lost_in_bodies(jaxpr, flatten(without))
