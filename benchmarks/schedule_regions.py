"""Regions of programs to make schedule trees of: MCFuser's tables, Blockbuster's examples, and others; also those of tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, add, apply, const, div, mul, read, sub
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.region import Region, region_of_program, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend.conversion import convert


def traced(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float16) -> Region:
    """Returns the region of a plain function of arrays with these shapes."""
    program = convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).program
    return region_of_program(program, Graph(program).inlined())


def chain(m: int, n: int, k: int, h: int, batch: int = 1) -> Region:
    """Returns the region of two products one after the other, as in table II: m·k times k·n times n·h."""
    lead = () if batch == 1 else (batch,)
    return traced(lambda a, b, d: a @ b @ d, (*lead, m, k), (*lead, k, n), (*lead, n, h))


def attention(heads: int, m: int, n: int, k: int, h: int) -> Region:
    """Returns the region of an attention without a mask, as in table III: m queries of width k, n keys, values of width h."""
    lead = () if heads == 1 else (heads,)

    def function(q, keys, v):
        return jax.nn.softmax(jnp.einsum("...mk,...nk->...mn", q, keys), -1) @ v

    return traced(function, (*lead, m, k), (*lead, n, k), (*lead, n, h))


def three_products(m: int, a: int, b: int, c: int, d: int) -> Region:
    """Returns the region of a chain of three products: m·a times a·b times b·c times c·d."""
    return traced(lambda x, u, v, w: x @ u @ v @ w, (m, a), (a, b), (b, c), (c, d))


def norm_product(m: int, k: int, n: int) -> Region:
    """Returns the region of a root-mean-square norm of m rows of width k, and a product with a k·n matrix."""

    def function(x, g, w):
        return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g) @ w

    return traced(function, (m, k), (k,), (k, n))


def two_passes(m: int, n: int, k: int) -> Region:
    """Returns the region of the mean absolute deviation of a product's rows: its second sum waits for the first."""
    return traced(lambda x, w: jnp.abs((y := x @ w) - y.mean(-1, keepdims=True)).sum(-1), (m, k), (k, n))


def low_rank(m: int, k: int, r: int, n: int) -> Region:
    """Returns the region of a product and a correction of rank r to it (LoRA)."""
    return traced(lambda x, w, a, b: x @ w + x @ a @ b, (m, k), (k, n), (k, r), (r, n))


def gated(m: int, k: int, f: int) -> Region:
    """Returns the region of two products with the same rows, one of which gates the other."""
    return traced(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (m, k), (k, f), (k, f))


@dataclass
class Operators:
    """A region under construction, one nest for each operator of a block program (Blockbuster, section 2.2)."""

    inputs: list[Tensor] = field(default_factory=list)
    nests: list[Nest] = field(default_factory=list)
    dtype: str = "float32"

    def input(self, name: str, *axes: Axis) -> Expr:
        self.inputs.append(Tensor(name, axes, self.dtype))
        return read(name, axes, self.dtype)

    def map(self, name: str, axes: tuple[Axis, ...], body: Expr) -> Expr:
        self.nests.append(Nest(name, axes, body, self.dtype))
        return read(name, axes, self.dtype)

    def sum(self, name: str, axes: tuple[Axis, ...], over: Axis, body: Expr) -> Expr:
        self.nests.append(Nest(name, axes, body, self.dtype, (over,), SUM))
        return read(name, axes, self.dtype)

    def number(self, value: float) -> Expr:
        return const(value, self.dtype)

    def region(self, *outputs: str) -> Region:
        return verify(Region(tuple(self.nests), tuple(self.inputs), outputs))


def block_attention(m: int, n: int, d: int, l: int) -> Region:  # noqa: E741
    """Returns Blockbuster's first example: m queries of width d, n keys, values of width l, exponentials without a maximum."""
    M, N, D, L = Axis("m", m), Axis("n", n), Axis("d", d), Axis("l", l)
    on = Operators()
    q, k, v = on.input("q", M, D), on.input("k", N, D), on.input("v", N, L)
    s = on.sum("s", (M, N), D, mul(q, k))
    t = on.map("t", (M, N), mul(s, on.number(d**-0.5)))
    e = on.map("e", (M, N), apply("exp", t))
    z = on.sum("z", (M,), N, e)
    r = on.map("r", (M,), div(on.number(1.0), z))
    p = on.map("p", (M, N), mul(e, r))
    on.sum("o", (M, L), N, mul(p, v))
    return on.region("o")


