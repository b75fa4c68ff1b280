"""Kernels that nothing times, where they save less than one of XLA's launches."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import TRITON

TARGET = TRITON.on(device.find("NVIDIA H200", "gpu"))


def softmax(x):
    return jax.nn.softmax(x, -1)


def planned(function, *shape, target=TARGET, **options):
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
    return make_plan(jaxpr, target, FuseOptions(**{"price": True, **options}))


def test_a_kernel_instead_of_one_of_xla_s_is_left_to_xla():
    plan = planned(softmax, 256, 1024)
    assert not plan.kernels
    assert any("hardly be faster" in f.reason for f in plan.fallbacks)


def test_where_a_clock_decides_it_is_tried():
    assert planned(softmax, 256, 1024, target=TARGET.judged(timed=True)).kernels


def test_what_the_user_asks_for_is_not_doubted():
    (kernel,) = planned(lambda x: jnp.tanh(x).sum(-1), 64, 40, schedule="kernel { i:1@grid ( j:64 ( t1 ) ) }").kernels
    assert kernel.strategy == "scheduled"
    assert planned(softmax, 256, 1024, warps=4).kernels


@pytest.mark.parametrize("shape", [(4096, 32768), (512, 50257)])
def test_what_saves_more_is_kept(shape):
    (kernel,) = planned(softmax, *shape).kernels
    assert kernel.replaced.us > kernel.price.us + TARGET.device.kernel_us


def beside(size):
    """Rows that a kernel takes, and a product of this size, which is XLA's."""

    def function(x, w):
        return jax.nn.softmax(x, -1), jax.nn.logsumexp(x, -1), w @ w

    return function, jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((size, size), jnp.float32)


def test_kernels_that_save_too_little_of_a_program_are_left_to_xla():
    function, *arguments = beside(8192)
    for target in (TARGET, TARGET.judged(timed=True)):
        plan = make_plan(jax.make_jaxpr(function)(*arguments), target, FuseOptions(price=True))
        assert not plan.kernels
        assert any("all kernels of the program together" in f.reason for f in plan.fallbacks)


@pytest.mark.parametrize("options", [{"price": False}, {"tiles": (("i", 1),)}], ids=str)
def test_who_asks_for_kernels_has_them_however_little_they_save(options):
    function, *arguments = beside(8192)
    assert make_plan(jax.make_jaxpr(function)(*arguments), TARGET, FuseOptions(**{"price": True, **options})).kernels
    function, *arguments = beside(128)
    assert make_plan(jax.make_jaxpr(function)(*arguments), TARGET, FuseOptions(price=True)).kernels
