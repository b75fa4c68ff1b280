"""How long single kernels of ours take on the GPU at hand, each in several schedules, beside their price.

    python benchmarks/kernels_alone.py
    python benchmarks/kernels_alone.py tiny products --jobs 14 --ways 6 --out alone.json

Kinds of programs, of one kernel each:

- `products`: a product of matrices with a bias and a ramp, of sizes that are and that are not multiples of eight.
- `tiny`: products of many matrices of two to eight rows, and sums of a few elements.
- `pairs`: sums over one of two sets of points, of a function of their distance: little memory, many operations.
- `rows`: softmaxes, norms and entropies of rows of 40 to 50,257 elements.
- `columns`: sums over many rows of products of few columns, in parts.
- `groups`: norms of groups of channels over all positions of an image.
- `stored`: products of short rows of which one to four functions are stored, so that most of the time goes into what follows.
- `few`: products of one to sixteen rows with a matrix, and what comes before or after.
- `attention`: queries, keys and values of even and odd lengths, with and without masks; one query and a long cache.
- `scores`: the same with masks and biases that are arrays.
- `clusters`: long rows whose parts the blocks of a cluster keep, in clusters and tiles of several sizes.

A kernel runs in the schedule that is planned for it, and in others that seemed promising, so that those are told from another that
the price takes for better. Times are microseconds of the kernel alone.
"""

import argparse
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import pallasfuse as pf
from benchmarks.program_kernels import device_at_hand
from benchmarks.scalar_functions import microseconds
from pallasfuse.execution import run_phases
from pallasfuse.pipeline import kernel_of, ways


@dataclass(frozen=True, slots=True)
class Case:
    """One program that becomes a kernel. label: its kind, shape and type."""

    label: str
    function: Callable[..., Any]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    clusters: tuple[tuple[int, int], ...] = ()
    """Clusters that are asked for, in place of what is planned: the parts of axis j, and its tile."""


def _case(kind: str, words: str, function: Callable[..., Any], *shapes: Sequence[int], dtype: str = "float32") -> Case:
    structs = tuple(jax.ShapeDtypeStruct(tuple(s), dtype) for s in shapes)
    named = " ".join([kind, *filter(None, [words]), *("x".join(map(str, s)) for s in shapes), dtype])
    return Case(named, function, structs)


def products() -> Iterator[Case]:
    """Yields products with an epilogue."""
    sizes = (
        (4096, 909, 256), (4096, 912, 256), (4096, 256, 909), (2048, 333, 510), (512, 39, 256), (8192, 77, 128), (64, 1001, 1001),
        (16, 4095, 1024), (1000, 1000, 1000), (16384, 50, 50),
    )  # fmt: skip
    for (m, k, n), dtype in itertools.product(sizes, ("bfloat16", "float32")):
        yield _case("products", "", lambda x, w, b: jax.nn.relu(x @ w + b), (m, k), (k, n), (n,), dtype=dtype)


def uneven() -> Iterator[Case]:
    """Yields products of batches, and attention, whose rows begin at multiples of 4, 8 and 16 bytes."""

    def by_rows(x: Any, w: Any) -> Any:
        return jax.nn.silu(jnp.einsum("bmk,bnk->bmn", x, w))

    def by_columns(x: Any, w: Any) -> Any:
        return jax.nn.silu(jnp.einsum("bmk,bkn->bmn", x, w))

    def twice(w: Any, x: Any, y: Any) -> Any:
        return jnp.einsum("bgh,ebh->ebg", w, x), jnp.einsum("bgh,ebh->ebg", w, y)

    def attend(q: Any, k: Any, v: Any) -> Any:
        chances = jax.nn.softmax(jnp.einsum("bmd,bnd->bmn", q, k).astype(jnp.float32), axis=-1)
        return jnp.einsum("bmn,bnd->bmd", chances.astype(v.dtype), v)

    for own, dtype in itertools.product((1, 2, 4, 8), ("float32", "bfloat16")):
        summed, columns, width = 1000 + own, 1080 + own, 64 + own
        yield _case("uneven", "by rows", by_rows, (4, 48, summed), (4, 1024, summed), dtype=dtype)
        yield _case("uneven", "by columns", by_columns, (4, 64, 2048), (4, 2048, columns), dtype=dtype)
        yield _case("uneven", "twice", twice, (4, columns, columns), *[(13, 4, columns)] * 2, dtype=dtype)
        yield _case("uneven", "attention", attend, *[(16, 1024, width)] * 3, dtype=dtype)


