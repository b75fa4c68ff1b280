"""Tile programs with loops inside loops and with buffers, written by hand: each with what it computes, as nests and in NumPy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, apply, const, convert, index, mul, read, select, sub
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Buffer,
    Carry,
    Contract,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Set,
    Store,
    TileProgram,
    before,
    block_start,
    to_visit,
    verify,
    visited,
)

F = "float32"
I, J, K, M, N, H = Axis("i", 11), Axis("j", 45), Axis("k", 21), Axis("m", 19), Axis("n", 37), Axis("h", 27)  # noqa: E741
ZERO, LEAST = const(0.0, F), const(-np.inf, F)


def whole(n):
    return const(n, "int32")


def start(axis):
    return read(block_start(axis), (), "int32")


def over(axis, tile, body, tails, *carries, window=None, inside=False, **options):
    """A loop over an axis, or over the window of it that is open. body: from the tile of a segment to the statements of a trip."""
    length = axis.extent if window is None else window
    count, rest = divmod(length, tile)
    if tails == "masked":
        segments = [Segment(whole(0), whole(count + (rest > 0)), 0, tile, tuple(body(tile)), edge=True)]
    else:
        segments = [Segment(whole(0), whole(count), 0, tile, tuple(body(tile)))] if count else []
        segments += [Segment(whole(0), whole(1), count * tile, rest, tuple(body(rest)))] if rest else []
    origin = start(axis) if inside else whole(0)
    options = {"to_visit": whole(axis.extent), "first": whole(0)} | options
    return Loop(axis, carries, tuple(segments), origin=origin, **options)


def rounded(extent, tile):
    return -(-extent // tile) * tile


def kernel(name, inputs, outputs, grid, tiles, *body):
    return verify(TileProgram(name, inputs, outputs, tuple(grid), tuple(tiles), body))


def tile_of(name, *axes):
    return read(name, axes, F)


@dataclass(frozen=True)
class Example:
    """A program for exact and for masked tails, the nests that it computes, and the same with NumPy."""

    program: Callable[[str], TileProgram]
    nests: LoopProgram
    reference: Callable[..., np.ndarray]

    def inputs(self, seed=0):
        generator = np.random.default_rng(seed)
        return {t.name: generator.normal(size=[a.extent for a in t.axes]) for t in self.nests.inputs}

    def expected(self, inputs):
        (name,) = self.nests.outputs
        return {name: self.reference(*inputs.values())}


# --- products

A, B, D = Tensor("a", (M, K), F), Tensor("b", (K, N), F), Tensor("d", (N, H), F)
C, E = Tensor("c", (M, N), F), Tensor("e", (M, H), F)
MAKES_C = Nest("c", (M, N), mul(read("a", (M, K), F), read("b", (K, N), F)), F, (K,), SUM)
MAKES_E = Nest("e", (M, H), mul(read("c", (M, N), F), read("d", (N, H), F)), F, (N,), SUM)


def product_loop(tails):
    """C of the current windows of m and n, summed over k in tiles of eight."""

    def step(_):
        return (
            Load("a.t", "a", (M, K), F), Load("b.t", "b", (K, N), F),
            Contract("c.t", (M, N), tile_of("a.t", M, K), tile_of("b.t", K, N), (K,), F),
            Let("c.next", (M, N), add(tile_of("c.acc", M, N), tile_of("c.t", M, N))),
        )  # fmt: skip

    return over(K, 8, step, tails, Carry("c.acc", (M, N), F, ZERO, "c.next"))


def product(tails):
    grid = (M, 8), (N, 16)
    store = Store("c", (M, N), tile_of("c.acc", M, N))
    return kernel("product", (A, B), (C,), grid, (*grid, (K, 8)), product_loop(tails), store)


def deep(tails):
    """(A B) D in blocks over m and h: the whole chain for each."""

    def step(_):
        return (
            product_loop(tails), Load("d.t", "d", (N, H), F),
            Contract("e.t", (M, H), tile_of("c.acc", M, N), tile_of("d.t", N, H), (N,), F),
            Let("e.next", (M, H), add(tile_of("e.acc", M, H), tile_of("e.t", M, H))),
        )  # fmt: skip

    grid = (M, 8), (H, 16)
    loop = over(N, 16, step, tails, Carry("e.acc", (M, H), F, ZERO, "e.next"))
    store = Store("e", (M, H), tile_of("e.acc", M, H))
    return kernel("deep", (A, B, D), (E,), grid, (*grid, (N, 16), (K, 8)), loop, store)


def flat(tails):
    """(A B) D in blocks over m: all of E's columns in a buffer, to which a loop over them adds."""

    def columns(_):
        return (
            Get("e.old", "e.buf", (M, H), F), Load("d.t", "d", (N, H), F),
            Contract("e.t", (M, H), tile_of("c.acc", M, N), tile_of("d.t", N, H), (N,), F),
            Set("e.buf", (M, H), add(tile_of("e.old", M, H), tile_of("e.t", M, H))),
        )  # fmt: skip

    def leave(_):
        return Get("e.all", "e.buf", (M, H), F), Store("e", (M, H), tile_of("e.all", M, H))

    def step(_):
        return product_loop(tails), over(H, 16, columns, tails)

    buffer = Buffer("e.buf", (M, H), (8, rounded(H.extent, 16)), F, ZERO)
    tiles = (M, 8), (H, 16), (N, 16), (K, 8)
    return kernel(
        "flat", (A, B, D), (E,), tiles[:1], tiles, buffer, over(N, 16, step, tails), over(H, 16, leave, tails)
    )


