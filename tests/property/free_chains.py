"""Chains that nobody wrote: each reduction's term is a random expression of the data and of the reductions before it."""

from tests.property.chains import mask, positions, reduce
from tests.property.programs import Growth

EXPONENTIALS = ("jnp.exp({x} - {m})", "jnp.exp2({x} - {m})", "jnp.exp(0.5 * ({x} - {m}))", "jnp.exp(-({m} - {x}))")
CENTRED = (
    "({x} - {r})",
    "({r} - {x})",
    "(2.0 * {x} - {r})",
    "({x} - 0.5 * {r} + 1.0)",
    "({x} + {r})",
    "({x} - {r} - {s})",
)
FACTORS = (
    "{r}", "(1.0 + {r} * {r})", "jax.lax.rsqrt({r} * {r} + 1.0)", "1.0 / (1.0 + jnp.abs({r}))", "jnp.tanh({r})", "({r} - {s})",
    "jnp.exp(-0.1 * jnp.abs({r}))", "jnp.exp(0.01 * {r})", "jnp.sqrt(jnp.abs({r}) + 0.5)", "jnp.where({r} > 0, {r}, 0.5)", "{x}",
    "{y}", "jnp.maximum({r}, 0.5)", "jnp.log(jnp.abs({r}) + 1.5)",
)  # fmt: skip
OTHERS = (
    "jnp.maximum({x}, {r})", "jnp.abs({x} - {r})", "jnp.cosh(0.1 * ({x} - {r}))", "jnp.where({x} > {r}, {x}, 0.0)",
    "jnp.tanh({x} * {r})", "jnp.round({x} / (1.0 + jnp.abs({r})))", "{x} / (1.0 + {r} * {r})", "jnp.minimum({x} * {r}, {y})",
    "{x} * {x} * {r}",
    "jnp.log1p(jnp.abs({x}) * (1.0 + jnp.abs({r})))", "jnp.exp(-({x} - {r}) ** 2)", "jnp.where({p}, {x} - {r}, 0.0)",
    "jnp.where({p}, {x}, {r})", "jax.nn.sigmoid({x} - {r})", "jnp.sin({x}) * {r} + jnp.cos({x}) * {s}",
)  # fmt: skip


def free_chain(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Between two and four reductions over the same axes, each of an expression of those before it."""
    c = g.c
    if c.chance(25):
        x = mask(g, x, shape, axes)
        if "inf" in g.body[-1] or "e30" in g.body[-1] or "finfo" in g.body[-1]:
            return _exponential_chain(g, x, shape, axes)
    values = [x]
    if c.chance(50):
        values.append(g.input(tuple(e if d in axes or c.chance(50) else 1 for d, e in enumerate(shape))))
    i, j = positions(g, shape, axes)
    known: list[str] = []
    tops: list[tuple[str, str]] = []
    for _ in range(c.integer(2, 4)):
        term = _term(g, values, known, tops, f"({j} <= {i})")
        op = c.pick(["sum", "mean", "sum", "max", "sum", "min"])
        if op == "sum" and c.chance(8):
            r = g.let(reduce("prod", f"(1.0 + 0.1 * jnp.tanh({term}))", axes))
        else:
            r = g.let(reduce(op, term, axes))
        if op == "max" and term in values:
            tops.append((term, r))
        known.append(r)
    g.spare += known[:-1]
    g.outputs.append(known[-1])
    if c.chance(40):
        g.outputs.append(g.let(f"{known[-1]} / (1.0 + jnp.abs({known[0]}))"))
    if c.chance(25):
        g.outputs.append(g.let(f"{x} * jnp.tanh({known[-1]}) + {known[0]}"))
    return None


def _term(g: Growth, values: list[str], known: list[str], tops: list[tuple[str, str]], p: str) -> str:
    c = g.c
    x, y = c.pick(values), c.pick(values)
    if not known:
        return c.pick([x, x, f"{x} * {y}", f"jnp.abs({x})", f"{x} * {x} * 0.5", f"jnp.tanh({x})"])
    names = {"x": x, "y": y, "r": c.pick(known), "s": c.pick(known), "p": p}
    kind = c.integer(0, 9)
    if tops and kind <= 4:
        x, m = c.pick(tops)
        base = c.pick(EXPONENTIALS).format(x=x, m=m)
    elif kind <= 7:
        base = c.pick(CENTRED).format(**names)
        power = c.pick(["", "", " ** 2", " ** 3"])
        base = f"{base}{power}"
    else:
        base = c.pick(OTHERS).format(**names)
    for _ in range(c.pick([0, 1, 1, 2])):
        base = f"{base} * {c.pick(FACTORS).format(**names)}"
    if c.chance(10):
        base = f"({base} + {c.pick(CENTRED).format(**names)})"
    return base


def _exponential_chain(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """The chains whose terms are zero where the values are -inf."""
    c = g.c
    m = g.let(reduce("max", x, axes))
    e = g.let(c.pick(EXPONENTIALS[:2]).format(x=x, m=m))
    w = g.input(tuple(n if d in axes or c.chance(50) else 1 for d, n in enumerate(shape)))
    total = g.let(reduce("sum", e, axes))
    centre = g.let(reduce("sum", f"{e} * {w} / {total}", axes))
    spread = c.pick(["({w} - {c}) ** 2", "jnp.abs({w} - {c})", "({w} - {c}) * {w}", "({w} - {c}) ** 3"]).format(
        w=w, c=centre
    )
    second = g.let(f"{reduce('sum', f'{e} * {spread}', axes)} / {total}")
    g.outputs += [second, g.let(f"{m} + jnp.log({total})")]
    g.spare += [total, centre]
