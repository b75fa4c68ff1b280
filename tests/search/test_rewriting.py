"""Cheaper forms of sums and products: found where they are known, the same in float64, refused where they are less exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.device import find
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.search.rewriting import rewritings

CPU, GPU = find("cpu", "cpu"), find("NVIDIA H200", "gpu")
N, M = 256, 8
LARGE = 512
"""A size at which a better form would be worth its kernels; where nothing is evaluated."""


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {
    "a chain from its other end": (lambda a, b, x: a @ b @ x, (f32(N, N), f32(N, N), f32(N)), [(N, N), (N, N)]),
    "a Gram matrix times a vector": (lambda a, x: a.T @ a @ x, (f32(N, N), f32(N)), [(N, N), (N, N)]),
    "weights with a low-rank update": (
        lambda x, w, a, b: x @ (w + a @ b), (f32(M, N), f32(N, N), f32(N, M), f32(M, N)), [(M, M, N), (M, N, M), (M, N, N)],
    ),
    "a mean of products": (lambda x, w: (x @ w).mean(0), (f32(N, N), f32(N, N)), [(N, N), (N, N)]),
    "a sum of all products": (lambda a, b: (a @ b).sum(), (f32(N, N), f32(N, N)), [(N,), (N, N), (N, N)]),
    "a trace of a product": (lambda a, b: jnp.trace(a @ b), (f32(N, N), f32(N, N)), [(N, N)]),
    "two products of the same rows": (lambda x, a, b: x @ a - x @ b, (f32(N, N), f32(N, N), f32(N, N)), [(N, N, N)]),
    "a diagonal matrix": (lambda s, a: jnp.diag(s) @ a, (f32(N), f32(N, N)), []),
    "an identity less a low-rank product": (
        lambda k, h, p: (jnp.eye(N) - k @ h) @ p, (f32(N, M), f32(M, N), f32(N, N)), [(M, N, N), (M, N, N)],
    ),
    "a reflection": (lambda v, a: a - 2 * jnp.outer(v, v) @ a / (v @ v), (f32(N), f32(N, N)), [(N, N)]),
    "scores that are linear": (
        lambda q, k, v: jnp.einsum("hij,hjd->hid", jnp.einsum("hid,hjd->hij", q, k) / 8, v),
        (f32(2, N, M), f32(2, N, M), f32(2, N, M)), [(2, M, M, N), (2, M, M, N)],
    ),
    "keys that are projected for one query": (
        lambda q, c, w: jnp.einsum("hd,jhd->hj", q, jnp.einsum("jc,chd->jhd", c, w)),
        (f32(4, 32), f32(N, 64), f32(64, 4, 32)), [(4, 32, 64), (4, 64, N)],
    ),
    "an outer product": (lambda u, v, a: (u[:, None] * v[None]) @ a, (f32(N), f32(N), f32(N, N)), [(N, N)]),
    "means of all pairs": (lambda x, y: (x[:, None] * y[None]).sum(-1).mean(1), (f32(N, M), f32(N, M)), [(M, N), (M, N)]),
}  # fmt: skip
"""Functions, their arguments, and the loops of the sums in the best form, without their order."""


def program_of(function, avals) -> LoopProgram:
    return pf.fuse(function).trace(*avals).converted.program


def with_nests(program: LoopProgram, nests) -> LoopProgram:
    """The program with one of its tensors computed by other nests."""
    at = [n.name for n in program.nests].index(nests[-1].name)
    return LoopProgram(program.inputs, (*program.nests[:at], *nests, *program.nests[at + 1 :]), program.outputs)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_form_is_found_and_computes_the_same(name):
    function, avals, sums = PROGRAMS[name]
    program = program_of(function, avals)
    (found,) = rewritings(program, CPU)
    loops = [sorted(a.extent for a in (*n.axes, *n.reduced)) for n in found.nests if n.reduced]
    assert sorted(loops) == sorted(map(sorted, sums)), str(found)
    assert found.after.us < found.before.us
    draw = np.random.default_rng(0)
    inputs = {t.name: draw.normal(size=[a.extent for a in t.axes]) for t in program.inputs}
    before, after = (evaluate(p, inputs) for p in (program, with_nests(program, found.nests)))
    for output in program.outputs:
        np.testing.assert_allclose(after[output], before[output], rtol=1e-9, atol=1e-9)


KEPT = {
    "an exact difference": lambda x, y, w: (x - y) @ w,
    "values less their mean": lambda x, y, w: (x - x.mean(-1, keepdims=True)) @ w,
    "one product": lambda x, y, w: x @ w + y,
    "a product of a function of a product": lambda x, y, w: jnp.tanh(x @ w) @ w,
    "projections of queries and keys": lambda x, y, w: (x @ w) @ (y @ w).T,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_has_no_better_form_stays(name):
    avals = (f32(M, LARGE), f32(M, LARGE), f32(LARGE, LARGE))
    assert rewritings(program_of(KEPT[name], avals), CPU) == []


def test_a_small_exact_difference_is_not_computed_as_two_products():
    """Of x and y that differ in their last digits, products with each would lose the difference."""
    vector, matrix = f32(LARGE), f32(LARGE, LARGE)
    found = rewritings(program_of(lambda x, y, a, b: a @ (b @ (x - y)[:, None]), (vector, vector, matrix, matrix)), CPU)
    assert all("x" not in n.reads or "y" in n.reads for r in found for n in r.nests)


def test_types_of_a_small_range_stay():
    half = [jax.ShapeDtypeStruct(s, jnp.float16) for s in ((LARGE, LARGE), (LARGE,))]
    assert rewritings(program_of(lambda a, x: a.T @ a @ x, half), CPU) == []


def test_what_is_stored_anyway_costs_nothing():
    """The product of both matrices is a result, so that to multiply it by the vector is all that is left."""
    program = program_of(lambda a, b, x: (a @ b, a @ b @ x), (f32(LARGE, LARGE), f32(LARGE, LARGE), f32(LARGE)))
    assert rewritings(program, CPU) == []


def test_equal_parts_are_searched_once(monkeypatch):
    from pallasfuse.search import rewriting

    calls = []
    search = rewriting.search
    monkeypatch.setattr(rewriting, "search", lambda *args: calls.append(1) or search(*args))

    def layers(a, b, x):
        for n in range(4):
            x = jnp.tanh(a[n] @ b[n] @ x)
        return x

    found = rewritings(program_of(layers, (f32(4, N, M), f32(4, M, N), f32(N))), CPU)
    assert len(calls) < 4 and len({r.name for r in found}) == len(found) == 4


def test_rewritings_differ_by_device():
    """On a GPU a product of this size takes less than to start another kernel."""
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, 256), (256, 256), (256, M), (M, 256))]
    program = program_of(lambda x, w, a, b: x @ (w + a @ b), avals)
    assert rewritings(program, GPU) == []


def test_a_rewriting_says_what_it_computes():
    function, avals, _ = PROGRAMS["weights with a low-rank update"]
    (found,) = rewritings(program_of(function, avals), CPU)
    text = "\n".join(found.lines())
    assert "as written" in text and "computed as" in text and "distribute" in text
    assert "us predicted" in str(found)