def short() -> Iterator[Case]:
    """Yields products of short sums and many results."""

    def biased(x: Any, w: Any, b: Any) -> Any:
        return jnp.matmul(x, w, preferred_element_type=b.dtype) * 3 + b

    for (m, k, n), (dtype, result) in itertools.product(
        ((147456, 32, 192), (589824, 16, 96), (65536, 20, 256), (100352, 24, 144)),
        (("int8", "int32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")),
    ):
        case = _case("short", f"to {result}", biased, (m, k), (k, n), dtype=dtype)
        yield replace(case, structs=(*case.structs, jax.ShapeDtypeStruct((n,), result)))


def tiny() -> Iterator[Case]:
    """Yields products of many small matrices, and sums of few elements."""
    for many, side in ((32256, 3), (4096, 3), (32256, 2), (8192, 4), (8192, 8), (100000, 3), (2048, 6)):
        yield _case("tiny", "product", lambda a, b: jnp.tanh(a @ b), (many, side, side), (many, side, side))
        yield _case("tiny", "norms", lambda a: a / jnp.linalg.norm(a, axis=-1, keepdims=True), (many, side))
    for many, few in ((8192, 50), (65536, 10), (1024, 20)):
        yield _case("tiny", "softmax", lambda a: jax.nn.softmax(a, axis=-1), (many, few))
        yield _case("tiny", "weighted", lambda p, v: jnp.einsum("mk,mkd->md", p, v), (many, few), (many, few, 32))


def pairs() -> Iterator[Case]:
    """Yields sums over pairs of points."""

    def squared(x: Any, y: Any) -> Any:
        return jnp.sum(jnp.square(x[:, None] - y[None]), axis=-1)

    functions: dict[str, Callable[..., Any]] = {
        "gauss": lambda x, y: jnp.sum(jnp.exp(-squared(x, y)), axis=1),
        "mixed": lambda x, y: jnp.einsum("ij,jd->id", jnp.exp(-squared(x, y)), y),
        "cauchy": lambda x, y: jnp.sum(1 / (1 + squared(x, y)), axis=1),
        "morse": lambda x, y: jnp.sum(jnp.square(1 - jnp.exp(1 - jnp.sqrt(squared(x, y) + 0.01))), axis=1),
        "near": lambda x, y: jnp.argmin(squared(x, y), axis=1),
    }
    for (words, function), (m, n, d) in itertools.product(
        functions.items(), ((4096, 4096, 3), (1000, 3000, 2), (2048, 2048, 8))
    ):
        yield _case("pairs", words, function, (m, d), (n, d))


def rows() -> Iterator[Case]:
    """Yields rows that are read again after they are reduced."""

    def entropy(x: Any) -> Any:
        p = jax.nn.log_softmax(x.astype(jnp.float32), axis=-1)
        return -jnp.sum(jnp.exp(p) * p, axis=-1)

    functions: dict[str, Callable[..., Any]] = {
        "softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype),
        "entropy": entropy,
        "norm": lambda x: (
            x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)).astype(x.dtype)
        ),
    }
    sizes = ((65536, 40), (16384, 197), (8192, 768), (4096, 1001), (1024, 8192), (256, 50257), (8, 4096))
    for (words, function), size, dtype in itertools.product(functions.items(), sizes, ("float32", "bfloat16")):
        yield _case("rows", words, function, size, dtype=dtype)


def columns() -> Iterator[Case]:
    """Yields sums over many rows."""
    for many, few in ((65536, 256), (4096, 1024), (100000, 40), (5120, 2048)):
        for dtype in ("float32", "bfloat16"):
            yield _case(
                "columns", "sum", lambda x, y: jnp.sum(x * jnp.tanh(y), axis=0), (many, few), (many, few), dtype=dtype
            )
            yield _case(
                "columns", "moments", lambda x: (jnp.mean(x, axis=0), jnp.var(x, axis=0)), (many, few), dtype=dtype
            )


