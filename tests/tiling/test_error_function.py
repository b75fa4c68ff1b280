"""The error function and its complement are as exact where they are written with polynomials as the library's."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.emission import pallas_kernel
from pallasfuse.emission.elementwise import TABLE, select
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import Expr, postorder, read
from pallasfuse.loop_calls import KernelOfLoop
from pallasfuse.proof.loops import prove_loop
from pallasfuse.recurrences import kernel_of
from pallasfuse.targets import default_for
from pallasfuse.tiling.error_function import complement, error_function

RULES = {"erf": (error_function, math.erf), "erfc": (complement, math.erfc)}


def in_float32(root: Expr, points: np.ndarray) -> np.ndarray:
    """Evaluates an expression with every operation rounded to float32."""
    values: dict[Expr, jax.Array] = {}
    for node in postorder(root):
        args = [values[a] for a in getattr(node, "args", ())]
        if args:
            values[node] = select(*args) if node.op == "select" else TABLE[node.op](*args)
        else:
            values[node] = jnp.broadcast_to(jnp.float32(getattr(node, "value", points)), points.shape)
    return np.asarray(values[root])


@pytest.mark.parametrize("op", RULES)
def test_every_digit_of_float64_is_kept(op):
    rule, exact = RULES[op]
    points = np.concatenate([np.linspace(-6, 26, 4001), [1e-300, -1e-12, 1.0, -1.0]])
    i = Axis("i", len(points))
    got = evaluate_expr(rule(read("x", (i,), "float64")), (i,), {"x": points})
    want = np.asarray([exact(p) for p in points])
    assert np.all(np.abs(got - want) <= np.abs(want) * 3e-15 * np.maximum(1, points**2 / 8))


@pytest.mark.parametrize("op", RULES)
def test_float32_is_as_exact_as_the_square_of_its_argument(op):
    rule, exact = RULES[op]
    points = np.concatenate([np.linspace(-4, 9, 8001), [1e-30, -1e-12, 1.0, -1.0]]).astype("float32")
    got = in_float32(rule(read("x", (), "float32")), points)
    want = np.asarray([exact(float(p)) for p in points])
    units = np.abs(got - want) / (np.abs(want) * 2.0**-24)
    assert np.all(units <= 8 * np.maximum(1, np.float64(points) ** 2))
    library = np.abs(np.asarray(getattr(jax.scipy.special, op)(points)) - want) / (np.abs(want) * 2.0**-24)
    assert units.max() <= 1.5 * max(8, library.max())


@pytest.mark.parametrize("op", RULES)
def test_signs_and_limits(op):
    rule, exact = RULES[op]
    points = np.asarray([-np.inf, -30.0, -0.0, 0.0, 13.0, 1e20, np.inf, np.nan], "float32")
    got = in_float32(rule(read("x", (), "float32")), points)
    want = np.asarray([np.float32(exact(float(p))) for p in points])
    np.testing.assert_array_equal(got, want)
    assert np.array_equal(np.signbit(got[:-1]), np.signbit(want[:-1]))


def test_a_type_without_a_polynomial_has_no_rule():
    for rule, _ in RULES.values():
        assert rule(read("x", (), "bfloat16")) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_of_triton_has_exact_gelu(dtype):
    """Its kernel is written without the operation, and has the digits of the plain function."""

    def gated(x, w):
        h = jax.nn.gelu(x * w, approximate=False)
        return h / jnp.sqrt(jnp.mean(jnp.square(h.astype("float32")), axis=-1, keepdims=True)).astype(h.dtype)

    drawn = np.random.default_rng(0).normal(size=(2, 64, 512))
    x, w = (jnp.asarray(d, dtype) for d in (drawn[0] * 3, drawn[1]))
    (kernel,) = pf.fuse(gated).explain(x, w, target="triton").kernels
    (phase,) = kernel.phases
    assert "erf" not in str(phase.program)
    names = [i.name for i in phase.program.inputs]
    (got,) = pallas_kernel.call(phase.program, dict(zip(names, (x, w), strict=True)), interpret=True).values()
    got, plain = np.asarray(got, "float64"), np.asarray(gated(x, w), "float64")
    exact = in_float64(np.asarray(x, "float64"), np.asarray(w, "float64"))
    assert np.abs(got - exact).max() <= 1.5 * np.abs(plain - exact).max()


def in_float64(x, w):
    """Computes what the kernel computes in float64."""
    h = x * w
    h = h * 0.5 * np.vectorize(math.erfc)(-h / math.sqrt(2))
    return h / np.sqrt(np.mean(h * h, axis=-1, keepdims=True))


def test_kernels_with_them_are_proved():
    """No field tells a polynomial from the function: a proof takes the function as it is, in groups and in loops."""

    def shares(x):
        return jax.nn.softmax(jax.nn.gelu(x, approximate=False), axis=-1)

    report = pf.verify(pf.fuse(shares), jnp.ones((8, 40)), target="triton")
    assert report.plan.kernels and report.equivalent, report

    def steps(x):
        return jax.lax.scan(lambda s, _: (jax.lax.erf(s) + 0.1, jnp.sum(s, -1)), x, None, length=8)

    (loop,) = (e for e in jax.make_jaxpr(steps)(jnp.ones((6, 5))).eqns if e.primitive.name == "scan")
    found = kernel_of(loop, default_for("cuda", frozenset({"9.0"})).device)
    assert isinstance(found, KernelOfLoop)
    proof = prove_loop(found)
    assert proof.holds, proof
