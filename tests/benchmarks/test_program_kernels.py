"""The kernels of a plan are measured one by one, loops that are one kernel among them."""

import jax
import jax.numpy as jnp

import pallasfuse as pf
from benchmarks.program_kernels import kernel_cases


@pf.fuse(target="mosaic_gpu", options=pf.FuseOptions(check=False, price=True))
def filtered(a, h, x, y):
    """Two equal loops, each of which is one kernel."""

    def trip(h, row):
        h = jnp.tanh(a * h + row)
        return h, h

    return jax.lax.scan(trip, h, x)[1], jax.lax.scan(trip, h, y)[1]


def test_a_loop_that_is_one_kernel_is_a_case_with_both_predictions():
    rows = jax.ShapeDtypeStruct((1024, 8, 256), jnp.float32)
    state = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    plan = filtered.explain(state, state, rows, rows)
    assert len(plan.loops) == 2
    (case,) = kernel_cases(plan, from_arguments=True, known=(), entry=False)
    assert case.row["count"] == 2 and case.row["trips"] == 1024
    assert 0 < case.row["predicted_us"] < case.row["predicted_xla_us"]
    assert len(case.inputs) == 3 and case.inputs[0] == 0
    assert kernel_cases(plan, from_arguments=True, known=[case], entry=False) == []