def groups() -> Iterator[Case]:
    """Yields norms of groups of channels over all positions of an image: rows in short pieces."""

    def centred(x: Any) -> Any:
        x = x.astype(jnp.float32)
        return x - jnp.mean(x, axis=(1, 3), keepdims=True)

    def normed(x: Any) -> Any:
        y = centred(x)
        return jax.nn.silu(y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=(1, 3), keepdims=True) + 1e-5)).astype(
            x.dtype
        )

    def parts(x: Any) -> Any:
        y = centred(x)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=(1, 3), keepdims=True) + 1e-5)
        return y, scale, jax.nn.sigmoid(y * scale)

    def pulled(x: Any, g: Any) -> Any:
        y, g = x.astype(jnp.float32), g.astype(jnp.float32)
        both = jnp.mean(y * g, axis=(1, 3), keepdims=True)
        return (g - jnp.mean(g, axis=(1, 3), keepdims=True) - y * both).astype(x.dtype)

    functions: dict[str, Callable[..., Any]] = {"normed": normed, "parts": parts, "pulled": pulled}
    sizes = (
        (12, 784, 24, 16),
        (12, 3136, 32, 4),
        (8, 1024, 32, 20),
        (16, 256, 32, 16),
        (2, 4096, 32, 10),
        (64, 196, 8, 64),
    )
    for (words, function), size, dtype in itertools.product(functions.items(), sizes, ("float32", "bfloat16")):
        yield _case("groups", words, function, *[size] * (2 if words == "pulled" else 1), dtype=dtype)


def stored() -> Iterator[Case]:
    """Yields products of short rows, of which one to four functions are stored, and summed."""

    def of_scores(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        def function(q: Any, k: Any) -> Any:
            scores = jnp.einsum("bmd,bnd->bmn", q, k).astype(jnp.float32) / 8
            return jnp.sum(jnp.exp(scores), axis=-1), *(f(scores) for f in functions)

        return function

    plain = (jnp.sin, jnp.square, jnp.abs, jnp.exp)
    long = (jax.nn.softplus, lambda x: jax.nn.softplus(-x), jax.nn.log_sigmoid, jax.nn.sigmoid)
    for (batch, m, n, d), count, dtype in itertools.product(
        ((32, 1000, 1000, 64), (4, 2048, 2048, 32), (96, 256, 200, 64)), (1, 2, 4), ("float32", "bfloat16")
    ):
        for words, functions in (("plain", plain), ("long", long)):
            yield _case(
                "stored", f"{count} {words}", of_scores(functions[:count]), (batch, m, d), (batch, n, d), dtype=dtype
            )


def few() -> Iterator[Case]:
    """Yields products of few rows."""

    def normed(x: Any, w: Any) -> Any:
        mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return (x * jax.lax.rsqrt(mean).astype(x.dtype)) @ w

    for rows, k, n in ((1, 4096, 4096), (1, 2048, 11008), (4, 4096, 4096), (16, 4096, 14336), (16, 1000, 3000)):
        yield _case("few", "relu", lambda x, w: jax.nn.relu(x @ w), (rows, k), (k, n), dtype="bfloat16")
        yield _case("few", "normed", normed, (rows, k), (k, n), dtype="bfloat16")
        yield _case(
            "few", "gated", lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (rows, k), (k, n), (k, n), dtype="bfloat16"
        )


def scores() -> Iterator[Case]:
    """Yields attention whose scores are masked, or added to, by an array."""

    def attend(q: Any, k: Any, v: Any, array: Any) -> Any:
        found = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        found = jnp.where(array, found, -1e9) if array.dtype == bool else found + array
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(found, axis=-1).astype(v.dtype), v)

    for (batch, heads, length, d), kind, of_heads in itertools.product(
        ((2, 8, 1536, 64), (2, 8, 1543, 128), (8, 12, 197, 64)), ("bool", "bfloat16", "float32"), (True, False)
    ):
        shape = (batch, heads, length, d)
        operand = jax.ShapeDtypeStruct(shape, "bfloat16")
        array = jax.ShapeDtypeStruct((batch, heads if of_heads else 1, length, length), kind)
        named = "x".join(map(str, shape))
        words = f"{kind} of {'heads' if of_heads else 'batches'}"
        yield Case(f"scores {words} {named} bfloat16", attend, (operand, operand, operand, array))


