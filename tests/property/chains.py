"""Programs around chains of dependent reductions: softmax with masks, moments, scalings, ranges, as users write them."""

from tests.property.programs import AXIS_NAMES, Chooser, Growth, Program


def _extent(c: Chooser, reduced: bool) -> int:
    if reduced:
        if c.chance(8):
            return c.integer(300, 700)
        return c.pick([9, 8, 13, 16, 17, 20, 24, 31, 32, 37, 48, 61, 64, 67, 70, 3, 1])
    return c.pick([3, 4, 5, 7, 8, 2, 1, 11, 16, 13])


def grow_chains(c: Chooser) -> Program:
    g = Growth(c)
    kind = c.pick(["plain", "scores", "plain", "scores", "split", "plain"])
    if kind == "plain":
        rank = c.pick([2, 1, 2, 3, 2, 3, 4])
        axis = rank - 1 if c.chance(70) else c.integer(0, rank - 1)
        shape = tuple(_extent(c, d == axis) if rank < 4 or d == axis else c.integer(1, 3) for d in range(rank))
        x = g.input(shape, offset=c.pick([0.0, 0.0, 0.0, 3.0, 100.0]), scale=c.pick([1.0, 1.0, 4.0, 0.1]))
        axes: tuple[int, ...] = (axis,)
    elif kind == "scores":
        batch = tuple(c.integer(1, 3) for _ in range(c.pick([0, 1, 0, 2])))
        rows, columns, width = _extent(c, False), _extent(c, True), c.pick([4, 3, 8, 1, 5])
        dtype = c.pick(["float32", "float32", "float32", "bfloat16", "float16"])
        grouped = bool(batch) and c.chance(20)
        q = g.input((*batch, rows, width), "float32" if dtype == "float32" else dtype)
        k = g.input(
            (*batch[:-1], columns, width) if grouped else (*batch, columns, width),
            "float32" if dtype == "float32" else dtype,
        )
        # the products take the inputs in their own type
        q, k = g.inputs[-2].name, g.inputs[-1].name
        b = "bh"[: len(batch)]
        kb = b[:-1] if grouped else b
        x = g.let(f"jnp.einsum('{b}id,{kb}jd->{b}ij', {q}, {k}, preferred_element_type=jnp.float32)")
        if c.chance(50):
            x = g.let(f"{x} * {width**-0.5:.4f}" if c.chance(50) else f"{x} / {width**0.5:.4f}")
        shape = (*batch, rows, columns)
        axes = (len(shape) - 1,)
    else:
        rows, a, b2 = _extent(c, False), c.pick([4, 3, 7, 2, 1]), c.pick([5, 8, 3, 13, 1])
        if c.chance(50):  # a merged axis, split and reduced over both parts or one of them
            x = g.input((rows, a * b2))
            x = g.let(f"{x}.reshape({rows}, {a}, {b2})")
            shape = (rows, a, b2)
            axes = c.pick([(1, 2), (2,), (1,)])
        else:
            x = g.input((rows, a, b2))
            x = g.let(f"{x}.reshape({rows}, {a * b2})")
            shape = (rows, a * b2)
            axes = (1,)
    if len(shape) > 1 and c.chance(10):
        x = g.let(f"jnp.swapaxes({x}, 0, {len(shape) - 1})")
        shape = (shape[-1], *shape[1:-1], shape[0])
        flip = {0: len(shape) - 1, len(shape) - 1: 0}
        axes = tuple(sorted(flip.get(a, a) for a in axes))
    x = prologue(g, x, shape, axes)
    for _ in range(c.pick([1, 1, 1, 2])):
        chain_axes = axes
        if g.outputs and len(shape) > 1 and c.chance(40):
            chain_axes = (c.integer(0, len(shape) - 1),)
        chain(g, x, shape, chain_axes)
    results = list(dict.fromkeys(g.outputs))
    if g.spare and c.chance(30):
        results = list(dict.fromkeys([*results, c.pick(g.spare)]))
    tiles: tuple[tuple[str, int], ...] = ()
    if not c.chance(6):
        tiles = tuple((name, c.pick([4, 8, 2, 3, 5, 6, 1, 7])) for name in AXIS_NAMES)
    used = "\n".join(g.body)
    assert all(i.name in used for i in g.inputs), g.inputs
    return Program(tuple(g.inputs), tuple(g.body), tuple(results), tiles, c.integer(0, 3))


