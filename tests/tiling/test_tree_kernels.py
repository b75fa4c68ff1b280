"""Ten kernels written down as trees of plain functions: right on every machine that runs them."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import h100
from pallasfuse.errors import Refusal
from pallasfuse.phases import _PROBLEMS
from pallasfuse.triton_gpu import kernel as triton_gpu
from tests.tiling.tree_programs import MACHINES, TILES, Subject, in_float64, on_machine


def weighted(s, v, pattern):
    m = jnp.max(s, -1)
    w = jnp.exp(s - m[..., None])
    total = w.sum(-1)
    return jnp.einsum(pattern, w, v) / total[..., None]


def causal(q, k, v):
    i, j = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    s = jnp.where(i[:, None] >= j, jnp.einsum("hid,hjd->hij", q, k) / 4, -jnp.inf)
    return weighted(s, v, "hij,hjd->hid")


def decode(q, k, v):
    return weighted(jnp.einsum("bgrd,bgjd->bgrj", q, k) / 4, v, "bgrj,bgjd->bgrd")


def norm_linear(x, g, w):
    return (x * g) @ w * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 0.125)


def chain(a, b, f):
    return (a @ b) @ f


def gated(x, g, w, v, u):
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 0.125)
    return (jax.nn.silu((x * g) @ w * scale) * ((x * g) @ v * scale)) @ u


def adapted(x, w, a, b):
    return x @ w + (x @ a) @ b


def with_sinks(q, k, v, sink):
    s = jnp.einsum("hid,hjd->hij", q, k) / 4
    m = jnp.maximum(jnp.max(s, -1), sink[:, None])
    w = jnp.exp(s - m[..., None])
    total = w.sum(-1) + jnp.exp(sink[:, None] - m)
    return jnp.einsum("hij,hjd->hid", w, v) / total[..., None]


def linear_cross_entropy(x, w, y):
    s = x @ w.T / 4
    m = s.max(-1)
    total = jnp.exp(s - m[:, None]).sum(-1)
    return jnp.log(total) + m - jnp.sum(jnp.where(jnp.arange(w.shape[0]) == jnp.floor(4 * abs(y))[:, None], s, 0), -1)


def paged(q, k, v):
    s = jnp.einsum("bgrd,bpcgd->bgrpc", q, k) / 4
    m = s.max((-2, -1))
    w = jnp.exp(s - m[..., None, None])
    total = w.sum((-2, -1))
    return jnp.einsum("bgrpc,bpcgd->bgrd", w, v) / total[..., None]


SUBJECTS = {
    "a": Subject(causal, ((2, 150, 24), (2, 150, 24), (2, 150, 40)), "s m l o out", "h i e j d"),
    "b": Subject(decode, ((2, 2, 3, 16), (2, 2, 2300, 16), (2, 2, 2300, 120)), "s m l o out", "b g r e j d"),
    "c": Subject(norm_linear, ((150, 100), (100,), (100, 300)), "y q z", "m k n"),
    "d": Subject(chain, ((100, 72), (72, 300), (300, 150)), "C E", "m k n h"),
    "D": Subject(chain, ((100, 72), (72, 300), (300, 40)), "C E", "m k n h"),
    "e": Subject(gated, ((5, 300), (300,), (300, 150), (300, 150), (150, 100)), "q a c o", "m k f n"),
    "E": Subject(gated, ((5, 300), (300,), (300, 150), (300, 150), (150, 100)), "q a c u o", "m k f n", kept="t16"),
    "f": Subject(adapted, ((5, 300), (300, 100), (300, 6), (6, 100)), "y t u z", "m k n r"),
    "g": Subject(lambda x: jax.nn.softmax(x, -1), ((2, 40_000),), "m l y"),
    "h": Subject(with_sinks, ((2, 150, 24), (2, 150, 24), (2, 150, 40), (2,)), "s m l o out", "h i e j d"),
    "i": Subject(linear_cross_entropy, ((100, 72), (1100, 72), (100,)), "s m l t loss", "i d j"),
    "j": Subject(paged, ((2, 2, 3, 16), (2, 70, 4, 2, 16), (2, 70, 4, 2, 24)), "s m l o out", "b g r e p c d"),
}

KERNELS = {
    "a causal attention": "attn { h:1@grid i:128@grid i:64@group ( j:128~2 ( s m l o ) out ) } [persistent ping_pong]",
    "b split-k decoding": "part { b:1@grid g:1@grid j/8@grid j:64~4 ( s m l o ) } join { b:1@grid g:1@grid ( +m +l +o out ) }",
    "b in a cluster": "one { b:1@grid g:1@grid ( j/8@cluster j:64~4 ( s m l o ) +m +l d:16@cluster ( +o out ) ) }",
    "b streamed": "step { j:2048@time b:1@grid g:1@grid j:64~4 ( s m l o ) } join { b:1@grid g:1@grid ( +m +l +o ) }"
                  " end { b:1@grid g:1@grid ( out ) }",
    "b over a mesh": "part { j:2048@mesh b:1@grid g:1@grid j/4@grid j:64~4 ( s m l o ) } here { b:1@grid g:1@grid ( +m +l +o ) }"
                     " all { b:2@mesh b:1@grid g:1@grid ( +m +l +o out ) }",
    "c norm + linear": "lin { m:1024@grid n:256@grid m:128@grid m:64@group ( k:64~3 ( q y ) z ) } [persistent]",
    "d chain, deep": "deep { m:64@grid h:128@grid m:64@group n:128~2 ( k:64 ( C ) E ) }",
    "d chain, flat": "flat { m:64@grid m:64@group n:128 ( k:64~2 ( C ) h:64~2 ( E ) ) }",
    "D chain, cluster": "fast { m:64@grid ( n:128@cluster m:64@group ( k:64~2 ( C ) h:64~2 ( E ) ) h:16@cluster ( +E ) ) }",
    "e gated, few rows": "up { f:64@grid f:64@group ( k:128~4 ( q a c ) ) } "
                         "down { n:64@grid ( f/2@cluster f:128~4 ( o ) n:32@cluster ( +o ) ) }",
    "E gated, few rows, the gate stored": "up { f:64@grid f:64@group ( k:128~4 ( q a c ) u ) } "
                                          "down { n:64@grid ( f/2@cluster f:128~4 ( o ) n:32@cluster ( +o ) ) }",
    "f low rank": "lora { n:64@grid ( k/2@cluster k:128~4 ( y t ) +t n:32@cluster ( +y u z ) ) }",
    "g long rows": "rows { i:1@grid ( x!shared j:32768@cluster j:8192 ( m ) +m j:32768@cluster j:8192 ( l ) +l"
                   " j:32768@cluster j:8192 ( y ) ) }",
    "h sinks, two loops": "two { h:1@grid i:128@grid i:64@group ( j:128~2 ( s m l ) j:128~2 ( s o ) out ) }",
    "i linear and cross entropy": "part { i:128@grid j:512@grid i:64@group j:256 ( d:64~4 ( s ) m l t ) }"
                                  " join { i:64@grid ( +m +l +t loss ) }",
    "j paged decoding": "part { b:1@grid g:1@grid p/8@grid p:8~4 ( s m l o ) } join { b:1@grid g:1@grid ( +m +l +o out ) }",
}  # fmt: skip

HAVE_PARTS_OF_BUFFERS = ("d chain, flat", "g long rows")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", KERNELS)
def test_in_float64(name, tiles):
    subject = SUBJECTS[name[0]]
    programs = subject.lowered(KERNELS[name], TILES[tiles])
    assert not isinstance(programs, Refusal), programs
    in_float64(subject, programs, TILES[tiles])


@pytest.mark.sampled(12, cover=("machine",))
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", KERNELS)
def test_on_machines(name, machine):
    subject, (tiles, run) = SUBJECTS[name[0]], MACHINES[machine]
    on_machine(subject, subject.lowered(KERNELS[name], tiles), run)


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("name", KERNELS)
def test_lowered_for_triton(name):
    """Kernels whose tiles Triton holds become one call each; of the others it is said what they are."""
    subject, tiles = SUBJECTS[name[0]], TILES["dots"]
    have = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in subject.arguments().items()}
    refused = []
    for program in subject.lowered(KERNELS[name], tiles):
        inputs = {t.name: jax.ShapeDtypeStruct([a.extent for a in t.axes], t.dtype) for t in program.inputs}
        have |= {t.name: jax.ShapeDtypeStruct([a.extent for a in t.axes], t.dtype) for t in program.outputs}
        assert all(have[n].shape == x.shape for n, x in inputs.items())
        problem = _PROBLEMS["triton"](program)
        if problem is not None:
            refused.append(problem)
            continue
        lowered = h100.lower(lambda x, p=program: triton_gpu.run(p, x), (inputs,))
        assert h100.triton_calls(lowered.as_text()) == 1
    assert all("are read or written, which lies in registers" in why for why in refused)
    assert bool(refused) == (name in HAVE_PARTS_OF_BUFFERS)
