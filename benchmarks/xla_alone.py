"""How long single kernels of XLA take on the device at hand, beside their price: a source of the constants of GPUs' prices.

    python benchmarks/xla_alone.py
    python benchmarks/xla_alone.py products --jobs 14 --out alone.json

Kinds of programs:

- `columns`: sums over the middle axis of an array in memory, [kept, reduced, columns]; the last axis is kept.
- `outer`: largest sums of a pair of values, a[kept, reduced] + b[reduced, columns]: nothing of the space lies in memory.
- `rows`: the same where the reduced axis is the last one of both operands.
- `products`: matrix products of [m, k] and [k, n], in either order each, of sizes that are and that are not multiples of eight.
- `small products`: those of few hundred rows, or of few columns, as small networks have them.
- `maps`: sums of one to eight arrays, of few to many elements; operands that lack axes; arrays whose halves meet.
- `chains`: several operations on each element, one after the other: of floats and of integers, with and without choices.
- `functions`: one function of each element, six times.
- `norms`: rows that are read again after they are reduced: softmax, with and without a mask by position, and two norms.
- `windows`: pooling, and running sums.
- `sorts`: rows that are sorted, alone and with others, and their positions.
- `draws`: uniform and normal numbers.
- `pieces`: means and norms of groups of channels over all positions of an image: what is reduced lies in short pieces.
- `gathers`: elements, and runs of eight, that positions choose within rows: the same positions for all rows, and others for each.
- `vectors`: products of many matrices with a vector each: queries with their keys, and shares with values, in both orders of the
  dimensions of caches, from arrays alone and from one of a stack of arrays, as loops over layers have them.
- `one query`: attention of one query for each head in both orders of the dimensions of caches, alone and with a bias.
- `products with ends`: operands that are computed before a product, and maps of its result.
- `columns of maps`: columns of values that are computed, which few blocks reduce.
- `systems`: factorisations of matrices and solutions of linear systems, of one matrix and of many.
- `joins`: arrays, and rows that positions choose, side by side: as concatenations, and as choices between padded arrays.

Times are microseconds, sums of kernel times on a GPU and wall times on a CPU, which must be otherwise idle.
"""

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.alone_cases import Case, case
from benchmarks.film_convolutions import films
from benchmarks.linear_systems import systems
from benchmarks.program_kernels import device_at_hand
from benchmarks.scalar_functions import microseconds
from pallasfuse.decompositions.joins import choice
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import price_xla

ELEMENTS = {"gpu": 1 << 25, "cpu": 1 << 22}
REDUCED = (4, 16, 64, 333, 1024, 8192)
COLUMNS = (3, 16, 64, 257, 2048)
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "columns": lambda x: jnp.sum(x, axis=1),
    "outer": lambda a, b: jnp.max(a[:, :, None] + b[None], axis=1),
    "rows": lambda a, b: jnp.max(a[:, None, :] + b[None], axis=2),
}
SHORTER = {"gpu": 1, "cpu": 8}
"""Arrays of the kinds below are shorter by this factor than those for a GPU."""
SIZES = {"gpu": {"m": 2048, "n": 4096, "k": 2048}, "cpu": {"m": 256, "n": 512, "k": 256}}
BYTES = ((1536, 1152, 4608), (4096, 4096, 4096), (16, 4096, 11008), (333, 1000, 1500), (2048, 2048, 4095))
"""Products of bytes and of integers: m, k, n."""


def reductions(kind: str, elements: int) -> Iterator[Case]:
    """Yields reductions over spaces of so many points."""
    for reduced, columns in itertools.product(REDUCED, COLUMNS):
        kept = elements // (reduced * columns)
        if not kept:
            continue
        shapes = {
            "columns": [(kept, reduced, columns)],
            "outer": [(kept, reduced), (reduced, columns)],
            "rows": [(kept, reduced), (columns, reduced)],
        }[kind]
        for dtype in ("float32", "bfloat16") if kind == "columns" else ("float32", "int32", "int16"):
            structs = tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)
            yield Case(f"{kind} {kept} {reduced} {columns} {dtype}", REDUCTIONS[kind], structs)