def triangle(tails):
    """C, of which column n has only the first n + 1 terms: the loop over k ends behind the window of n."""

    def columns(tile):
        last = add(start(N), whole(tile - 1))
        stop = apply("min", whole(3), add(apply("div", last, whole(7)), whole(1)))
        below = apply("le", index(K), index(N))
        step = (
            Load("a.t", "a", (M, K), F), Load("b.t", "b", (K, N), F),
            Let("b.seen", (K, N), select(below, tile_of("b.t", K, N), ZERO)),
            Contract("c.t", (M, N), tile_of("a.t", M, K), tile_of("b.seen", K, N), (K,), F),
            Let("c.next", (M, N), add(tile_of("c.acc", M, N), tile_of("c.t", M, N))),
        )  # fmt: skip
        carry = Carry("c.acc", (M, N), F, ZERO, "c.next")
        trips = Segment(whole(0), stop, 0, 7, step)
        inner = Loop(K, (carry,), (trips,), mul(stop, whole(7)), whole(0))
        return inner, Store("c", (M, N), tile_of("c.acc", M, N))

    tiles = (M, 8), (N, 16), (K, 7)
    return kernel("triangle", (A, B), (C,), tiles[:1], tiles, over(N, 16, columns, tails))


BELOW = select(apply("le", index(K), index(N)), mul(read("a", (M, K), F), read("b", (K, N), F)), ZERO)


# --- two levels over one axis

X, Y = Tensor("x", (I, J), F), Tensor("y", (I,), F)
IN_X, IN_Y = read("x", (I, J), F), read("y", (I,), F)


def two_levels(name, carried, step, result, tails):
    """A loop over j in windows of sixteen, and in each a loop in tiles of four. carried: (name, next, initial) of each value."""

    def inner(tile):
        return over(J, 4, lambda _: step, tails, *(Carry(f"{n}.in", (I,), F, tile_of(n, I), f"{n}.step") for n, _ in carried),
                    window=tile, inside=True), *(Let(f"{n}.next", (I,), tile_of(f"{n}.in", I)) for n, _ in carried)  # fmt: skip

    loop = over(J, 16, inner, tails, *(Carry(n, (I,), F, init, f"{n}.next") for n, init in carried))
    return kernel(name, (X,), (Y,), ((I, 4),), ((I, 4), (J, 16)), loop, Store("y", (I,), result))


def row_sum(tails):
    step = (
        Load("x.t", "x", (I, J), F), Reduce("r", (I,), SUM, tile_of("x.t", I, J), (J,)),
        Let("s.step", (I,), add(tile_of("s.in", I), tile_of("r", I))),
    )  # fmt: skip
    return two_levels("row_sum", [("s", ZERO)], step, tile_of("s", I), tails)


