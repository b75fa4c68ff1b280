"""Kernels that nothing times, where they save less than one of XLA's launches."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import TRITON

TARGET = TRITON.on(device.find("NVIDIA H200", "gpu"))


def short(x):
    return jnp.tanh(x).sum(-1)


def softmax(x):
    return jax.nn.softmax(x, -1)


def planned(function, *shape, target=TARGET, **options):
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
    return make_plan(jaxpr, target, FuseOptions(**{"price": True, **options}))


def test_a_kernel_instead_of_one_of_xla_s_is_left_to_xla():
    plan = planned(short, 64, 40)
    assert not plan.kernels
    (left,) = [f for f in plan.fallbacks if f.operation == "reduce_sum"]
    assert "one kernel would" in left.reason


def test_where_a_clock_decides_it_is_tried():
    assert planned(short, 64, 40, target=TARGET.judged(timed=True)).kernels


@pytest.mark.parametrize("shape", [(4096, 32768), (512, 50257)])
def test_what_saves_more_is_kept(shape):
    (kernel,) = planned(softmax, *shape).kernels
    assert kernel.replaced.us > kernel.price.us + TARGET.device.kernel_us