def block_norm_product(m: int, k: int, n: int) -> Region:
    """Returns Blockbuster's second example: rows less their mean, over their deviation, times a matrix."""
    M, K, N = Axis("m", m), Axis("k", k), Axis("n", n)
    on = Operators()
    x, y = on.input("x", M, K), on.input("y", K, N)
    s = on.sum("s", (M,), K, x)
    mean = on.map("mean", (M,), div(apply("neg", s), on.number(k)))
    c = on.map("c", (M, K), add(x, mean))
    square = on.map("square", (M, K), mul(x, x))
    squares = on.sum("squares", (M,), K, square)
    r = on.map("r", (M,), apply("rsqrt", sub(div(squares, on.number(k)), mul(mean, mean))))
    p = on.map("p", (M, K), mul(c, r))
    on.sum("z", (M, N), K, mul(p, y))
    return on.region("z")


def block_norm_gated(m: int, d: int, k: int, n: int) -> Region:
    """Returns Blockbuster's third example: scaled rows times two matrices, one product of which gates the other, times a third."""
    M, D, K, N = Axis("m", m), Axis("d", d), Axis("k", k), Axis("n", n)
    on = Operators()
    x, w, v, u = on.input("x", M, D), on.input("w", D, K), on.input("v", D, K), on.input("u", K, N)
    square = on.map("square", (M, D), mul(x, x))
    squares = on.sum("squares", (M,), D, square)
    r = on.map("r", (M,), apply("rsqrt", squares))
    p = on.map("p", (M, D), mul(x, r))
    g = on.sum("g", (M, K), D, mul(p, w))
    h = on.map("h", (M, K), mul(g, apply("logistic", g)))
    f = on.sum("f", (M, K), D, mul(p, v))
    a = on.map("a", (M, K), mul(h, f))
    on.sum("o", (M, N), K, mul(a, u))
    return on.region("o")


BLOCKS: dict[str, tuple[Callable[..., Region], tuple[int, ...]]] = {
    "attention": (block_attention, (4096, 4096, 128, 128)),
    "LayerNorm + product": (block_norm_product, (4096, 4096, 4096)),
    "RMSNorm + SwiGLU": (block_norm_gated, (16, 4096, 11008, 4096)),
}
"""Blockbuster's examples (section 5) with sizes that models have."""

G = {
    "G1": (512, 256, 64, 64), "G2": (512, 256, 64, 128), "G3": (512, 256, 64, 256), "G4": (512, 512, 256, 256),
    "G5": (512, 512, 512, 256), "G6": (512, 512, 1024, 256), "G7": (512, 512, 128, 128), "G8": (1024, 512, 128, 128),
    "G9": (2048, 512, 128, 128), "G10": (1024, 1024, 128, 128), "G11": (1024, 1024, 128, 128, 4),
    "G12": (1024, 1024, 128, 128, 8),
}  # fmt: skip
"""Table II: M, N, K, H, and the batch where it is not 1."""
S = {
    "S1": (8, 512, 512, 64, 64), "S2": (12, 512, 512, 64, 64), "S3": (16, 512, 512, 64, 64), "S4": (12, 256, 256, 64, 64),
    "S5": (16, 256, 256, 64, 64), "S6": (16, 256, 256, 80, 80), "S7": (1, 512, 256, 64, 64), "S8": (1, 768, 384, 64, 64),
    "S9": (1, 1024, 512, 64, 64),
}  # fmt: skip
"""Table III: heads, M, N, K, H."""


def workloads() -> dict[str, Callable[[], Region]]:
    """Returns every workload by its name, to be traced when it is wanted."""
    found: dict[str, Callable[[], Region]] = {n: lambda s=s: chain(*s) for n, s in G.items()}
    found["paper"] = lambda: chain(1024, 1024, 512, 512)
    found |= {n: lambda s=s: attention(*s) for n, s in S.items()}
    found |= {
        "norm+product": lambda: norm_product(4096, 4096, 4096),
        "three": lambda: three_products(1024, 128, 512, 128, 512),
        "held wide": lambda: chain(4096, 4096, 64, 512),
        "held odd": lambda: chain(768, 1000, 80, 112),
        "held passes": lambda: two_passes(2048, 1024, 128),
        "held low rank": lambda: low_rank(512, 4096, 16, 4096),
        "held gated": lambda: gated(512, 4096, 11008),
    }
    return found