def exponentials(tails):
    """The maximum of a row plus the logarithm of the sum of the exponentials below it: what was summed is repaired."""
    seen = select(apply("lt", index(J), whole(J.extent)), tile_of("x.t", I, J), LEAST)
    moved = apply("exp", sub(tile_of("m.in", I), tile_of("m.step", I)))
    step = (
        Load("x.t", "x", (I, J), F), Reduce("r", (I,), MAX, seen, (J,)),
        Let("m.step", (I,), apply("max", tile_of("m.in", I), tile_of("r", I)), pinned=True),
        Reduce("p", (I,), SUM, apply("exp", sub(seen, tile_of("m.step", I))), (J,)),
        Let("l.step", (I,), add(mul(tile_of("l.in", I), moved), tile_of("p", I))),
    )  # fmt: skip
    result = add(tile_of("m", I), apply("log", tile_of("l", I)))
    return two_levels("exponentials", [("m", LEAST), ("l", ZERO)], step, result, tails)


def log_sum_exp(x):
    top = x.max(1, keepdims=True)
    return (top + np.log(np.exp(x - top).sum(1, keepdims=True)))[:, 0]


TOP = read("top", (I,), F)
LOG_SUM_EXP = LoopProgram(
    (X,),
    (
        Nest("top", (I,), IN_X, F, (J,), MAX),
        Nest("total", (I,), apply("exp", sub(IN_X, TOP)), F, (J,), SUM),
        Nest("y", (I,), add(TOP, apply("log", read("total", (I,), F))), F),
    ),
    ("y",),
)

Z = Tensor("z", (I, J), F)
PIECES = LoopProgram((X,), (Nest("z", (I, J), add(IN_X, convert(index(J), F)), F),), ("z",))


def pieces(tails, size=8):
    """Blocks of j, and in each a loop that stores a piece after the other; of the last block, some lie past the end."""
    step = Load("x.t", "x", (I, J), F), Store("z", (I, J), add(tile_of("x.t", I, J), convert(index(J), F)))
    visit = apply("min", whole(32), sub(whole(J.extent), start(J)))
    loop = over(J, size, lambda _: step, tails, window=32, inside=True, to_visit=visit, first=start(J))
    return kernel("pieces", (X,), (Z,), ((I, 4), (J, 32)), ((I, 4), (J, 32)), loop)


def staged(tails):
    """Windows of j that lie in a buffer of their size: pieces of four are set, and pieces of eight are read."""

    def window(tile):
        put = Load("x.t", "x", (I, J), F), Set("x.buf", (I, J), add(tile_of("x.t", I, J), convert(index(J), F)))
        take = Get("x.kept", "x.buf", (I, J), F), Store("z", (I, J), tile_of("x.kept", I, J))
        pieces = ((4, put), (8, take))
        loops = (over(J, n, lambda _, s=step: s, tails, window=tile, inside=True) for n, step in pieces)
        return Buffer("x.buf", (I, J), (4, tile), F, ZERO), *loops

    return kernel("staged", (X,), (Z,), ((I, 4),), ((I, 4), (J, 16)), over(J, 16, window, tails))


def kept(tails):
    """A row that a first loop keeps in a buffer, with its maximum, and a second one reads."""
    seen = select(apply("lt", index(J), whole(J.extent)), tile_of("x.t", I, J), LEAST)
    first = (
        Load("x.t", "x", (I, J), F), Let("x.seen", (I, J), seen), Set("x.buf", (I, J), tile_of("x.seen", I, J)),
        Reduce("r", (I,), MAX, tile_of("x.seen", I, J), (J,)),
        Let("m.next", (I,), apply("max", tile_of("m", I), tile_of("r", I))),
    )  # fmt: skip
    second = (
        Get("x.kept", "x.buf", (I, J), F),
        Reduce("p", (I,), SUM, apply("exp", sub(tile_of("x.kept", I, J), tile_of("m", I))), (J,)),
        Let("l.next", (I,), add(tile_of("l", I), tile_of("p", I))),
    )
    return kernel(
        "kept", (X,), (Y,), ((I, 4),), ((I, 4), (J, 16)),
        Buffer("x.buf", (I, J), (4, rounded(J.extent, 16)), F, ZERO, "shared"),
        over(J, 16, lambda _: first, tails, Carry("m", (I,), F, LEAST, "m.next")),
        over(J, 16, lambda _: second, tails, Carry("l", (I,), F, ZERO, "l.next")),
        Store("y", (I,), add(tile_of("m", I), apply("log", tile_of("l", I)))),
    )  # fmt: skip