def prologue(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> str:
    """Caps, biases, scalings and masks on the values that are reduced."""
    c = g.c
    for _ in range(c.pick([0, 1, 0, 2])):
        match c.integer(0, 6):
            case 0:
                x = g.let(f"{x} * {c.pick(['0.5', '2', '-1.5', '3.0'])}")
            case 1:
                x = g.let(f"{x} / {c.pick(['2', '3.0', '0.7'])}")
            case 2:
                x = g.let(f"5.0 * jnp.tanh({x} / 5.0)")
            case 3 if len(shape) > 1:
                i, j = positions(g, shape, axes)
                x = g.let(f"{x} - {c.pick(['0.1', '0.5'])} * jnp.abs({i} - {j})")
            case 4:
                other = g.input(tuple(e if not c.chance(30) else 1 for e in shape))
                x = g.let(f"{x} + {other}")
            case 5:
                other = g.input((shape[axes[-1]],), "float32")
                spread = tuple(-1 if d == axes[-1] else 1 for d in range(len(shape)))
                x = g.let(f"{x} {c.pick(['+', '*'])} {other}.reshape({spread})")
            case _:
                x = g.let(c.pick([f"jnp.abs({x})", f"{x} * jax.nn.sigmoid({x})", f"jnp.maximum({x}, 0)", f"-{x}"]))
    return x


def positions(g: Growth, shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[str, str]:
    """Index arrays along a row axis and along the reduced axis, of the rank of `shape`."""
    column = axes[-1]
    row = next((d for d in reversed(range(len(shape))) if d not in axes), None)
    rank = len(shape)

    def position(d: int) -> str:
        spread = tuple(-1 if k == d else 1 for k in range(rank))
        return f"jnp.arange({shape[d]}).reshape({spread})"

    return (position(row) if row is not None else "0"), position(column)


def mask(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> str:
    c = g.c
    i, j = positions(g, shape, axes)
    n = shape[axes[-1]]
    k = c.integer(0, max(1, n // 2))
    kind = c.integer(0, 12)
    match kind:
        case 0:
            p = f"{i} >= {j}"
        case 1:
            p = f"{i} + {k} >= {j}"
        case 2:
            p = f"{j} - {i} < {k + 1}"
        case 3:
            p = f"({j} <= {i} + {k}) & ({i} - {j} < {c.integer(1, n)})"
        case 4:
            p = f"({j} < {k}) | ({j} <= {i})"
        case 5:
            p = f"{j} < {c.integer(0, n)}"
        case 6:
            p = f"{j} >= {k} + {i}"
        case 7:
            p = f"{j} * {c.integer(1, 3)} <= {i} * {c.integer(1, 3)} + {c.integer(-3, 3)}"
        case 8:
            p = f"{i} // {c.integer(1, 4)} >= {j} // {c.integer(1, 4)}"
        case 9:
            p = f"~(({i} < {j}) | ({j} == {k}))"
        case 10:
            p = f"{j} >= {k}"
        case 11:
            p = f"({j} >= {k}) & ({j} <= {i} + {c.integer(0, n)})"
        case _:
            p = g.input(tuple(e if not c.chance(30) else 1 for e in shape), "bool")
    p = g.let(p)
    g.masked = True
    fill = c.pick(["-jnp.inf", "-jnp.inf", "-jnp.inf", "-1e30", "jnp.finfo(jnp.float32).min"])
    if c.chance(25):
        return g.let(f"{x} + jnp.where({p}, 0.0, {fill})")
    return g.let(f"jnp.where({p}, {x}, {fill})")


def reduce(op: str, x: str, axes: tuple[int, ...]) -> str:
    over = axes[0] if len(axes) == 1 else axes
    return f"jnp.{op}({x}, axis={over}, keepdims=True)"


def chain(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    c = g.c
    match c.pick(["soft", "moments", "soft", "scale", "range", "cov", "library", "soft", "centre", "double"]):
        case "soft":
            _soft(g, x, shape, axes)
        case "moments":
            _moments(g, x, shape, axes)
        case "scale":
            _scale(g, x, shape, axes)
        case "range":
            _range(g, x, shape, axes)
        case "cov":
            _covariance(g, x, shape, axes)
        case "library":
            _library(g, x, shape, axes)
        case "centre":
            _weighted_centre(g, x, shape, axes)
        case "double":
            y = normalised(g, x, axes)
            _soft(g, y, shape, axes) if c.chance(50) else _moments(g, y, shape, axes)


def normalised(g: Growth, x: str, axes: tuple[int, ...]) -> str:
    if g.c.chance(50):
        r = g.let(reduce("mean", f"{x} * {x}", axes))
        return g.let(f"{x} * jax.lax.rsqrt({r} + 1e-3)")
    mu = g.let(reduce("mean", x, axes))
    v = g.let(reduce("mean", f"({x} - {mu}) ** 2", axes))
    return g.let(f"({x} - {mu}) / jnp.sqrt({v} + 1e-3)")


def consume(g: Growth, y: str, shape: tuple[int, ...], axes: tuple[int, ...], dense: bool = True) -> None:
    """What is done with normalised values: a dot, weighted sums, or the values themselves."""
    c = g.c
    choice = c.integer(0, 4)
    if choice == 0 and len(axes) == 1:
        width = c.pick([4, 3, 1, 8])
        letters = "abcd"[: len(shape)]
        r = letters[axes[0]]
        batch = "".join(letters[d] for d in range(len(shape)) if d not in axes and c.chance(30))
        order = batch + r + "z" if c.chance(70) else "z" + batch + r
        extents = {letters[d]: shape[d] for d in range(len(shape))} | {"z": width}
        v = g.input(tuple(extents[a] for a in order))
        kept = "".join(a for a in letters if a != r)
        out = g.let(f"jnp.einsum('{letters},{order}->{kept}z', {y}, {v})")
    elif choice == 1:
        w = g.input(tuple(e if d in axes or c.chance(50) else 1 for d, e in enumerate(shape)))
        out = g.let(reduce("sum", f"{y} * {w}", axes).replace("keepdims=True", f"keepdims={c.chance(50)}"))
    elif choice == 2:
        out = g.let(reduce("sum", f"{y} * {y}", axes))
    elif choice == 3:
        out = g.let(reduce(c.pick(["max", "min", "sum", "mean"]), y, axes))
    else:
        out = y
        if c.chance(30):
            out = g.let(f"{y} * 2.0 + 1.0")
    if c.chance(20):
        out = g.let(
            c.pick([f"jnp.tanh({out})", f"{out} * 0.5 + 1", f"jax.nn.relu({out})", f"{out}.astype(jnp.bfloat16)"])
        )
    g.outputs.append(out)


def _soft(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    c = g.c
    if c.chance(45):
        x = mask(g, x, shape, axes)
    m = g.let(reduce("max", x, axes))
    if c.chance(15):
        m = g.let(
            c.pick([f"jnp.where(jnp.isfinite({m}), {m}, 0.0)", f"jax.lax.stop_gradient({m})", f"jnp.maximum({m}, 0.0)"])
        )
    e = g.let(f"{c.pick(['jnp.exp', 'jnp.exp', 'jnp.exp2'])}({x} - {m})")
    total = g.let(reduce("sum", e, axes))
    g.spare += [m, total]
    match c.integer(0, 5):
        case 0:
            g.outputs.append(g.let(f"{m} + jnp.log({total})"))
        case 1 if len(axes) == 1:
            p = g.let(f"{e} / {total}")
            consume(g, p, shape, axes)
        case 2:  # normalise after the sum
            w = g.input(tuple(e if d in axes or c.chance(50) else 1 for d, e in enumerate(shape)))
            s = g.let(reduce("sum", f"{e} * {w}", axes))
            g.outputs.append(
                g.let(f"{s} / {total}" if not c.chance(30) else f"{s} / jnp.where({total} == 0, 1.0, {total})")
            )
        case 3:
            p = g.let(f"{e} / {total}")
            if g.masked:
                g.outputs.append(g.let(reduce("sum", f"{p} * {p}", axes)))
            else:
                entropy = f"{p} * jnp.log({p})" if c.chance(50) else f"{p} * ({x} - {m} - jnp.log({total}))"
                g.outputs.append(g.let(f"-{reduce('sum', entropy, axes)}"))
        case 4:
            p = g.let(f"jnp.exp({x} - ({m} + jnp.log({total})))")
            consume(g, p, shape, axes)
        case _:
            p = g.let(f"{e} / {total}")
            consume(g, p, shape, axes)


def _moments(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    c = g.c
    mu = g.let(reduce("mean", x, axes))
    d = g.let(f"{x} - {mu}")
    square = c.pick([f"{d} ** 2", f"{d} * {d}", f"jnp.square({d})"])
    v = g.let(reduce("mean", square, axes))
    g.spare += [mu, v]
    match c.integer(0, 3):
        case 0:
            g.outputs.append(v)
        case 1:
            y = g.let(f"{d} * jax.lax.rsqrt({v} + 1e-3)" if c.chance(50) else f"{d} / jnp.sqrt({v} + 1e-3)")
            consume(g, y, shape, axes)
        case 2:
            third = g.let(reduce("mean", f"{d} ** {c.pick([3, 4])}", axes))
            g.outputs.append(third)
        case _:
            third = g.let(reduce("mean", f"({d} / jnp.sqrt({v} + 1e-3)) ** {c.pick([3, 4])}", axes))
            g.outputs += [v, third]


def _scale(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    c = g.c
    r = g.let(c.pick([
        reduce("mean", f"{x} * {x}", axes), reduce("sum", f"jnp.square({x})", axes), reduce("sum", f"jnp.abs({x})", axes),
        reduce("max", f"jnp.abs({x})", axes),
    ]))  # fmt: skip
    g.spare.append(r)
    y = g.let(
        c.pick([f"{x} * jax.lax.rsqrt({r} + 1e-3)", f"{x} / jnp.sqrt({r} + 1e-3)", f"{x} / ({r} + 1.0)", f"{x} / {r}"])
    )
    consume(g, y, shape, axes)


def _range(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    low, high = g.let(reduce("min", x, axes)), g.let(reduce("max", x, axes))
    g.spare += [low, high]
    y = g.let(f"({x} - {low}) / ({high} - {low} + 1e-3)")
    if g.c.chance(20):
        y = g.let(f"jnp.round({y} * 15.0)")
    consume(g, y, shape, axes)


def _covariance(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    z = g.input(tuple(e if d in axes or g.c.chance(70) else 1 for d, e in enumerate(shape)))
    a, b = g.let(reduce("mean", x, axes)), g.let(reduce("mean", z, axes))
    cov = g.let(reduce("mean", f"({x} - {a}) * ({z} - {b})", axes))
    g.spare += [a, b]
    g.outputs.append(cov)
    if g.c.chance(40):
        v = g.let(reduce("mean", f"({x} - {a}) ** 2", axes))
        g.outputs.append(g.let(f"{cov} / ({v} + 1e-2)"))


def _library(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    c = g.c
    over = axes[0] if len(axes) == 1 else axes
    match c.integer(0, 4):
        case 0:
            if c.chance(50):
                x = mask(g, x, shape, axes)
            g.outputs.append(g.let(f"jax.nn.logsumexp({x}, axis={over})"))
        case 1:
            if c.chance(40):
                x = mask(g, x, shape, axes)
            consume(g, g.let(f"jax.nn.softmax({x}, axis={over})"), shape, axes)
        case 2:
            consume(g, g.let(f"jax.nn.log_softmax({x}, axis={over})"), shape, axes)
        case 3:
            consume(g, g.let(f"jax.nn.standardize({x}, axis={over}, epsilon=1e-3)"), shape, axes)
        case _:
            g.outputs.append(g.let(f"jnp.{c.pick(['var', 'std'])}({x}, axis={over})"))


def _weighted_centre(g: Growth, x: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """The mean and variance of values under softmax weights."""
    m = g.let(reduce("max", x, axes))
    e = g.let(f"jnp.exp({x} - {m})")
    total = g.let(reduce("sum", e, axes))
    w = g.input(tuple(e if d in axes or g.c.chance(50) else 1 for d, e in enumerate(shape)))
    mu = g.let(f"{reduce('sum', f'{e} * {w}', axes)} / {total}")
    v = g.let(f"{reduce('sum', f'{e} * ({w} - {mu}) ** 2', axes)} / {total}")
    g.spare += [total, mu]
    g.outputs.append(v)
