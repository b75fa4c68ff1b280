"""XLA stores what its loops make in the orders that it has in what it compiles for an H100; times are those of an H200."""

import random

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import XlaPrices, kernels_on, of_kernel
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


def masked(q, k, v, length):
    scores = jnp.einsum("bhd,bthd->bht", q, k).astype(jnp.float32)
    seen = jnp.arange(T)[None, None] < length[:, None, None].astype(jnp.int32)
    return jnp.einsum("bht,bthd->bhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)).astype(v.dtype), v)


def inside(q, k, v):
    return attend("bthd", q, k, v)[1]


CACHE, QUERY = (B, T, H, D), (B, H, D)


def stored(of, made=frozenset()):
    """Returns the shapes of what is stored for each query and position."""
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
        (lambda q, k, v, b: attend("bthd", q, k, v, b.swapaxes(1, 2))[1], (QUERY, CACHE, CACHE, (B, T, H)), INSIDE),
        (lambda *a: jax.nn.gelu(jnp.einsum("bhd,bthd->bht", *a[:2])) @ a[2], (QUERY, CACHE, (T, 512)), OUTSIDE),
        (lambda q, k, v: attend("bthd", q[:, :, 0], k, v)[1], ((B, H, 1, D), CACHE, CACHE), INSIDE),
        (masked, (QUERY, CACHE, CACHE, (B,)), INSIDE),
        (lambda q, k, v: attend("bhtd", q, *(x.swapaxes(1, 2) for x in (k, v)))[1], (QUERY, CACHE, CACHE), INSIDE),
        (lambda s, v: jnp.einsum("bht,bthd->bhd", jax.nn.softmax(jnp.tanh(s).swapaxes(1, 2)), v), ((B, T, H), CACHE), INSIDE),
    ],
    ids=["heads inside", "heads outside", "shares are a result", "a bias for each", "a bias of heads", "a turned bias",
         "a product of it", "an axis of one", "a mask", "turned caches", "turned scores"],
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


def scores_and(further):
    """Returns scores, which are as written since they are a result, and what else comes of them."""
    return lambda q, k: (s := jnp.einsum("bhgd,bthgd->bhgt", q, k), further(s))


GROUPS = (2, 8, 4, D), (2, 512, 8, 4, D)
"""Queries and a cache of groups of heads."""


@pytest.mark.parametrize(
    "further",
    [lambda s: jnp.exp(s.max(-1) * 2).sum(1), lambda s: jnp.tanh(s.max(1)).sum(-1), lambda s: jax.nn.softmax(s.max(2), 1).sum(2)],
    ids=["of rows", "of heads", "of groups"],
)  # fmt: skip
def test_what_is_reduced_from_tensors_as_written_is_as_written(further):
    whole = program(scores_and(further), *GROUPS, dtype="float32")

    assert Layouts(whole).beside(()) is whole


def test_one_tensor_as_written_gives_others_its_order():
    def both(q, r, k):
        s, u = (jnp.einsum("bhd,bthd->bht", x, k) for x in (q, r))
        return s, jnp.exp(s * u).sum(2) * 2

    whole = program(both, QUERY, QUERY, CACHE, dtype="float32")
    assert Layouts(whole).beside(()) is whole


def test_the_largest_tensor_hands_its_order_on():
    def weighed(x, y):
        return jnp.exp(jnp.einsum("btshd,hbts->hbt", x, y) / 3).sum(2)

    whole = program(weighed, (B, 128, 8, H, D), (H, B, 128, 8), dtype="float32")
    shapes = [[a.extent for a in n.axes] for n in Layouts(whole).beside(()).nests]
    assert [s for s in shapes if sorted(s) == [B, H, 128]] == [[B, 128, H]] * 3


def turned_again(q, k):
    return jnp.exp(jnp.exp(jnp.einsum("bhd,bthd->bht", q, k)).swapaxes(1, 2)).sum(1)


@pytest.mark.parametrize(
    ("function", "shapes"), [(inside, (QUERY, CACHE, CACHE)), (turned_again, (QUERY, CACHE))], ids=["attention", "turned again"]
)  # fmt: skip
def test_beside_kernels_of_ours_their_tensors_lie_as_the_program_says(function, shapes):
    whole = program(function, *shapes, dtype="float32")
    prices, names, chance = XlaPrices(whole, H200), [n.name for n in whole.nests], random.Random(0)

    for _ in range(60):
        ours = frozenset(chance.sample(names, chance.randrange(len(names) + 1)))
        beside = {n.name: n for n in Layouts(whole).beside(ours).nests}
        assert all(beside[n.name].axes == n.axes for n in whole.nests if n.name in ours)
        assert prices.us(frozenset(), ours) == XlaPrices(whole, H200).us(frozenset(), ours)


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
