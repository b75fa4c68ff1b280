"""bfloat16 arithmetic inside a kernel: what is computed in float32, and which roundings stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.fusion import widening
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, apply, const, index, mul, postorder, read, select
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.tile_program import every, expressions

OPTIONS = pf.FuseOptions(check=False, price=False)
ROWS, COLUMNS, SUMMED = Axis("i", 8), Axis("j", 32), Axis("k", 16)
B, F = "bfloat16", "float32"


def roundings(plan: pf.Plan, *, elements: bool = False) -> int:
    """The conversions to bfloat16 in all kernels. elements: only those of tiles along the rolled axis."""
    return sum(
        node.dtype == B and getattr(node, "op", "") == "convert"
        for kernel in plan.kernels
        for s in every(kernel.program.body)
        for root in expressions(s)
        for node in postorder(root)
        if not elements or kernel.schedule.rolled in node.axes
    )


def weights_in_bfloat16(q, k, v):
    scores = jnp.einsum("qd,kd->qk", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype)
    exponentials = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (exponentials / exponentials.sum(-1, keepdims=True)) @ v


def arrays(*shapes, dtype=jnp.bfloat16):
    return [jax.random.normal(jax.random.key(n), s, dtype) for n, s in enumerate(shapes)]


def exact(function, *args):
    with jax.enable_x64(True):
        return np.asarray(function(*(jnp.asarray(np.asarray(a, np.float64)) for a in args)))


def error(got, want):
    return float(np.abs(np.asarray(got, np.float64) - want).max())


def test_values_are_rounded_only_where_they_leave_or_are_multiplied():
    q, k, v = arrays((64, 16), (128, 16), (128, 16))
    fused = pf.fuse(weights_in_bfloat16, options=OPTIONS)
    plan = fused.trace(q, k, v).fuse().tile().plan
    assert roundings(plan, elements=True) == 1  # of the weights, where they meet the values
    assert widening.CONDITION in plan.conditions
    want = exact(weights_in_bfloat16, q, k, v)
    plain = jax.jit(weights_in_bfloat16)(q, k, v)
    assert error(fused(q, k, v), want) <= 1.1 * error(plain, want)


def test_strict_kernels_and_users_who_say_so_keep_every_rounding(monkeypatch):
    args = arrays((64, 16), (128, 16), (128, 16))

    def planned(**options):
        fuse = pf.FuseOptions(check=False, price=False, **options)
        return pf.fuse(weights_in_bfloat16, options=fuse).trace(*args).fuse().tile().plan

    fewest = roundings(planned())
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=false")
    kept = planned()
    assert roundings(kept) > fewest
    assert widening.CONDITION not in kept.conditions
    monkeypatch.delenv("XLA_FLAGS")
    assert widening.CONDITION not in planned(strict=True).conditions


def test_what_is_compared_is_rounded_on_both_sides():
    """The largest element of a row equals the maximum of the row, however it is computed."""

    def marked(x, y):
        p = jax.nn.softmax(x * y, -1)
        largest = p.max(-1, keepdims=True)
        return (p == largest).sum(-1), jnp.where(p < largest, p, jnp.bfloat16(0)).max(-1)

    args = arrays((8, 512), (8, 512))
    plan = pf.fuse(marked, options=OPTIONS).trace(*args).fuse().tile().plan
    assert plan.kernels and widening.CONDITION not in plan.conditions
    for target in ("xla", "interpret"):
        got = pf.fuse(marked, options=pf.FuseOptions(check=False, price=False, target=target))(*args)
        for a, b in zip(got, jax.jit(marked)(*args), strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_is_compared_elsewhere_is_rounded():
    """A maximum that a kernel hands out is compared with values that are computed outside it."""

    def marked(x, y, w):
        z = jnp.exp(x * y + x)
        largest = z.max(-1, keepdims=True)
        return ((z / largest) * w).sum(-1), z[:, :7] >= largest

    args = arrays((64, 512), (64, 512), (64, 512))
    plan = pf.fuse(marked, options=OPTIONS).trace(*args).fuse().tile().plan
    assert widening.CONDITION not in plan.conditions


def test_roundings_that_decide_what_is_finite_are_exceptions():
    def spread(x):
        return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) - jnp.mean(x, -1, keepdims=True) ** 2)).sum(-1)

    x = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16)
    plan = pf.fuse(spread, options=OPTIONS).trace(x).fuse().tile().plan
    assert widening.CONDITION in plan.conditions and widening.EXCEPTION in plan.exceptions
    plan = (
        pf.fuse(weights_in_bfloat16, options=OPTIONS).trace(*arrays((64, 16), (128, 16), (128, 16))).fuse().tile().plan
    )
    assert widening.CONDITION in plan.conditions and widening.EXCEPTION not in plan.exceptions


def test_the_last_flag_counts(monkeypatch):
    flag = "--xla_allow_excess_precision"
    for flags, allowed in (("", True), (f"{flag}=false", False), (f"{flag}=false {flag}=true", True), (flag, True)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert widening.is_allowed() == allowed


def test_a_rounding_that_the_program_asks_for_stays():
    """The lower half of a number that is split in two is not zero."""

    def lower(x):
        high = x.astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.abs(x - high).sum(-1), (high * high).sum(-1)

    (x,) = arrays((64, 512), dtype=jnp.float32)
    got = pf.fuse(lower, options=OPTIONS)(x)
    for a, b in zip(got, lower(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def nest(name, axes, body, dtype=B, over=(), reducer=None):
    return Nest(name, axes, body, dtype, over, reducer)


def test_rewrite_of_nests():
    x, s = read("x", (ROWS, COLUMNS), B), read("s", (ROWS, COLUMNS), B)
    product = nest(
        "s",
        (ROWS, COLUMNS),
        mul(read("q", (ROWS, SUMMED), B), read("k", (COLUMNS, SUMMED), B)),
        over=(SUMMED,),
        reducer=SUM,
    )
    largest = nest("m", (ROWS,), mul(s, const(0.5, B)), over=(COLUMNS,), reducer=MAX)
    stored = nest("out", (ROWS,), add(read("m", (ROWS,), B), const(1.0, B)))
    got = widening.widened([product, largest, stored], ["out"], ())
    assert got[0] == Nest("s", (ROWS, COLUMNS), product.body, F, (SUMMED,), SUM)
    assert got[1].dtype == F
    assert str(got[1].body) == "s[i, j] * 0.5"
    assert str(got[2].body) == "bfloat16(m[i] + 1)"
    assert got[2].dtype == B
    kept = widening.widened([product, largest, stored], ["out", "m"], ())
    assert kept[1].dtype == B
    assert str(kept[2].body) == "bfloat16(float32(m[i]) + 1)"
    nests = (product, largest, stored)
    assert widening.widened(nests, ["out"], {"m"}) == nests  # something outside compares it
    clipped = nest("c", (ROWS,), select(apply("ge", mul(x, x), s), x, const(0, B)), over=(COLUMNS,), reducer=SUM)
    assert widening.widened((product, clipped), [], ()) == (product, clipped)
    masked = nest("c", (ROWS,), select(apply("ge", x, const(0, B)), mul(x, s), x), over=(COLUMNS,), reducer=SUM)
    got = widening.widened((product, masked), [], ())  # what is read has one value for all
    assert str(got[1].body) == "select(x[i, j] >= 0, float32(x[i, j]) * s[i, j], float32(x[i, j]))"


@pytest.mark.parametrize("op", ["floor", "sign", "round_even"])
def test_arguments_of_functions_that_jump_are_rounded(op):
    x = read("x", (ROWS, COLUMNS), B)
    body = apply(op, mul(x, x))
    nests = (nest("r", (ROWS,), body, over=(COLUMNS,), reducer=SUM),)
    assert widening.widened(nests, [], ()) == nests


def test_float16_and_indices_stay():
    x = read("x", (ROWS, COLUMNS), "float16")
    nests = (
        nest("r", (ROWS,), mul(x, x), "float16", (COLUMNS,), SUM),
        nest("n", (ROWS,), index(COLUMNS), "int32", (COLUMNS,), MAX),
    )
    assert widening.widened(nests, [], ()) == nests
