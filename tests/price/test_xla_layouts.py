"""In which order XLA stores what its loops make: as in what it compiles for an H100, and in times of an H200."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import kernels_on, of_kernel
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.price.xla_layouts import Layouts

B, T, H, D = 8, 1024, 16, 64
INSIDE, OUTSIDE = (B, T, H), (B, H, T)
H200 = device.find("NVIDIA H200", "gpu")


def attend(order, q, k, v, bias=None):
    scores = jnp.einsum(f"bhd,{order}->bht", q, k).astype(jnp.float32)
    shares = jax.nn.softmax(scores if bias is None else scores + bias).astype(v.dtype)
    return shares, jnp.einsum(f"bht,{order}->bhd", shares, v)


def program(function, *shapes, dtype="bfloat16"):
    return convert(flatten(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)))).program


def inside(q, k, v):
    return attend("bthd", q, k, v)[1]


CACHE, QUERY = (B, T, H, D), (B, H, D)


def stored(of, made=frozenset()):
    """The shapes of what is stored for each query and position."""
    kernels = kernels_on(H200, of, read=made)
    shapes = [tuple(a.extent for a in n.axes) for k in kernels if isinstance(k, LoopFusion) for n in k.roots]
    return [s for s in shapes if sorted(s) == sorted(INSIDE)]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (inside, (QUERY, CACHE, CACHE), INSIDE),
        (lambda *a: attend("bhtd", *a)[1], (QUERY, (B, H, T, D), (B, H, T, D)), OUTSIDE),
        (lambda *a: attend("bthd", *a), (QUERY, CACHE, CACHE), OUTSIDE),
        (lambda *a: attend("bthd", *a)[1], (QUERY, CACHE, CACHE, (B, H, T)), OUTSIDE),
        (lambda *a: attend("bthd", *a)[1], (QUERY, CACHE, CACHE, (H, T)), INSIDE),
        (lambda *a: jax.nn.gelu(jnp.einsum("bhd,bthd->bht", *a[:2])) @ a[2], (QUERY, CACHE, (T, 512)), OUTSIDE),
    ],
    ids=["heads inside", "heads outside", "shares are a result", "a bias for each", "a bias of heads", "a product of it"],
)  # fmt: skip
def test_results_lie_as_the_matrices_that_they_are_reduced_from(function, shapes, expected):
    found = stored(program(function, *shapes))

    assert found and set(found) == {expected}


def test_what_a_kernel_of_ours_reads_lies_as_the_program_says():
    whole = program(inside, QUERY, CACHE, CACHE)
    scores = whole.nests[0].name

    assert set(stored(whole, made=frozenset((scores,)))) == {OUTSIDE}
    assert Layouts(whole).beside((scores,)) is whole
    assert Layouts(whole).beside(()) is not whole


@pytest.mark.parametrize(
    ("order", "heads", "dtype", "us"),
    [
        ("bthd", (8, 16, 1030, 128), "bfloat16", 12.9), ("bhtd", (8, 16, 1030, 128), "bfloat16", 10.8),
        ("bhtd", (1, 32, 4096, 128), "bfloat16", 13.9), ("bhtd", (1, 32, 4096, 128), "float32", 22.2),
        ("bthd", (1, 32, 4096, 128), "float32", 37.0), ("bthd", (8, 16, 1030, 128), "float32", 18.2),
        ("bthd", (32, 8, 512, 128), "bfloat16", 12.2), ("bthd", (32, 8, 512, 128), "float32", 17.7),
        ("bthd", (8, 16, 2048, 64), "bfloat16", 20.7), ("bthd", (64, 8, 1024, 64), "bfloat16", 22.4),
    ],
)  # fmt: skip
def test_shares_times_values_take_what_an_h200_takes(order, heads, dtype, us):
    b, h, t, d = heads
    cache = (b, t, h, d) if order == "bthd" else (b, h, t, d)
    whole = program(lambda *a: attend(order, *a)[1], (b, h, d), cache, cache, dtype=dtype)
    last = next(k for k in kernels_on(H200, whole) if whole.outputs[0] in k.makes)

    assert us / 1.45 < of_kernel(last, H200).us < us * 1.2