def product(left: str, right: str, dtype: str, sizes: dict[str, int], kind: str = "products") -> Case:
    """A product of operands whose dimensions are m, n and the summed k, in the given orders."""
    wide = jnp.int32 if dtype.startswith("int") else jnp.float32
    numbers = (((left.index("k"),), (right.index("k"),)), ((), ()))

    def multiply(a: Any, b: Any) -> Any:
        found = lax.dot_general(a, b, numbers, preferred_element_type=wide)
        return found if dtype.startswith("int") else found.astype(dtype)

    structs = tuple(jax.ShapeDtypeStruct([sizes[a] for a in order], dtype) for order in (left, right))
    return Case(f"{kind} {left} {right} {' '.join(str(sizes[a]) for a in 'mkn')} {dtype}", multiply, structs)


def products(platform: str) -> Iterator[Case]:
    """Yields products of four layouts, in each of which one size is a little shorter, and products of integers."""
    sizes = SIZES[platform]
    shorter = [sizes, *({**sizes, a: sizes[a] - n} for a in "mnk" for n in (1, 4))]
    for left, right in itertools.product(("mk", "km"), ("kn", "nk")):
        yield from (product(left, right, "bfloat16", s) for s in shorter)
    yield from (product("mk", "kn", "float32", s) for s in shorter)
    for m, k, n in BYTES if platform == "gpu" else BYTES[3:4]:
        yield from (product("mk", right, "int8", {"m": m, "k": k, "n": n}) for right in ("kn", "nk"))
    yield product("mk", "kn", "int32", {"m": 333, "k": 1000, "n": 1500})


