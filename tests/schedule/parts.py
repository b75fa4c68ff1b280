"""Parts of traced functions, and random ones, to make schedule trees of."""

import random

import jax
import jax.numpy as jnp

from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import convert as converted
from pallasfuse.ir.expr import mul, read
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.part import Part, part_of_program, verify
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend.conversion import convert


def traced(function, *shapes, dtype=jnp.float16):
    """Returns the part of a plain function of arrays with these shapes."""
    program = convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).program
    return part_of_program(program, Graph(program).inlined())


def chain(m, n, k, h, batch=1):
    """Returns the part of two products one after the other, as in table II of MCFuser."""
    lead = () if batch == 1 else (batch,)
    return traced(lambda a, b, d: a @ b @ d, (*lead, m, k), (*lead, k, n), (*lead, n, h))


def attention(heads, m, n, k, h):
    """Returns the part of an attention without a mask, as in table III of MCFuser."""
    lead = () if heads == 1 else (heads,)

    def function(q, keys, v):
        return jax.nn.softmax(jnp.einsum("...mk,...nk->...mn", q, keys), -1) @ v

    return traced(function, (*lead, m, k), (*lead, n, k), (*lead, n, h))


def three_products(m, a, b, c, d):
    """Returns the part of a chain of three products: m·a times a·b times b·c times c·d."""
    return traced(lambda x, u, v, w: x @ u @ v @ w, (m, a), (a, b), (b, c), (c, d))


def norm_product(m, k, n):
    """Returns the part of a root-mean-square norm before a product."""

    def function(x, g, w):
        return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g) @ w

    return traced(function, (m, k), (k,), (k, n))


def two_passes(m, n, k):
    """Returns the part of a row's variance, whose second sum waits for the first, after a product."""
    return traced(lambda x, w: jnp.abs((y := x @ w) - y.mean(-1, keepdims=True)).sum(-1), (m, k), (k, n))


def random_part(seed, extents=(32, 48, 64, 96, 128, 192, 256)):
    """Returns a part with two to four contractions: each multiplies an earlier result, or an input, with an input."""
    draw = random.Random(seed)
    names = iter("mabcdefgh")
    rows = Axis(next(names), draw.choice(extents))
    tensors: list[Tensor] = []
    nests: list[Nest] = []

    def value(tensor, axes):
        return converted(read(tensor, axes, "float16"), "float32")

    first = Axis(next(names), draw.choice(extents))
    tensors.append(Tensor("x", (rows, first), "float16"))
    last = tensors[0]
    for n in range(draw.randint(2, 4)):
        source = last if nests and draw.random() < 0.8 else tensors[0]
        summed = source.axes[1]
        free = Axis(next(names), draw.choice(extents))
        weight = Tensor(f"w{n}", (summed, free), "float16")
        tensors.append(weight)
        body = mul(value(source.name, source.axes), value(weight.name, weight.axes))
        nests.append(Nest(f"t{n}", (rows, free), body, "float16", (summed,), SUM))
        last = Tensor(f"t{n}", (rows, free), "float16")
    read_somewhere = {r for nest in nests for r in nest.reads}
    return verify(Part(tuple(nests), tuple(tensors), tuple(n.name for n in nests if n.name not in read_somewhere)))