def steps(tails):
    """A buffer of one element for each row and a trip's position, written element by element and read in tiles."""
    one = (
        Load("x.t", "x", (I, J), F), Reduce("r", (I,), SUM, mul(tile_of("x.t", I, J), whole_float(2)), (J,)),
        Let("r.here", (I, J), tile_of("r", I)), Set("x.buf", (I, J), tile_of("r.here", I, J)),
    )  # fmt: skip
    rest = Get("x.kept", "x.buf", (I, J), F), Store("z", (I, J), tile_of("x.kept", I, J))
    return kernel(
        "steps", (X,), (Z,), ((I, 1),), ((I, 1), (J, 8)),
        Buffer("x.buf", (I, J), (1, rounded(J.extent, 8)), F, ZERO, "shared"),
        over(J, 1, lambda _: one, tails), over(J, 8, lambda _: rest, tails),
    )  # fmt: skip


def places(tails):
    """What trips know of where they are, added up over all of the inner loop, and behind it of the outer one."""

    def here():
        names = enumerate((block_start(J), before(J), visited(J), to_visit(J)))
        one, two, three, four = (mul(read(name, (), "int32"), whole(10 * n + 1)) for n, name in names)
        return convert(add(add(one, two), add(three, four)), F)

    def outer(tile):
        step = (Let("s.step", (I,), add(tile_of("s.in", I), here())),)
        inner = over(
            J, 4, lambda _: step, tails, Carry("s.in", (I,), F, tile_of("s", I), "s.step"), window=tile, inside=True
        )
        return inner, Let("s.next", (I,), add(tile_of("s.in", I), here()))

    loop = over(J, 16, outer, tails, Carry("s", (I,), F, ZERO, "s.next"))
    return kernel("places", (X,), (Y,), ((I, 4),), ((I, 4), (J, 16)), loop, Store("y", (I,), tile_of("s", I)))


def places_of(tile):
    starts = np.arange(0, 48, tile)
    return int((starts + 11 * starts + 21 * np.minimum(starts + tile, 45) + 31 * 45).sum())


PLACES = float(places_of(4) + places_of(16))


def whole_float(n):
    return const(float(n), F)


EXAMPLES = {
    "product": Example(product, LoopProgram((A, B), (MAKES_C,), ("c",)), lambda a, b: a @ b),
    "deep": Example(deep, LoopProgram((A, B, D), (MAKES_C, MAKES_E), ("e",)), lambda a, b, d: a @ b @ d),
    "flat": Example(flat, LoopProgram((A, B, D), (MAKES_C, MAKES_E), ("e",)), lambda a, b, d: a @ b @ d),
    "triangle": Example(
        triangle,
        LoopProgram((A, B), (Nest("c", (M, N), BELOW, F, (K,), SUM),), ("c",)),
        lambda a, b: a @ np.where(np.arange(21)[:, None] <= np.arange(37), b, 0),
    ),
    "places": Example(
        places, LoopProgram((X,), (Nest("y", (I,), whole_float(PLACES), F),), ("y",)), lambda x: np.full(11, PLACES)
    ),
    "row_sum": Example(row_sum, LoopProgram((X,), (Nest("y", (I,), IN_X, F, (J,), SUM),), ("y",)), lambda x: x.sum(1)),
    "exponentials": Example(exponentials, LOG_SUM_EXP, log_sum_exp),
    "pieces": Example(pieces, PIECES, lambda x: x + np.arange(45)),
    "singles": Example(lambda tails: pieces(tails, 1), PIECES, lambda x: x + np.arange(45)),
    "staged": Example(staged, PIECES, lambda x: x + np.arange(45)),
    "kept": Example(kept, LOG_SUM_EXP, log_sum_exp),
    "steps": Example(
        steps, LoopProgram((X,), (Nest("z", (I, J), mul(IN_X, whole_float(2)), F),), ("z",)), lambda x: 2 * x
    ),
}