def small_products(platform: str) -> Iterator[Case]:
    """Yields products of [m, k] and [k, n] that give the device little to do, of sizes that are and are not multiples of eight."""
    rows, columns, terms = (64, 256, 768, 4096), (16, 51, 128, 512), (64, 512, 2048)
    for dtype, m, n, k in itertools.product(("float32", "bfloat16"), rows, columns, terms):
        yield product("mk", "kn", dtype, {"m": m // SHORTER[platform], "n": n, "k": k}, "small products")


def maps(platform: str) -> Iterator[Case]:
    """Yields kernels of maps that compute next to nothing."""
    for power, number, dtype in itertools.product((8, 12, 16, 18, 20, 22, 24), (1, 2, 8), ("float32", "bfloat16")):
        size = max(256, (1 << power) // SHORTER[platform])
        if number * size <= 1 << 25:
            yield case("maps", f"{number} arrays", lambda *x: sum(x) + 1, *[((size,), dtype)] * number)
    for length, *inner in ((1000, 37, 21), (64, 129, 257), (8, 1024, 16, 64), (333, 333, 33)):
        shape = (-(-length // SHORTER[platform]), *inner)
        along = [(tuple(n if i == at else 1 for i, n in enumerate(shape)), "float32") for at in range(len(shape))]
        yield case("maps", "lacking axes", lambda x, *v: sum(v, x), (shape, "float32"), *along)
    for dtype in ("float32", "bfloat16"):
        rows = 4096 // SHORTER[platform]
        yield case("maps", "halves", lambda x: jax.nn.silu(x[:, :2816]) * x[:, 2816:], ((rows, 5632), dtype))
        yield case("maps", "turned", lambda x, y: x + y.T, ((rows, 2048), dtype), ((2048, rows), dtype))


CHAINS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "multiply and add": (lambda x, i: x * 1.0001 + (0.5 + i), "float32"),
    "multiply twice": (lambda x, i: (x * (1.01 + i)) * x, "float32"),
    "shift, exclusive or, add": (lambda x, i: (x ^ (x >> (3 + i % 5))) + jnp.uint32(7 + i), "uint32"),
    "shift, exclusive or, multiply": (lambda x, i: (x ^ (x >> 3)) * jnp.uint32(2654435 + i), "uint32"),
    "choose": (lambda x, i: jnp.where(x > 0.5 + i, x * 0.5, x + 1.25), "float32"),
    "least and largest": (lambda x, i: jnp.maximum(x, -1.0 * i) + jnp.minimum(x, 1.0 * i), "float32"),
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": jnp.exp, "log": jnp.log, "tanh": jnp.tanh, "sin": jnp.sin, "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt,
    "logistic": jax.nn.sigmoid, "erf": lax.erf, "div": lambda x: 1.5 / x, "pow": lambda x: jnp.abs(x) ** 1.3,
    "log1p": lambda x: jnp.log1p(jnp.abs(x)), "expm1": jnp.expm1, "rem": lambda x: x % 3.0, "floor": jnp.floor, "cbrt": jnp.cbrt,
    "atan2": lambda x: jnp.arctan2(x, x + 1),
}  # fmt: skip


def _repeated(step: Callable[[Any, int], Any], times: int) -> Callable[[Any], Any]:
    return lambda x: functools.reduce(step, range(times), x)


def chains(platform: str) -> Iterator[Case]:
    """Yields kernels that compute many operations for each element."""
    for (words, (step, dtype)), times, power in itertools.product(CHAINS.items(), (4, 16, 64), (14, 18, 22)):
        yield case(
            "chains", f"{times} x {words}", _repeated(step, times), (((1 << power) // SHORTER[platform],), dtype)
        )


def functions(platform: str) -> Iterator[Case]:
    """Yields kernels that compute a function of each element six times."""
    for (words, function), power in itertools.product(FUNCTIONS.items(), (14, 22)):

        def step(x: Any, i: int, function: Callable[[Any], Any] = function) -> Any:
            return function(x + i * 0.01) * 0.9

        yield case("functions", words, _repeated(step, 6), (((1 << power) // SHORTER[platform],), "float32"))


def _masked(x: Any) -> Any:
    wide, n = x.astype(jnp.float32) * 0.125, x.shape[-1]
    seen = jnp.arange(n)[:, None] >= jnp.arange(n)[None]
    return jax.nn.softmax(jnp.where(seen, wide, -1e30), -1).astype(x.dtype)


def _normalised(x: Any, centred: bool, axes: int | tuple[int, ...] = -1) -> Any:
    wide = x.astype(jnp.float32)
    wide -= wide.mean(axes, keepdims=True) if centred else 0.0
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + 1e-6)).astype(x.dtype)


def norms(platform: str) -> Iterator[Case]:
    """Yields kernels that keep rows while they reduce them."""
    rows = ((1, 16384), (32, 1000), (132, 4096), (512, 1024), (4096, 4096), (32768, 257), (200000, 64), (8192, 16384))
    kinds: dict[str, Callable[[Any], Any]] = {
        "softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype),
        "mean square": lambda x: _normalised(x, centred=False),
        "variance": lambda x: _normalised(x, centred=True),
    }
    for (words, function), (number, length), dtype in itertools.product(kinds.items(), rows, ("float32", "bfloat16")):
        yield case("norms", words, function, ((-(-number // SHORTER[platform]), length), dtype))
    for (batch, length), dtype in itertools.product(
        ((32, 1024), (16, 2048), (64, 257), (96, 197)), ("float32", "bfloat16")
    ):
        yield case("norms", "masked softmax", _masked, ((batch // SHORTER[platform], length, length), dtype))


def _in_space(width: int, x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *[width] * 3), (1, 1, 1, 1), "SAME")


IN_SPACE: dict[str, Callable[[int, Any], Any]] = {
    "alone": _in_space, "of a map, less it": lambda width, x: _in_space(width, jax.nn.relu(x)) - x,
    "twice": lambda width, x: _in_space(width, _in_space(width, x)),
}  # fmt: skip


def windows(platform: str) -> Iterator[Case]:
    """Yields kernels of windows around each element, and of running sums."""
    for (batch, side, channels), width in itertools.product(((8, 64, 32), (4, 256, 3), (2, 512, 16)), (2, 3, 7)):

        def pool(x: Any, width: int = width) -> Any:
            return lax.reduce_window(x, -jnp.inf, lax.max, (1, width, width, 1), (1, 1, 1, 1), "SAME")

        yield case(
            "windows", f"{width} x {width}", pool, ((batch, side // SHORTER[platform], side, channels), "float32")
        )
    for width, (words, form) in itertools.product((2, 3, 5), IN_SPACE.items()):
        shape = (2, 96 // SHORTER[platform], 160, 160)
        yield case(
            "windows", f"{width} x {width} x {width} {words}", functools.partial(form, width), (shape, "float32")
        )
    for axis, shape in itertools.product((0, 1), ((64, 1000), (4096, 128), (16, 65536))):
        sums = functools.partial(jnp.cumsum, axis=axis)
        yield case("windows", f"running along {axis}", sums, ((shape[0], shape[1] // SHORTER[platform]), "float32"))


def convolutions(platform: str) -> Iterator[Case]:
    """Yields gradients of weights of which each example has its own, and convolutions of images of one channel, with theirs."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def apart(x: Any, w: Any, examples: int) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=examples)

    sizes = ((384, 16, 32, 12, 3), (384, 1, 16, 28, 5), (256, 3, 32, 32, 3), (256, 32, 64, 16, 3), (1024, 1, 32, 28, 3),
             (128, 16, 16, 32, 3), (64, 64, 64, 14, 3))  # fmt: skip
    for (many, channels, results, side, width), dtype in itertools.product(sizes, ("float32", "bfloat16")):
        examples, long = many // SHORTER[platform], side - width + 1
        arrays = ((channels, side, side, examples), dtype), ((long, long, 1, examples * results), dtype)
        yield case("convolutions", f"apart {width} x {width}", functools.partial(apart, examples=examples), *arrays)
    for (batch, side, results, width), dtype in itertools.product(
        ((256, 28, 32, 3), (256, 28, 32, 5), (1024, 28, 16, 5), (64, 128, 16, 3)), ("float32", "bfloat16")
    ):

        def one(x: Any, w: Any) -> Any:
            return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

        def of_weights(x: Any, g: Any, width: int = width, results: int = results) -> Any:
            weights = jnp.zeros((width, width, 1, results), x.dtype)
            return jax.vjp(
                lambda w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers), weights
            )[1](g)

        images = (batch // SHORTER[platform], side, side, 1), dtype
        kernel = (width, width, 1, results), dtype
        yield case("convolutions", f"one channel {width} x {width} to {results}", one, images, kernel)
        made = (*images[0][:3], results), dtype
        yield case("convolutions", f"one channel's weights {width} x {width} to {results}", of_weights, images, made)


def sorts(platform: str) -> Iterator[Case]:
    """Yields rows that are sorted."""
    short = (64, 1000), (4096, 128), (256, 4096), (30000, 16)
    long = (
        (1, 1 << 20),
        (2, 1 << 20),
        (16, 65536),
        (16, 1 << 18),
        (64, 50257),
        (112, 20000),
        (112, 40000),
        (300, 20000),
        (1000, 24000),
    )
    for shape in dict.fromkeys((-(-number // SHORTER[platform]), length) for number, length in short + long):
        for dtype in ("float32", "int32", "bfloat16"):
            yield case("sorts", "stable", lambda x: jnp.sort(x, -1), (shape, dtype))
        yield case("sorts", "any order", lambda x: lax.sort(x, dimension=1, is_stable=False), (shape, "float32"))
        yield case("sorts", "positions", lambda x: jnp.argsort(x, -1), (shape, "float32"))


def draws(platform: str) -> Iterator[Case]:
    """Yields random numbers."""
    for power, draw in itertools.product((12, 16, 20, 23), (jax.random.uniform, jax.random.normal)):

        def drawn(key: Any, size: int = (1 << power) // SHORTER[platform], draw: Callable[..., Any] = draw) -> Any:
            return draw(jax.random.wrap_key_data(key), (size,))

        yield case("draws", f"{draw.__name__} 2^{power}", drawn, ((2,), "uint32"))


def pieces(platform: str) -> Iterator[Case]:
    """Yields reductions over positions and the channels of a group, [image, position, group, channel]."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "means": lambda x: jnp.mean(x.astype(jnp.float32), (1, 3)),
        "moments": lambda x: (jnp.mean(x.astype(jnp.float32), (1, 3)), jnp.mean(x.astype(jnp.float32) ** 2, (1, 3))),
        "norms": lambda x: _normalised(x, centred=True, axes=(1, 3)),
    }
    shapes = itertools.product((256, 1024, 4096), (4, 32), (2, 10, 16, 20, 64))
    for (positions, groups, channels), dtype, (words, function) in itertools.product(
        shapes, ("float32", "bfloat16"), kinds.items()
    ):
        yield case("pieces", words, function, ((8 // min(8, SHORTER[platform]), positions, groups, channels), dtype))


def gathers(platform: str) -> Iterator[Case]:
    """Yields choices of elements within rows, of 2^23 elements together."""
    forms: dict[str, tuple[Callable[..., Any], int, int]] = {
        "of all rows": (lambda x, i: x[:, i], 1, 1),
        "few of all rows": (lambda x, i: x[:, i], 8, 1),
        "of each row": (lambda x, i: jnp.take_along_axis(x, i, 1), 1, 1),
        "runs of all rows": (lambda x, i: x[:, i], 1, 8),
    }
    for length, dtype, (words, (take, fewer, run)) in itertools.product(
        (24, 120, 1000, 8192, 65536), ("float32", "bfloat16"), forms.items()
    ):
        rows = (1 << 23) // (SHORTER[platform] * length * run)
        shape = (rows, length) if run == 1 else (rows, length, run)
        positions = (rows, length) if words == "of each row" else (length // fewer,)
        made = case("gathers", words, take, (shape, dtype), (positions, "int32"))
        yield replace(made, below=length)


HEADS = (
    (8, 16, 1030, 128),
    (8, 16, 1024, 64),
    (1, 32, 4096, 128),
    (32, 8, 512, 128),
    (4, 12, 2048, 64),
    (64, 4, 200, 80),
)
"""Sequences, heads, places of a cache, and channels."""


def vectors(platform: str) -> Iterator[Case]:
    """Yields products of a vector for each head with the matrix that the head has in a cache."""

    def times(numbers: str, vector: Any, caches: Any, layer: Any) -> Any:
        cache = caches if caches.ndim == 4 else lax.dynamic_index_in_dim(caches, layer, keepdims=False)
        return jnp.einsum(numbers, vector, cache, preferred_element_type=jnp.float32)

    for (b, h, t, d), dtype, of in itertools.product(HEADS, ("bfloat16", "float32"), ("keys", "values")):
        length = t // SHORTER[platform]
        for order, shape in {"bhtd": (b, h, length, d), "bthd": (b, length, h, d)}.items():
            numbers, vector = (
                (f"bhd,{order}->bht", (b, h, d)) if of == "keys" else (f"bht,{order}->bhd", (b, h, length))
            )
            for words, caches in (("", shape), ("of a stack ", (2, *shape))):
                made = case("vectors", f"{words}{of} {order} {length}x{d}", functools.partial(times, numbers),
                             (vector, dtype), (caches, dtype), ((), "int32"))  # fmt: skip
                yield replace(made, below=1)


def one_query(platform: str) -> Iterator[Case]:
    """Yields attention of one query for each head."""

    def attend(order: str, q: Any, k: Any, v: Any, *bias: Any) -> Any:
        scores = sum(bias, start=jnp.einsum(f"bhd,{order}->bht", q, k).astype(jnp.float32))
        return jnp.einsum(f"bht,{order}->bhd", jax.nn.softmax(scores).astype(v.dtype), v)

    for (b, h, t, d), dtype in itertools.product(HEADS, ("bfloat16", "float32")):
        length = t // SHORTER[platform]
        for order, shape in {"bhtd": (b, h, length, d), "bthd": (b, length, h, d)}.items():
            for words, bias in (("", ()), ("with a bias ", (((b, h, length), "float32"),))):
                yield case("one query", f"{words}{order} {length}", functools.partial(attend, order),
                            ((b, h, d), dtype), (shape, dtype), (shape, dtype), *bias)  # fmt: skip


ENDS: dict[str, Callable[..., Any]] = {
    "plain": lambda h, b, x: h @ b, "relu@": lambda h, b, x: jax.nn.relu(h) @ b, "@+x": lambda h, b, x: x + h @ b,
    "relu@+x": lambda h, b, x: x + jax.nn.relu(h) @ b, "silu@": lambda h, b, x: jax.nn.silu(h) @ b,
    "gelu(@)": lambda h, b, x: jax.nn.gelu(h @ b), "gelu(@+c)": lambda h, b, x: jax.nn.gelu(h @ b + x[0]),
}  # fmt: skip


def products_with_ends(platform: str) -> Iterator[Case]:
    """Yields products of m x k by k x n alone, with an operand that is computed, and with a map of the result."""
    sizes = (
        (16, 16, 4096), (16, 64, 1000), (16, 512, 4096), (16, 4096, 4096), (16, 4096, 16), (128, 512, 2048), (300, 256, 768),
        (1024, 64, 4096), (1024, 1024, 1024), (4096, 512, 512), (4096, 1024, 4096), (2048, 4096, 4096),
    )  # fmt: skip
    for dtype, (m, k, n), (words, form) in itertools.product(("bfloat16", "float32"), sizes, ENDS.items()):
        rows = -(-m // SHORTER[platform])
        arrays: tuple[tuple[Sequence[int], str], ...] = (((rows, k), dtype), ((k, n), dtype), ((rows, n), dtype))
        yield case("products with ends", f"{words} to {n}", form, *arrays)


MAPS_OF_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "sum of exponentials": lambda x: jnp.exp(x).sum(1), "sum of gelu": lambda x: jax.nn.gelu(x).sum(1),
    "variance": lambda x: x.var(1), "softmax": lambda x: jax.nn.softmax(x, 1),
}  # fmt: skip


def columns_of_maps(platform: str) -> Iterator[Case]:
    """Yields reductions of computed values along columns, [kept, reduced, columns], by few blocks and by many."""
    shapes = ((8, 1024, 64), (32, 1024, 64), (1, 4096, 1024), (64, 300, 96), (2, 8192, 333), (256, 196, 768))
    for (kept, reduced, columns), dtype, (words, reduce) in itertools.product(
        shapes, ("float32", "bfloat16"), MAPS_OF_COLUMNS.items()
    ):
        shape = (-(-kept // SHORTER[platform]), reduced, columns)
        yield case("columns of maps", words, lambda x, f=reduce: f(x.astype(jnp.float32)), (shape, dtype))


def _as_choice(arrays: Sequence[Any]) -> Any:
    """Arrays side by side, each position of a row from one of them, as the rule for concatenations writes it."""
    if len(arrays) == 1:
        return arrays[0]
    (concatenation,) = jax.make_jaxpr(lambda *a: lax.concatenate(a, 1))(*arrays).eqns
    run = choice(concatenation)
    assert run is not None
    return run(*arrays)[0]


def joins(platform: str) -> Iterator[Case]:
    """Yields joins of arrays and of gathers."""
    many, rows, few = 150_000 // SHORTER[platform], 9001, 128
    parts: dict[str, tuple[Callable[..., Sequence[Any]], str]] = {
        "two gathers": (lambda h, i, j: (h[i], h[j]), "hii"),
        "two gathers and a column": (lambda h, i, j, c: (h[i], h[j], c), "hiic"),
        "two arrays": (lambda a, b: (a, b), "aa"),
        "two arrays and a column": (lambda a, b, c: (a, b, c), "aac"),
        "an array and a column": (lambda a, c: (a, c), "ac"),
        "a gather and an array": (lambda h, i, a: (h[i], a), "hia"),
        "a gather and a column": (lambda h, i, c: (h[i], c), "hic"),
        "a gather": (lambda h, i: (h[i] * 2,), "hi"),
    }
    for dtype, (words, (operands, kinds)) in itertools.product(("bfloat16", "float32"), parts.items()):
        shapes = {
            "h": ((rows, few), dtype),
            "i": ((many,), "int32"),
            "a": ((many, few), dtype),
            "c": ((many, 1), dtype),
        }
        given = [shapes[kind] for kind in kinds]
        forms: dict[str, Callable[..., Any]] = {
            "concatenated": functools.partial(jnp.concatenate, axis=1), "chosen": _as_choice,
        }  # fmt: skip
        for form, join in forms.items():
            yield case("joins", f"{words} {form}", lambda *x, f=operands, join=join: join(f(*x)), *given)


OTHERS: dict[str, Callable[[str], Iterator[Case]]] = {
    "products": products, "small products": small_products, "maps": maps, "chains": chains, "functions": functions,
    "norms": norms, "windows": windows,
    "sorts": sorts, "draws": draws, "pieces": pieces, "joins": joins, "gathers": gathers, "columns of maps": columns_of_maps,
    "products with ends": products_with_ends, "convolutions": convolutions, "vectors": vectors,
    "one query": one_query, "systems": systems, "films": films,
}  # fmt: skip
KINDS = (*REDUCTIONS, *OTHERS)


def _drawn(program: Case) -> Iterator[Any]:
    """Yields arrays of numbers in no order, of which all functions are defined."""
    for at, struct in enumerate(program.structs):
        found = jax.random.uniform(jax.random.key(at), struct.shape)
        yield (program.below * found if jnp.issubdtype(struct.dtype, jnp.integer) else 0.25 + found).astype(
            struct.dtype
        )


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each program: what is measured and what is predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="threads that compile")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args(words)
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    device = device_at_hand()
    kinds: Sequence[str] = options.kinds or KINDS
    cases = [c for k in kinds if k in REDUCTIONS for c in reductions(k, ELEMENTS[device.platform])]
    cases += [c for k in kinds if k in OTHERS for c in OTHERS[k](device.platform)]
    with ThreadPoolExecutor(options.jobs) as pool:
        calls = list(pool.map(lambda c: jax.jit(c.function).lower(*c.structs).compile(), cases))
    rows = []
    print(f"{'program':42} {'us':>9} {'price':>9} {'ratio':>6}")
    for one, call in zip(cases, calls, strict=True):
        us = microseconds(call, *_drawn(one))
        price_us = price_xla(convert(flatten(jax.make_jaxpr(one.function)(*one.structs))).program, device).us
        rows.append([one.label, round(us, 2), round(price_us, 2)])
        print(f"{one.label:42} {us:9.1f} {price_us:9.1f} {price_us / us:6.2f}", flush=True)
    ratios = [price_us / us for _, us, price_us in rows]
    print(f"{len(rows)} programs: predicted over measured {statistics.geometric_mean(ratios):.2f} (geometric mean)")
    if options.out:
        with open(options.out, "w") as file:
            head = json.dumps({"device": device.kind, "jax": jax.__version__, "columns": ["program", "us", "price_us"]})
            file.write(f'{head[:-1]}, "rows": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")


if __name__ == "__main__":
    main()