def beside() -> Iterator[Case]:
    """Yields the chances of scores to which an array is added, and their statistics: no product follows that of the scores."""

    def scored(q: Any, k: Any, array: Any) -> Any:
        found = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        return jnp.where(array, found, -1e9) if array.dtype == bool else found + array

    def chances(q: Any, k: Any, array: Any) -> Any:
        return jax.nn.softmax(scored(q, k, array), axis=-1).astype(q.dtype)

    def statistics_of(q: Any, k: Any, array: Any) -> Any:
        found = scored(q, k, array)
        most = jnp.max(found, axis=-1)
        return most, jnp.sum(jnp.exp(found - most[..., None]), axis=-1)

    for (length, d), kind, (words, function) in itertools.product(
        ((1500, 32), (1501, 64), (577, 64)), ("bool", "bfloat16", "float32"),
        (("chances", chances), ("statistics", statistics_of)),
    ):  # fmt: skip
        operand = jax.ShapeDtypeStruct((4, 4, length, d), "bfloat16")
        array = jax.ShapeDtypeStruct((4, 4, length, length), kind)
        yield Case(f"beside {words} {kind} 4x4x{length}x{d} bfloat16", function, (operand, operand, array))


def attention() -> Iterator[Case]:
    """Yields attention of even and odd lengths."""

    def attend(q: Any, k: Any, v: Any, causal: bool) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

    for batch, heads, length, d in (
        (2, 12, 1536, 64),
        (8, 12, 197, 64),
        (16, 8, 77, 40),
        (4, 16, 1000, 128),
        (2, 8, 1021, 64),
        (4, 16, 1021, 128),
        (1, 16, 3001, 64),
        (64, 4, 49, 32),
    ):
        for causal, dtype in ((False, "bfloat16"), (True, "bfloat16"), (False, "float32")):
            shape = (batch, heads, length, d)
            yield _case(
                "attention", "causal" if causal else "whole",
                lambda q, k, v, causal=causal: attend(q, k, v, causal), shape, shape, shape, dtype=dtype,
            )  # fmt: skip
    for batch, heads, length, d in ((16, 8, 2048, 128), (1, 32, 8191, 64)):
        cache = (batch, heads, length, d)
        one = (batch, heads, 1, d)
        yield _case("attention", "decode", lambda q, k, v: attend(q, k, v, False), one, cache, cache, dtype="bfloat16")


