"""Ten spellings of a program have snapshots with the same loops, loads and stores; what is computed there is as it is spelled."""
# ruff: noqa: PLC3002

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.jaxpr_frontend.conversion import convert
from pallasfuse.schedule.snapshots import snapshots_of_program

E, LAX = jnp.einsum, jax.lax


def total(x):
    return x.sum(-1, keepdims=True)


def mean(x):
    return x.mean(-1, keepdims=True)


def powers(s):
    return jnp.exp(s - s.max(-1, keepdims=True))


def soft(s):
    return jax.nn.softmax(s, -1)


WEIGHTED = (
    lambda q, k, v: soft(q @ k.T / 8) @ v,
    lambda q, k, v: E("in,nd->id", soft(E("id,nd->in", q, k) / 8), v),
    lambda q, k, v: E("nd,in->id", v, soft(E("nd,id->in", k, q) * 0.125)),
    lambda q, k, v: (lambda e: (e / total(e)) @ v)(powers(q @ k.T * 0.125)),
    lambda q, k, v: (lambda e: (e * (1 / total(e))) @ v)(powers(q @ k.T / 8)),
    lambda q, k, v: (lambda e: (e @ v) / total(e))(powers(q @ k.T / 8)),
    lambda q, k, v: (lambda e: (e @ v) * (1 / total(e)))(powers(q @ k.T / 8)),
    lambda q, k, v: soft((q * 0.125) @ k.T) @ v,
    lambda q, k, v: soft(q @ (k / 8).T) @ v,
    lambda q, k, v: (v.T @ jax.nn.softmax(k @ q.T / 8, 0)).T,
)
CENTRED = (
    lambda x, w: ((x - mean(x)) * LAX.rsqrt(x.var(-1, keepdims=True) + 1e-5)) @ w,
    lambda x, w: ((x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)) @ w,
    lambda x, w: (lambda c: (c * LAX.rsqrt(mean(c * c) + 1e-5)) @ w)(x - mean(x)),
    lambda x, w: (lambda c: (c / jnp.sqrt(mean(jnp.square(c)) + 1e-5)) @ w)(x - mean(x)),
    lambda x, w: (lambda c: (c / jnp.sqrt(total(c**2) / x.shape[-1] + 1e-5)) @ w)(x - total(x) / x.shape[-1]),
    lambda x, w: (lambda c: (c * (1 / jnp.sqrt(mean(c * c) + 1e-5))) @ w)(x - mean(x)),
    lambda x, w: E("ik,kn->in", (x - mean(x)) * LAX.rsqrt(x.var(-1, keepdims=True) + 1e-5), w),
    lambda x, w: E("kn,ik->in", w, (x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)),
    lambda x, w: ((x - mean(x)) @ w) * LAX.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    lambda x, w: (w.T @ ((x - mean(x)) * LAX.rsqrt(x.var(-1, keepdims=True) + 1e-5)).T).T,
)


def scale(x):
    return LAX.rsqrt(mean(x * x) + 1e-6)


def gate(y, w, v, u):
    return (jax.nn.silu(y @ w) * (y @ v)) @ u


GATED = (
    lambda x, w, v, u: gate(x * scale(x), w, v, u),
    lambda x, w, v, u: gate(x / jnp.sqrt(mean(x * x) + 1e-6), w, v, u),
    lambda x, w, v, u: gate(x * LAX.rsqrt(mean(jnp.square(x)) + 1e-6), w, v, u),
    lambda x, w, v, u: gate(x * (1 / jnp.sqrt(mean(x**2) + 1e-6)), w, v, u),
    lambda x, w, v, u: (lambda y: (lambda g: (g * jax.nn.sigmoid(g) * (y @ v)) @ u)(y @ w))(x * scale(x)),
    lambda x, w, v, u: (lambda y: (lambda g: (g / (1 + jnp.exp(-g)) * (y @ v)) @ u)(y @ w))(x * scale(x)),
    lambda x, w, v, u: (lambda y: ((y @ v) * jax.nn.silu(y @ w)) @ u)(x * scale(x)),
    lambda x, w, v, u: gate(x * LAX.rsqrt(total(x * x) / x.shape[-1] + 1e-6), w, v, u),
    lambda x, w, v, u: (lambda s: (jax.nn.silu((x @ w) * s) * ((x @ v) * s)) @ u)(scale(x)),
    lambda x, w, v, u: (lambda y: (u.T @ (jax.nn.silu(w.T @ y.T) * (v.T @ y.T))).T)(x * scale(x)),
)
PROGRAMS = {
    "weighted": (WEIGHTED, ((64, 16), (48, 16), (48, 32))),
    "centred": (CENTRED, ((32, 64), (64, 48))),
    "gated": (GATED, ((16, 32), (32, 64), (32, 64), (64, 48))),
}


def form(function, shapes):
    """The loops of the last snapshot, and what is loaded and stored in each: no names of results, and no order of loads."""
    program = convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))).program
    found = snapshots_of_program(program)
    (result,) = program.outputs
    loops, moved = [], []
    around = []
    for line in found.last.lines:
        depth = (len(line) - len(line.lstrip())) // 2
        around = around[:depth]
        text = line.strip()
        if text.startswith("for"):
            around.append(text)
            loops.append(tuple(around))
        elif text.startswith(("load", "store")):
            moved.append((tuple(around), text.replace(f"store {result}[", "store result[")))
    return len(found.found), len(found.last.kernels), loops, sorted(moved)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_ten_spellings_have_the_same_loops_loads_and_stores(name):
    functions, shapes = PROGRAMS[name]
    assert len(functions) == 10
    first, *others = (form(f, shapes) for f in functions)
    assert [n for n, other in enumerate(others, 1) if other != first] == []


def test_forms_tell_programs_apart():
    x, w = (16, 32), (32, 64)
    one = form(lambda x, w: jax.nn.relu(x @ w), (x, w))
    assert one != form(lambda x, w: (lambda y: y / total(y))(x @ w), (x, w))
