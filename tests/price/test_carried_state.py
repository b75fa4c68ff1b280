"""Loops whose trips wait for one another, and the price of what these compute."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.ir.statements import Loop, every
from pallasfuse.price import gpu
from pallasfuse.price.carried_state import is_reduced
from pallasfuse.targets import TRITON


def attention(q, k, v):
    return jnp.einsum("hts,hsd->htd", jax.nn.softmax(jnp.einsum("htd,hsd->hts", q, k), -1), v)


def filtered(x):
    """Each row's running sum of squares, by a loop that only adds."""
    return lax.scan(lambda s, row: (0.9 * s + row, 0.9 * s + row), jnp.zeros(x.shape[1:]), x)[1]


def forward(x, transitions):
    """Probabilities of hidden states, each of which is a sum over all those before it."""

    def step(state, seen):
        state = seen * jnp.sum(state[:, None] * transitions, axis=0)
        return state / jnp.sum(state), jnp.log(jnp.sum(state))

    return lax.scan(step, jnp.full(x.shape[1:], 1 / x.shape[1]), x)[1]


def kernels_of(function, *shapes, price=True):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    plan = pf.fuse(function, options=pf.FuseOptions(target="triton", price=price)).explain(*arguments)
    return [p.program for k in plan.kernels for p in k.phases] + [x.kernel for x in plan.loops]


@pytest.mark.parametrize(("function", "shapes", "waits"), [
    (attention, [(2, 1024, 64)] * 3, False), (filtered, [(512, 4096)], False), (forward, [(512, 64), (64, 64)], True),
])  # fmt: skip
def test_a_state_is_reduced_on_its_way_to_the_next_trip(function, shapes, waits):
    programs = [
        p
        for p in kernels_of(function, *shapes, price=function is not attention)
        if any(isinstance(s, Loop) for s in every(p.body))
    ]
    assert programs
    assert any(is_reduced(p.body) for p in programs) == waits


def test_what_such_a_trip_computes_adds_up(monkeypatch):
    (program,) = kernels_of(forward, (512, 64), (64, 64))
    in_turn = gpu.price([program], TRITON.device, gpu.Emission())
    monkeypatch.setattr(gpu, "_FEW_BLOCKS", 0)
    beside = gpu.price([program], TRITON.device, gpu.Emission())
    assert in_turn.us > beside.us
    names = ("vector units", "special functions", "waiting for loads")
    assert in_turn.us >= sum(t.us for t in in_turn.terms if t.name in names)