def clusters() -> Iterator[Case]:
    """Yields long rows whose parts the blocks of a cluster keep, by the sizes of a cluster and of a tile."""

    def normalised(x: Any, w: Any) -> Any:
        y = x.astype(jnp.float32)
        mean, variance = y.mean(-1, keepdims=True), y.var(-1, keepdims=True)
        return ((y - mean) * jax.lax.rsqrt(variance + 1e-5) * w).astype(x.dtype)

    functions: dict[str, Callable[..., Any]] = {
        "below the largest": lambda x: x - x.max(-1, keepdims=True),
        "softmax": lambda x: jax.nn.softmax(x, axis=-1),
        "log-sum": lambda x: jax.nn.logsumexp(x, axis=-1),
        "norm": normalised,
    }
    most_shared, most_slots = 200 << 10, 32
    for (words, function), (m, n), dtype in itertools.product(
        functions.items(), ((4096, 128256), (2048, 50304), (8, 128256)), ("bfloat16", "float32")
    ):
        if dtype == "float32" and words != "softmax":
            continue
        asked = []
        for parts, tile in itertools.product((2, 4, 8), (4096, 8192)):
            slots = -(-n // (parts * tile))
            if slots <= most_slots and slots * tile * jnp.dtype(dtype).itemsize <= most_shared:
                asked.append((parts, tile))
        shapes = [(m, n), (n,)] if words == "norm" else [(m, n)]
        yield replace(_case("clusters", words, function, *shapes, dtype=dtype), clusters=tuple(asked))


KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "products": products, "uneven": uneven, "short": short, "tiny": tiny, "pairs": pairs, "rows": rows, "columns": columns,
    "groups": groups, "stored": stored, "few": few, "attention": attention, "scores": scores, "beside": beside,
    "clusters": clusters,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """A kernel that is compiled alone. price: as planned, on the device at hand."""

    label: str
    schedule: str
    price: Any
    call: Callable[..., Any]
    structs: tuple[jax.ShapeDtypeStruct, ...]


def ways_of(case: Case, most: int) -> Iterator[Way]:
    """Yields the largest kernel that a program becomes, not compiled yet: as planned and in others, or as the case asks."""
    options = pf.FuseOptions(check=False, price=False)
    if case.clusters:
        for parts, tile in case.clusters[:most]:
            asked = replace(options, target="mosaic_cluster", parts=parts, tiles=(("j", tile),))
            plan = pf.fuse(case.function, options=asked).explain(*case.structs)
            (kernel,) = plan.kernels
            assert kernel.target.name == "mosaic_cluster", kernel.declined
            yield _way(case, plan, kernel)
        return
    plan = pf.fuse(case.function, options=options).trace(*case.structs).fuse("mosaic_gpu").tile().plan
    if not plan.kernels:
        return
    kernel = max(plan.kernels, key=lambda k: k.price.us)
    for placed in itertools.islice(_of_every_target(ways(plan, kernel)), most):
        yield _way(case, plan, kernel_of(kernel.group, placed, kernel.replaced))


def _way(case: Case, plan: Any, made: Any) -> Way:
    names = list(dict.fromkeys(made.reads))
    structs = tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (plan.converted.variable[n] for n in names)
    )

    def alone(*arrays: Any) -> Any:
        return run_phases(made.phases, dict(zip(names, arrays, strict=True)))

    return Way(case.label, f"{made.target.name} {made.schedule}", made.price, alone, structs)


def _of_every_target(placed: Iterable[Any]) -> Iterator[Any]:
    """Yields ways to run a kernel: the first, and then the targets' in turn."""
    first, *others = placed
    yield first
    by_target: dict[str, list[Any]] = {}
    for one in others:
        by_target.setdefault(one.phases[0].target.name, []).append(one)
    for of_each in itertools.zip_longest(*by_target.values()):
        yield from filter(None, of_each)


def _drawn(structs: Sequence[jax.ShapeDtypeStruct]) -> Iterator[Any]:
    for at, struct in enumerate(structs):
        drawn = jax.random.uniform(jax.random.key(at), struct.shape, jnp.float32, 0.25, 1.25)
        yield drawn > 0.5 if struct.dtype == bool else drawn.astype(struct.dtype)


def _compiled(way: Way) -> Any:
    try:
        return jax.jit(way.call).lower(*way.structs).compile()
    except Exception as error:
        return error


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each kernel in each schedule: what is measured and what is predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="threads that compile")
    parser.add_argument("--ways", type=int, default=4, help="schedules of each kernel")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args(words)
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    warnings.simplefilter("ignore")
    with ThreadPoolExecutor(options.jobs) as pool:
        made = [
            (way, pool.submit(_compiled, way))
            for kind in options.kinds or KINDS
            for case in KINDS[kind]()
            for way in ways_of(case, options.ways)
        ]
        calls = [(way, call.result()) for way, call in made]
    rows = []
    for way, call in calls:
        if isinstance(call, Exception):
            print(f"{way.label:52} {way.schedule[:60]:60} {str(call)[:80]}")
            continue
        us = microseconds(call, *_drawn(way.structs))
        rows.append([way.label, way.schedule, round(us, 2), round(way.price.us, 2)])
        print(
            f"{way.label:52} {way.schedule[:60]:60} {us:9.1f} {way.price.us:9.1f} {way.price.us / us:6.2f}", flush=True
        )
    ratios = [price_us / us for _, _, us, price_us in rows]
    print(f"{len(rows)} kernels: predicted over measured {statistics.geometric_mean(ratios):.2f} (geometric mean)")
    if options.out:
        here = {"device": device_at_hand().kind, "jax": jax.__version__}
        head = json.dumps({**here, "columns": ["program", "schedule", "us", "price_us"]})
        with open(options.out, "w") as file:
            file.write(f'{head[:-1]}, "rows": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")


if __name__ == "__main__":
    main()
