"""Programs far from attention: values of any shape and type, moved, cut, joined, cast, reduced over any axis, and chained.

Statements are executed on tracers while the program grows, so that shapes and types are known, and what JAX rejects is dropped.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.property.chains import chain, mask, prologue
from tests.property.free_chains import free_chain
from tests.property.programs import AXIS_NAMES, Chooser, Growth, Input, Program

EXTENTS = (3, 5, 2, 7, 4, 11, 13, 6, 9, 1, 12, 8, 10)
LARGEST = 1500
UNARY = (
    "jnp.tanh({x})", "jnp.abs({x})", "-{x}", "{x} * 0.5", "jnp.sin({x})", "jnp.exp(-jnp.abs({x}))",
    "jnp.sqrt(jnp.abs({x}) + 0.1)",
    "jax.lax.rsqrt({x} * {x} + 0.5)", "jnp.log1p(jnp.abs({x}))", "jnp.expm1(jnp.tanh({x}))", "jax.lax.erf({x} * 1.0)",
    "jax.nn.gelu({x})", "jax.nn.silu({x})", "jax.nn.relu({x})", "jax.nn.softplus({x})", "jax.nn.sigmoid({x})",
    "jax.nn.elu({x})",
    "(jnp.abs({x}) + 0.5) ** 1.5", "(jnp.abs({x}) + 0.5) ** -0.5", "jnp.square({x}) * 0.25", "jnp.cos({x})",
    "1.0 / (1.0 + {x} * {x})",
    "jnp.clip({x}, -1.0, 1.5)", "jax.nn.leaky_relu({x})", "jnp.log(jnp.abs({x}) + 1.0)",
    "jnp.exp2(jnp.minimum({x}, 3.0))",
    "jax.nn.hard_tanh({x})", "jnp.round({x} * 2.0)", "jnp.sign({x})", "jnp.floor({x})", "{x} ** 3 * 0.1",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "jnp.maximum({x}, {y})", "jnp.minimum({x}, {y})",
    "{x} / (jnp.abs({y}) + 1.0)",
    "jnp.where({x} > {y}, {x}, {y} * 0.5)", "{x} / jnp.sqrt({y} * {y} + 0.5)", "jnp.hypot({x} * 1.0, {y} * 1.0 + 0.1)",
    "jnp.logaddexp({x} * 1.0, {y} * 1.0)", "jnp.where({y} > 0, jnp.where({x} > 0, {x}, 0.1), {y})",
    "jnp.where(({x} > 0) & ({y} < 1), {x} - {y}, 0.25)", "jnp.exp(-({x} - {y}) ** 2)",
)  # fmt: skip
INTEGER = (
    "{x} // 2", "{x} % 3", "{x} * 3 - 1", "{x} & 3", "({x} | 1) * 2", "jnp.where({x} > 0, {x}, -{x} + 1)", "{x} ^ 5",
    "jnp.maximum({x}, 1) * {x}", "{x} - jnp.max({x}, axis={a}, keepdims=True)",
    "{x} + jnp.sum({x}, axis={a}, keepdims=True)",
)  # fmt: skip
SCORES = (
    "5.0 * jnp.tanh({s} / 5.0)", "{s} * jax.nn.sigmoid({s})", "jnp.where({s} > 0, {s}, 0.1 * {s})",
    "jnp.log1p(jnp.exp(jnp.minimum({s}, 5.0)))",
    "-jnp.abs({s})", "{s} / (1.0 + jnp.abs({s}))", "jax.nn.relu({s}) ** 2 * 0.1", "{s}",
)  # fmt: skip
MAPPED = (
    "jnp.sum({r} * {r})", "jax.nn.softmax({r})", "{r} - jnp.max({r})", "jnp.exp({r} - jax.nn.logsumexp({r}))",
    "{r} - jnp.mean({r})",
    "jnp.var({r})", "jnp.max({r}) + jnp.min({r})", "jnp.sum(jax.nn.softmax({r}) * {r})",
    "{r} / (1.0 + jnp.sum(jnp.abs({r})))",
)  # fmt: skip


@dataclass
class Mix(Growth):
    """A program whose values are known as tracers."""

    scope: dict[str, Any] = field(default_factory=lambda: {"jnp": jnp, "jax": jax, "np": np, "lax": jax.lax})

    def let(self, value: str) -> str:
        traced = eval(value, self.scope)
        name = super().let(value)
        self.scope[name] = traced
        return name

    def input(self, shape: tuple[int, ...], dtype: str | None = None, offset: float = 0.0, scale: float = 1.0) -> str:
        """An array of its own type; a caller that does not choose the type gets it as float32 in most programs."""
        chosen = dtype or self.c.pick(["float32", "float32", "float32", "float32", "bfloat16", "float16", "int32"])
        name = f"x{len(self.inputs)}"
        self.scope[name] = jnp.zeros(shape, chosen)
        self.inputs.append(Input(name, shape, chosen, offset, scale))
        raw = dtype is not None or chosen == "float32" or (chosen != "int32" and self.c.chance(30))
        return name if raw else self.let(f"{name}.astype(jnp.float32)")

    def dtype(self, name: str) -> Any:
        return self.scope[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.scope[name].shape)


def grow_mix(c: Chooser) -> Program:
    grown: list[Program] = []

    def run() -> None:
        grown.append(_grow(c))

    jax.eval_shape(run)
    return grown[0]


def _grow(c: Chooser) -> Program:
    g = Mix(c)
    types = ["float32", "float32", "float32", "float32", "bfloat16", "float16", "int32"]
    pool = [g.input(_shape(c), c.pick(types), c.pick([0.0, 0.0, 0.0, 2.0, 30.0])) for _ in range(c.pick([1, 1, 2]))]
    pool = [_floating(g, x) if c.chance(60) else x for x in pool]
    for n in range(c.integer(2, 7)):
        step = _chain if n == 1 else c.pick(STEPS)
        x = pool[-1] if c.chance(50) else c.pick(pool)
        if prod(g.shape(x)) < 2 and not c.chance(5):
            x = max(pool, key=lambda y: prod(g.shape(y)))
        before = len(g.inputs), list(g.body), list(g.outputs), list(g.spare), dict(g.scope), g.masked
        try:
            made = step(g, x, pool)
            if any(prod(g.shape(y)) > LARGEST or 0 in g.shape(y) for y in made):
                raise ValueError("too large")
        except (TypeError, ValueError, IndexError, AssertionError, NotImplementedError):
            kept, g.body, g.outputs, g.spare, g.scope, g.masked = before
            del g.inputs[kept:]
            continue
        pool += made
    return _finish(g, pool)


def _finish(g: Mix, pool: list[str]) -> Program:
    c = g.c
    text = "\n".join(g.body)
    unused = [
        x
        for x in pool
        if x.startswith("t") and f"{x} " not in f"{text} ".replace(f"{x} =", "").replace(")", " ").replace(",", " ")
    ]
    wanted = [*g.outputs, *unused[-3:]]
    wanted += [c.pick(g.spare)] if g.spare and c.chance(40) else []
    wanted += [c.pick(pool)] if c.chance(30) else []
    results = list(dict.fromkeys(wanted or pool[-1:]))[-5:]
    body = live(g.body, results)
    names = {i.name for i in g.inputs if any(i.name in words(line) for line in (*body, *results))}
    inputs = tuple(i for i in g.inputs if i.name in names)
    if not inputs:
        return _grow(c)
    tiles: tuple[tuple[str, int], ...] = ()
    if not c.chance(6):
        tiles = tuple((name, c.pick([4, 2, 3, 5, 1, 6, 8, 7])) for name in AXIS_NAMES)
    return Program(inputs, tuple(body), tuple(results), tiles, c.integer(0, 3))


def words(text: str) -> set[str]:
    return set("".join(ch if ch.isalnum() or ch == "_" else " " for ch in text).split())


def live(body: list[str], results: list[str]) -> list[str]:
    """The statements that the results depend on."""
    needed, kept = set(results), []
    for line in reversed(body):
        name, value = line.split(" = ", 1)
        if name in needed:
            kept.append(line)
            needed |= words(value)
    return kept[::-1]


def _shape(c: Chooser) -> tuple[int, ...]:
    rank = c.pick([2, 3, 2, 1, 3, 4])
    shape = tuple(c.pick(EXTENTS) for _ in range(rank))
    while prod(shape) > 700:
        shape = tuple(-(-e // 2) for e in shape)
    return shape


def _floating(g: Mix, x: str) -> str:
    return x if jnp.issubdtype(g.dtype(x), jnp.floating) else g.let(f"{x}.astype(jnp.float32)")


def _axis(g: Mix, x: str) -> int:
    long = [d for d, n in enumerate(g.shape(x)) if n > 1]
    if not long or g.c.chance(3):
        return g.c.integer(0, len(g.shape(x)) - 1)
    return long[-1] if g.c.chance(35) else g.c.pick(long)


def _axes(g: Mix, x: str) -> tuple[int, ...]:
    rank = len(g.shape(x))
    axes = {_axis(g, x)}
    if g.c.chance(25):
        axes |= {g.c.integer(0, rank - 1)}
    return tuple(sorted(axes)) if not g.c.chance(5) else tuple(range(rank))


# --- steps: from a value to new values


def _permute(g: Mix, x: str, pool: list[str]) -> list[str]:
    rank = len(g.shape(x))
    order = list(range(rank))
    for d in range(rank - 1):
        e = g.c.integer(d, rank - 1)
        order[d], order[e] = order[e], order[d]
    a, b = g.c.integer(0, rank - 1), g.c.integer(0, rank - 1)
    return [
        g.let(
            g.c.pick(
                [
                    f"jnp.transpose({x}, {tuple(order)})",
                    f"{x}.T",
                    f"jnp.swapaxes({x}, {a}, {b})",
                    f"jnp.moveaxis({x}, {a}, {b})",
                ]
            )
        )
    ]


def _stride(g: Mix, x: str, pool: list[str]) -> list[str]:
    d = _axis(g, x)
    cut = g.c.pick(["::-1", "::2", "1::2", "::3", "::-2"])
    return [g.let(f"{x}[{':, ' * d}{cut}]" if g.c.chance(80) else f"jnp.flip({x}, {d})")]


def _slice(g: Mix, x: str, pool: list[str]) -> list[str]:
    d, c = _axis(g, x), g.c
    n = g.shape(x)[d]
    low = c.integer(0, max(0, n // 2))
    high = c.integer(min(low + 1, n), n)
    kind = c.integer(0, 5)
    if kind == 0:
        return [g.let(f"{x}[{':, ' * d}{low}]")]
    if kind == 1:  # the parts go separate ways
        y, z = g.let(f"{x}[{':, ' * d}:{max(1, low)}]"), g.let(f"{x}[{':, ' * d}{low}:]")
        return [y, z]
    if kind == 2:
        return [g.let(f"jax.lax.dynamic_slice_in_dim({x}, {low}, {max(1, high - low)}, {d})")]
    return [g.let(f"{x}[{':, ' * d}{low}:{high}]")]


def _join(g: Mix, x: str, pool: list[str]) -> list[str]:
    d, c = _axis(g, x), g.c
    shape = g.shape(x)
    alike = [
        y
        for y in pool
        if g.shape(y)[:d] == shape[:d] and g.shape(y)[d + 1 :] == shape[d + 1 :] and len(g.shape(y)) == len(shape)
    ]
    y = c.pick(alike) if alike and c.chance(70) else g.input((*shape[:d], c.integer(1, 4), *shape[d + 1 :]))
    same = [z for z in pool if g.shape(z) == shape]
    return [g.let(c.pick([
        f"jnp.concatenate([{x}, {y}], {d})", f"jnp.concatenate([{y}, {x}], {d})", f"jnp.stack([{x}, {c.pick(same)}], {d})",
        f"jnp.roll({x}, {c.integer(1, 3)}, {d})", f"jnp.repeat({x}, 2, {d})",
        f"jnp.pad({x}, {tuple((c.integer(0, 1), c.integer(0, 2)) if k == d else (0, 0) for k in range(len(shape)))})",
    ]))]  # fmt: skip


def _reshape(g: Mix, x: str, pool: list[str]) -> list[str]:
    shape, c = g.shape(x), g.c
    d = _axis(g, x)
    factors = [k for k in range(2, shape[d]) if shape[d] % k == 0]
    if factors and c.chance(60):
        k = c.pick(factors)
        return [g.let(f"{x}.reshape({(*shape[:d], k, shape[d] // k, *shape[d + 1 :])})")]
    if len(shape) > 1:
        d = c.integer(0, len(shape) - 2)
        return [
            g.let(
                f"{x}.reshape({(*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])})"
                if c.chance(80)
                else f"{x}.ravel()"
            )
        ]
    return [g.let(f"{x}[{c.pick(['None', ':, None'])}]")]


def _cast(g: Mix, x: str, pool: list[str]) -> list[str]:
    to = g.c.pick(["jnp.bfloat16", "jnp.float16", "jnp.float32", "jnp.int32", "jnp.bfloat16", "jnp.int8"])
    return [g.let(f"jnp.clip({x}, -10, 10).astype({to})" if "int" in to else f"{x}.astype({to})")]


def _unary(g: Mix, x: str, pool: list[str]) -> list[str]:
    return [g.let(g.c.pick(UNARY).format(x=x))]


def _binary(g: Mix, x: str, pool: list[str]) -> list[str]:
    shape, c = g.shape(x), g.c

    def fits(y: str) -> bool:
        try:
            return prod(np.broadcast_shapes(shape, g.shape(y))) <= LARGEST
        except ValueError:
            return False

    known = [y for y in pool if y != x and fits(y)]
    if known and c.chance(60):
        y = c.pick(known)
    else:
        y = g.input(tuple(e if c.chance(60) else 1 for e in shape[c.integer(0, len(shape)) if c.chance(30) else 0 :]))
    return [g.let(c.pick(BINARY).format(x=x, y=y))]


def _reduction(g: Mix, x: str, pool: list[str]) -> list[str]:
    c, axes = g.c, _axes(g, x)
    over = f"axis={axes[0] if len(axes) == 1 else axes}"
    kept = ", keepdims=True" if c.chance(50) else ""
    kind = c.integer(0, 9)
    if kind <= 4:
        op = c.pick(["sum", "max", "mean", "min", "sum", "max", "var", "std", "ptp"])
        y = g.let(f"jnp.{op}({x}, {over}{kept})")
    elif kind == 5:
        y = g.let(f"jnp.prod(jnp.tanh({x}) + 1.0, {over}{kept})")
    elif kind == 6:
        y = g.let(f"jnp.{c.pick(['any', 'all'])}({x} > {c.pick(['0', '-1', '1.5'])}, {over}{kept})")
    elif kind == 7:
        y = g.let(f"jnp.{c.pick(['argmax', 'argmin'])}({x}, axis={axes[0]}{kept})")
    elif kind == 8:
        y = g.let(c.pick([f"jax.nn.logsumexp({x} * 1.0, {over}{kept})", f"jnp.linalg.norm({x} * 1.0, axis={axes[0]}{kept})",
                          f"jnp.count_nonzero({x} > 0, {over}{kept})", f"jnp.average({x}, {over}{kept})"]))  # fmt: skip
    else:
        running = c.pick(
            ["jnp.cumsum({x}", "jax.lax.cummax({x}", "jnp.cumsum({x}[::-1]", "jnp.cumprod(jnp.tanh({x}) + 1.0"]
        )
        y = g.let(f"{running.format(x=x)}, axis={axes[0]})")
    if kept and kind < 6 and c.chance(50):  # a dependent reduction follows
        z = g.let(c.pick([f"{x} - {y}", f"jnp.exp(-jnp.abs({x} - {y}))", f"{x} / (1.0 + jnp.abs({y}))", f"{x} * {y}"]))
        return [y, z, g.let(f"jnp.{c.pick(['sum', 'max', 'min', 'mean'])}({z}, {over})")] if c.chance(60) else [y, z]
    return [y]


def _masked(g: Mix, x: str, pool: list[str]) -> list[str]:
    axes = (_axis(g, x),)
    y = _floating(g, x)
    return [g.let(f"jnp.where({mask_of(g, y, axes)}, {y}, {g.c.pick(['0.0', '-1.0', '0.5'])})")]


def mask_of(g: Mix, x: str, axes: tuple[int, ...]) -> str:
    """A mask, by position or from data, of the shape of `x`."""
    made = mask(g, x, g.shape(x), axes)
    return f"jnp.isfinite({made})" if g.c.chance(10) else words_of_mask(g)


def words_of_mask(g: Mix) -> str:
    """The predicate that the last mask was made of."""
    line = g.body.pop()
    name, value = line.split(" = ", 1)
    del g.scope[name]
    inner = value.split("jnp.where(", 1)[1]
    return inner.split(",", 1)[0]


def _einsum(g: Mix, x: str, pool: list[str]) -> list[str]:
    c, shape = g.c, g.shape(x)
    letters = "abcdef"[: len(shape)]
    shared = [n for n in letters if c.chance(50)] or [c.pick(letters)]
    extents = dict(zip(letters, shape, strict=True)) | {"z": c.pick((3, 2, 5, 1))}
    order = shared + (["z"] if c.chance(60) else [])
    order = order[::-1] if c.chance(40) else order
    out = [n for n in letters if n not in shared or c.chance(30)] + (["z"] if "z" in order else [])
    out = out[::-1] if c.chance(40) else out
    v = g.input(tuple(extents[n] for n in order), c.pick(["float32", "float32", None]))
    first = c.chance(50)
    spec = f"{letters},{''.join(order)}" if first else f"{''.join(order)},{letters}"
    operands = f"{x}, {v}" if first else f"{v}, {x}"
    return [g.let(f"jnp.einsum('{spec}->{''.join(out)}', {operands})")]


def _chain(g: Mix, x: str, pool: list[str]) -> list[str]:
    axes, shape = _axes(g, x), g.shape(x)
    if not shape or not (jnp.issubdtype(g.dtype(x), jnp.floating) or g.c.chance(30)):
        return []
    if g.c.chance(40):
        x = prologue(g, x, shape, axes)
    before = len(g.outputs)
    (free_chain if g.c.chance(35) else chain)(g, x, shape, axes)
    return list(g.outputs[before:])


def _score(g: Mix, x: str, pool: list[str]) -> list[str]:
    """A product of queries and keys, a score function of the user's own, and a chain over the keys."""
    c, shape = g.c, g.shape(x)
    if len(shape) < 2:
        return []
    keys = g.input((*shape[:-2], c.pick(EXTENTS), shape[-1]), "float32")
    b = "bc"[: len(shape) - 2]
    s = g.let(
        f"jnp.einsum('{b}id,{b}jd->{b}ij', {x}, {keys}) * 0.3"
        if c.chance(50)
        else f"{x} @ jnp.swapaxes({keys}, -1, -2)"
    )
    s = g.let(c.pick(SCORES).format(s=s))
    before = len(g.outputs)
    chain(g, s, g.shape(s), (len(shape) - 1,))
    return [s, *g.outputs[before:]]


