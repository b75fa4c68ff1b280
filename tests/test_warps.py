"""A block of a kernel that Triton compiles has the warps that the price likes best, unless somebody asks for others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse import warps
from pallasfuse.pallas_backend import kernel_resources
from pallasfuse.phases import us_of
from pallasfuse.warps import with_warps_by_price

f32 = jnp.float32
X, W = jax.ShapeDtypeStruct((256, 200, 512), f32), jax.ShapeDtypeStruct((512,), f32)


def normalised(x, w):
    """A batch norm with what its gradient needs: a block stores five results of each element that it reads."""
    y = x + w
    d = y - jnp.mean(y, axis=(0, 1))
    s = jnp.sqrt(jnp.mean(d * d, axis=(0, 1)) + 1e-3)
    return d / s, d, jnp.maximum(d / s * w, 0), s, d / s * w > 0


def phases_of(function, *arguments, **asked):
    options = pf.FuseOptions(target="triton", check=False, price=False, **asked)
    (kernel,) = pf.fuse(function, options=options).explain(*arguments).kernels
    return kernel.phases


def with_warps(phase, number):
    return replace(phase, program=replace(phase.program, warps=number))


def registers(phase):
    return kernel_resources.resources((phase.program,), phase.target).registers


def spilled_bytes(phase):
    return kernel_resources.resources((phase.program,), phase.target).spilled_bytes


def test_a_phase_that_spills_gets_more_warps():
    _, last = phases_of(normalised, X, W)
    few = with_warps(last, 4)
    assert spilled_bytes(few) > 2048
    (chosen,) = with_warps_by_price([few])
    assert chosen.program.warps > 4
    assert spilled_bytes(chosen) <= 2048


def test_each_phase_has_its_own():
    own = phases_of(normalised, X, W)
    assert len(own) == 2
    assert own == with_warps_by_price(own)
    assert len({p.program.warps for p in own}) == 2


def test_what_is_asked_for_stays():
    assert {p.program.warps for p in phases_of(normalised, X, W, warps=16)} == {16}


def test_the_plan_says_the_warps_of_its_first_phase():
    options = pf.FuseOptions(target="triton", check=False, price=False)
    (kernel,) = pf.fuse(jax.nn.softmax, options=options).explain(kernels.array(4096, 300)).kernels
    assert kernel.schedule.warps == kernel.program.warps


@pytest.mark.parametrize("rows", [16, 4096, 100_000])
@pytest.mark.parametrize("columns", [24, 512, 5000])
def test_no_other_number_is_clearly_cheaper(rows, columns):
    for phase in phases_of(jax.nn.softmax, kernels.array(rows, columns)):
        others = [with_warps(phase, n) for n in (1, 2, 4, 8, 16)]
        fit = [us_of((o,)) for o in others if registers(o) <= 224]
        assert us_of((phase,)) <= min(fit) / 0.95


def test_a_trifle_changes_nothing(monkeypatch):
    """Prices that differ by less than they err leave the schedule's own number."""
    (phase,) = phases_of(jax.nn.softmax, kernels.array(4096, 512))
    own = phase.program.warps
    monkeypatch.setattr(warps, "us_of", lambda of: 1.0 if of[0].program.warps == own else 0.96)
    assert with_warps_by_price([phase]) == (phase,)
    monkeypatch.setattr(warps, "us_of", lambda of: 1.0 if of[0].program.warps == own else 0.94)
    assert with_warps_by_price([phase]) != (phase,)


def test_blocks_with_products_stay_as_they_are():
    shape = kernels.array(2048, 8, 64, dtype="bfloat16")
    for phase in phases_of(kernels.attention, shape, shape, shape):
        for number in (4, 8):
            assert with_warps_by_price([with_warps(phase, number)]) == (with_warps(phase, number),)


def test_products_that_are_written_out_have_the_warps_that_are_cheapest():
    """Those of a few coordinates; those on matrix units keep what the schedule says."""

    def nearest(x, y):
        return jnp.min(-jnp.einsum("ik,jk->ij", x, y, precision="highest"), -1)

    def points(sums):
        return (jax.ShapeDtypeStruct((2000, sums), f32),) * 2

    (written_out,) = phases_of(nearest, *points(3), tiles=(("i", 64), ("j", 128)), parts=1)
    few = with_warps(written_out, 2)
    (chosen,) = with_warps_by_price([few])
    assert chosen.program.warps > 2 and us_of((chosen,)) < us_of((few,))
    (units,) = phases_of(nearest, *points(64), tiles=(("i", 64), ("j", 64)), parts=1)
    few = with_warps(units, 2)
    assert with_warps_by_price([few]) == (few,)
