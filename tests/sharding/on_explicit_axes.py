"""Fused functions over explicit mesh axes, on as many CPU devices as the first argument says; run by `test_sharding.py`.

A fused call is typed as the plain function is, and where that has no type, along the axes that results share with arguments.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasfuse as pf
from pallasfuse import errors
from tests.sharding.on_devices import ALL, BOTH, CASES, COUNT, QKV, X, attend, entropy, gathered, normal, normalized

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
MESH = jax.make_mesh((2, COUNT // 2), ("a", "b"), axis_types=(EXPLICIT, EXPLICIT))
MIXED = jax.make_mesh((2, COUNT // 2), ("a", "b"), axis_types=(EXPLICIT, AUTO))
# how results are sharded
WANTED = {
    "heads": P("a"), "rows": P(None, "a"), "rows over both": P(None, BOTH), "keys": P(), "keys over both": P(),
    "heads and keys": P("a"), "rows and keys": P(None, "a"), "lengths": P("a"), "grouped": P("a"), "moments": P("a"),
    "moments over both": P(), "entropy": P(), "rows of a norm": P("a"), "results along the axis": P(None, "a"), "two passes": P(),
    "rows and keys on one mesh axis": P(None, "a"), "few rows": P(), "sequences of pages": P("a"),
    "pages on devices": P("a"),
}  # fmt: skip


def close(have, want, message=""):
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=message)


def put(args, specs, mesh=MESH):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]


def same(sharding, spec, ndim, mesh=MESH):
    return sharding.is_equivalent_to(NamedSharding(mesh, spec), ndim)


def check(name):
    """Compiled with and without a current mesh, and eagerly: values, types, and what is exchanged."""
    function, args, specs, most = CASES[name]
    want, placed, fused = function(*args), put(args, specs), pf.fuse(function)
    types = []

    def typed(*xs):
        results = fused(*xs)
        types.extend(jax.typeof(r) for r in jax.tree.leaves(results))
        return results

    compiled = jax.jit(typed).lower(*placed).compile()
    close(compiled(*placed), want, name)
    found = gathered(compiled.as_text())
    assert most is None or found <= most, (name, found, most)
    with jax.set_mesh(MESH):
        close(jax.jit(typed)(*placed), want, name)
        close(fused(*placed), want, name)
    for result, type_ in zip([*jax.tree.leaves(fused(*placed))] * 2, types, strict=True):
        assert same(result.sharding, WANTED[name], result.ndim), (name, result.sharding)
        assert same(type_.sharding, WANTED[name], result.ndim, MESH.abstract_mesh), (name, type_)
    print(name, found)


def check_types_of_the_plain_function():
    """They decide where there are any: here one that follows no axis, and what the caller goes on with."""

    def function(x):
        return jnp.sort(jax.nn.softmax(x, axis=-1), axis=0), x

    for spec in (P(None, "a"), P(None, BOTH)):
        (x,) = put([X], [spec])
        plain, fused = jax.jit(function)(x), jax.jit(lambda x: jax.tree.map(jnp.sin, pf.fuse(function)(x)))(x)
        for a, b in zip(fused, plain, strict=True):
            assert same(a.sharding, b.sharding.spec, 2), (spec, a.sharding, b.sharding)


def check_merged_dimensions():
    """Heads and what a head holds are one dimension of the arguments, and of the result, where JAX has no type."""
    q, k, v = normal(16, 32, seed=1), normal(64, 32, seed=2), normal(64, 32, seed=3)

    def function(q, k, v):
        q, k, v = (x.reshape(x.shape[0], 4, 8) for x in (q, k, v))
        s = jnp.einsum("ihd,jhd->hij", q, k)
        return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(s, axis=-1), v).reshape(q.shape[0], 32)

    forms = (
        ((P(None, "a"), P("b", "a"), P("b", "a")), P(None, "a")),
        ((P("a"), P("b"), P("b")), P("a")),
        ((P(), P("b", "a"), P("b")), P(None, "a")),
    )
    for specs, want in forms if ALL else forms[:1]:
        placed = put((q, k, v), specs)
        have = pf.fuse(function)(*placed)
        close(have, function(q, k, v))
        assert same(have.sharding, want, 2), (specs, have.sharding)


def check_arguments_that_disagree():
    """JAX has no type for them; the axis is replicated."""
    q, k, v = put(QKV, (P("a"), P("b"), P("a")))
    have = pf.fuse(attend)(q, k, v)
    close(have, attend(*QKV))
    assert same(have.sharding, P(), 3), have.sharding


def check_mixed_axes(names):
    """Explicit and automatic axes of one mesh: types speak of the former only, and states are merged along either."""
    for name in names:
        function, args, specs, most = CASES[name]
        placed = put(args, specs, MIXED)
        compiled = jax.jit(pf.fuse(function)).lower(*placed).compile()
        assert 0 < gathered(compiled.as_text()) <= most, name
        with jax.set_mesh(MIXED):
            for have in (compiled(*placed), pf.fuse(function)(*placed)):
                close(have, jax.jit(function)(*args), name)
                assert tuple(jax.typeof(have).sharding.spec) == (*WANTED[name], None, None, None)[:3], jax.typeof(have)


def check_transformations():
    (x,) = put([X], [P("a")])
    scaled = put([normal(4, 8, 256)], [P("b", "a")])[0]
    close(jax.jit(jax.vmap(pf.fuse(entropy)))(scaled), jax.vmap(entropy)(np.asarray(scaled)))
    close(jax.vmap(pf.fuse(entropy))(scaled), jax.vmap(entropy)(np.asarray(scaled)))
    placed = put([jnp.stack([x, 2 * x]) for x in QKV], (P("a"), P("a", None, "b"), P("a", None, "b")))
    close(jax.jit(jax.vmap(pf.fuse(attend)))(*placed), jax.vmap(attend)(*(np.asarray(x) for x in placed)))

    def loss(f):
        return lambda *xs: jnp.sum(jnp.sin(f(*xs)))

    want = jax.grad(loss(normalized))(X)
    have = [jax.jit(jax.grad(loss(pf.fuse(normalized))))(x)]
    with jax.set_mesh(MESH):  # without it, JAX does not differentiate eagerly
        have.append(jax.grad(loss(pf.fuse(normalized)))(x))
    for each in have:
        close(each, want)
        assert same(each.sharding, P("a"), 2), each.sharding

    def steps(f):
        return lambda q, k, v: jax.lax.scan(lambda c, _: (c + f(c, k, v)[..., :6], None), q, None, length=2)[0]

    have = jax.jit(steps(pf.fuse(attend)))(*put(QKV, (P(), P(None, "a"), P(None, "a"))))
    close(have, steps(attend)(*QKV))
    want = jax.grad(loss(attend), (0, 1, 2))(*QKV)
    for specs in ((P(), P(None, "a"), P(None, "a")), (P("a"), P("a"), P("a")))[: 2 if ALL else 1]:
        have = jax.jit(jax.grad(loss(pf.fuse(attend)), (0, 1, 2)))(*put(QKV, specs))
        close(have, want)
        assert all(same(x.sharding, s, 3) for x, s in zip(have, specs, strict=True)), have


def check_the_rest():
    """Static arguments, names, scalars, numpy arrays, nested and bound functions, explain; what is captured is refused."""
    (x,) = put([X], [P("a", "b")])

    @pf.fuse(static_argnames=("power",))
    def f(pair, scale, *, power):
        return {
            "out": [
                jnp.sum(jnp.exp(pair["x"] - jnp.max(pair["x"], axis=-1, keepdims=True)) ** power, -1) * scale,
                scale,
            ]
        }

    with jax.set_mesh(MESH):
        have = f({"x": x}, 2.0, power=2)
        close(have, f({"x": X}, 2.0, power=2))
        close(jax.jit(pf.fuse(lambda x: pf.fuse(entropy)(x) + 1.0))(x), entropy(X) + 1.0)
        close(pf.fuse(entropy)(np.asarray(X)), entropy(X))
    weights = X[0]
    close(jax.jit(pf.fuse(lambda x: jnp.sum(jax.nn.softmax(x, axis=-1) * weights, -1)))(x), jax.nn.softmax(X) @ X[0])
    row = jax.jit(lambda x, w: pf.fuse(lambda x: jnp.sum(jax.nn.softmax(x, axis=-1) * w, -1))(x))
    close(row(x, X[0]), jax.nn.softmax(X) @ X[0])
    assert not pf.fuse(attend).explain(*put(QKV, (P(), P(None, "a"), P(None, "a")))).fallbacks
    assert pf.fuse(lambda x: (jax.debug.print("{}", x.shape), entropy(x))[1])(put([X], [P("a")])[0]).shape == (8,)
    w = put([X], [P("a")])[0]
    for function in (
        lambda x: jnp.sum(jax.nn.softmax(x, axis=-1) * w, -1),
        lambda x: jax.sharding.reshard(jax.nn.softmax(x, axis=-1), P("b")),
    ):
        try:
            pf.fuse(function)(x)
        except errors.TraceError as error:
            assert "explicit mesh axes" in str(error), error
        else:
            raise AssertionError("explicit axes inside a fused function")


def check_inside_shard_map():
    specs = (P(), P(None, BOTH), P(None, BOTH))
    f = pf.fold(attend, axis=(None, 1, 1), length=64)

    def part(q, k, v):
        state = f.update(f.init(q, k, v), q, k, v, start=jax.lax.axis_index(BOTH) * k.shape[1])
        return f.finish(f.merge(state, BOTH))

    close(jax.jit(jax.shard_map(part, mesh=MESH, in_specs=specs, out_specs=P()))(*put(QKV, specs)), attend(*QKV))
    rows = jax.shard_map(pf.fuse(attend), mesh=MESH, in_specs=P(BOTH), out_specs=P(BOTH))
    close(jax.jit(rows)(*put([normal(8, *x.shape[1:], seed=n) for n, x in enumerate(QKV)], [P(BOTH)] * 3)),
          attend(*(normal(8, *x.shape[1:], seed=n) for n, x in enumerate(QKV))))  # fmt: skip
    some = jax.shard_map(pf.fuse(entropy), mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    try:
        jax.jit(some)(*put([X], [P("a", "b")]))
    except errors.TraceError as error:
        assert "manual" in str(error)
    else:
        raise AssertionError("manual axes beside explicit ones")


def check_folds():
    """They are refused, with the reason."""
    f = pf.fold(attend, axis=(None, 1, 1), length=64)
    q, k, v = put(QKV, (P("a"),) * 3)
    try:
        f.update(f.init(*QKV), q, k, v, start=0)
    except errors.TraceError as error:
        assert "explicit mesh axes a, b" in str(error), error
    else:
        raise AssertionError("explicit axes are taken")


OVER_ALL = ("rows over both", "keys over both", "heads and keys", "moments over both")
"""What is worth another number of devices."""

SOME = ("moments", "results along the axis")

if __name__ == "__main__":
    for case in SOME if not ALL else CASES if COUNT == 4 else OVER_ALL:
        check(case)
    check_mixed_axes(("heads and keys", "keys over both", "rows and keys") if ALL else ("rows and keys",))
    if COUNT == 4:
        check_types_of_the_plain_function()
        check_merged_dimensions()
        check_arguments_that_disagree()
        check_transformations()
        check_the_rest()
        check_inside_shard_map()
        check_folds()
    print("ok")