def _mapped(g: Mix, x: str, pool: list[str]) -> list[str]:
    c, inner = g.c, g.c.pick(MAPPED).format(r="r")
    d = _axis(g, x)
    x = _floating(g, x)
    row, second = g.let(f"jnp.take({x}, 0, axis={d})"), inner.replace("r)", "r + s)", 1)
    return [g.let(c.pick([
        f"jax.vmap(lambda r: {inner}, in_axes={d})({x})", f"jax.vmap(lambda r: {inner})({x})", f"jax.jit(lambda r: {inner})({x})",
        f"jax.lax.map(lambda r: {inner}, {x})", f"jax.vmap(jax.vmap(lambda r: {inner}))({x})",
        f"jax.checkpoint(lambda r: {inner})({x})", f"jax.vmap(lambda r, s: {second}, in_axes=({d}, None))({x}, {row})",
    ]))]  # fmt: skip


def _integer(g: Mix, x: str, pool: list[str]) -> list[str]:
    if not jnp.issubdtype(g.dtype(x), jnp.integer):
        x = g.input(_shape(g.c), "int32")
    return [g.let(g.c.pick(INTEGER).format(x=x, a=_axis(g, x)))]


def _scalar(g: Mix, x: str, pool: list[str]) -> list[str]:
    y = g.let(f"jnp.{g.c.pick(['sum', 'max', 'mean', 'min', 'std'])}({x})")
    return [
        y,
        g.let(
            g.c.pick(
                [
                    f"{x} / (1.0 + jnp.abs({y}))",
                    f"{x} - {y}",
                    f"{x} + jnp.tanh({y})",
                    f"jnp.exp(jnp.minimum({x} - {y}, 2.0))",
                ]
            )
        ),
    ]


STEPS = (
    _chain, _chain, _binary, _reduction, _permute, _slice, _reshape, _chain, _unary, _masked, _einsum, _cast, _reduction, _chain,
    _score, _stride, _join, _mapped, _integer, _scalar, _chain, _reduction, _binary,
)  # fmt: skip
