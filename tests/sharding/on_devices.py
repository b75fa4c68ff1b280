"""Fused functions over sharded arrays, on as many CPU devices as the first argument says; run by `test_sharding.py`.

The second argument is `all`, `some`: one case of every kind, or `few`: less than that. Both are compiled with the least effort.

Each result is that of the plain function on one device, and what devices exchange is no larger than the states.
"""

import contextlib
import dataclasses
import os
import re
import sys
import warnings

from tests import quick

COUNT, ALL, FEW = int(sys.argv[1]), sys.argv[2] == "all", sys.argv[2] == "few"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={COUNT}" + (
    "" if ALL else f" --xla_backend_optimization_level=0 {quick.FLAGS}"
)

import jax  # noqa: E402
import jax.export  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import pallasfuse as pf  # noqa: E402
from pallasfuse import at_hand, execution, sharding, targets  # noqa: E402
from pallasfuse.jaxpr_frontend import fused_calls  # noqa: E402

MESH = jax.make_mesh((2, COUNT // 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
BOTH = ("a", "b")


def normal(*shape, seed=0, offset=0.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) + offset, jnp.float32)


def attend(q, k, v):
    s = jnp.einsum("hid,hjd->hij", q, k)
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    return jnp.einsum("hij,hje->hie", jax.nn.softmax(jnp.where(j <= i + 8, s, -jnp.inf), axis=-1), v)


def attend_lengths(q, k, v, lengths):
    s = jnp.einsum("hid,hjd->hij", q, k)
    s = jnp.where(jnp.arange(k.shape[1]) < lengths[:, None, None], s, -jnp.inf)
    return jnp.einsum("hij,hje->hie", jax.nn.softmax(s, axis=-1), v)


def grouped(q, k, v):
    q = q.reshape(k.shape[0], -1, *q.shape[1:])
    s = jnp.einsum("gaid,gjd->gaij", q, k) + 0.01 * jnp.arange(k.shape[1])
    return jnp.einsum("gaij,gje->gaie", jax.nn.softmax(s, axis=-1), v)


def moments(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return mean[:, 0], jnp.mean(jnp.square(x - mean), axis=-1)


def normalized(x):
    return (x - jnp.mean(x, axis=-1, keepdims=True)) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)


def entropy(x):
    p = jax.nn.log_softmax(x, axis=-1)
    return -jnp.sum(jnp.exp(p) * p, axis=-1)


def two_passes(x):
    return jnp.sum(jnp.round(8 * x / jnp.max(x, axis=-1, keepdims=True)), axis=-1)


QKV = (normal(8, 16, 6), normal(8, 64, 6, seed=1), normal(8, 64, 8, seed=2))
GQA = (normal(8, 16, 6), normal(4, 64, 6, seed=1), normal(4, 64, 8, seed=2))
LENGTHS = jnp.array([1, 64, 0, 30, 31, 32, 33, 5])
X = normal(8, 256, offset=10.0)


# name: function, arguments, shardings, elements that may be gathered (None: any number)
def paged(q, length, pages, table):
    """Attention of one query for each sequence over the pages that a table names."""
    keys = pages[table].reshape(table.shape[0], -1, pages.shape[-1])
    scores = jnp.where(jnp.arange(keys.shape[1]) < length[:, None], jnp.einsum("bd,bjd->bj", q, keys), -jnp.inf)
    return jnp.einsum("bj,bjd->bd", jax.nn.softmax(scores), keys)


PAGED = (normal(8, 8), jnp.arange(1, 65, 8), normal(20, 16, 8, seed=1), jnp.arange(32).reshape(8, 4) % 21 - 1)

CASES = {
    "heads": (attend, QKV, (P("a"),) * 3, 0),
    "rows": (attend, QKV, (P(None, "a"), P(), P()), 0),
    "rows over both": (attend, QKV, (P(None, BOTH), P(), P()), 0),
    "keys": (attend, QKV, (P(), P(None, "a"), P(None, "a")), 8 * 16 * 8 * 2),
    "keys over both": (attend, QKV, (P(), P(None, BOTH), P(None, BOTH)), 8 * 16 * 8 * COUNT),
    "heads and keys": (attend, QKV, (P("a"), P("a", "b"), P("a", "b")), 4 * 16 * 8 * COUNT // 2),
    "rows and keys": (attend, QKV, (P(None, "a"), P(None, "b"), P(None, "b")), 8 * 8 * 8 * COUNT // 2),
    "lengths": (attend_lengths, (*QKV, LENGTHS), (P("a"), P("a", "b"), P("a", "b"), P("a")), 4 * 16 * 8 * COUNT // 2),
    "grouped": (grouped, GQA, (P("a"), P("a", "b"), P("a", "b")), 4 * 16 * 8 * COUNT // 2),
    "moments": (moments, (X,), (P("a", "b"),), 4 * COUNT // 2),
    "moments over both": (moments, (X,), (P(None, BOTH),), 8 * COUNT),
    "entropy": (entropy, (X,), (P(None, BOTH),), 8 * COUNT),
    "rows of a norm": (normalized, (X,), (P("a"),), 0),
    "sequences of pages": (paged, PAGED, (P("a"), P("a"), P(), P("a")), 0),
    "pages on devices": (paged, PAGED, (P("a"), P("a"), P("a"), P("a")), None),
    # what no state can carry is gathered
    "results along the axis": (normalized, (X,), (P(None, "a"),), None),
    "two passes": (two_passes, (X,), (P(None, "a"),), None),
    "rows and keys on one mesh axis": (attend, QKV, (P(None, "a"),) * 3, None),
    "few rows": (attend, (QKV[0][:, :3], *QKV[1:]), (P(), P(None, "a"), P(None, "a")), 8 * 3 * 8 * 2),
}  # fmt: skip


def gathered(text):
    """Elements of the largest result of a collective in compiled HLO."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\][^=]*? (?:all-gather|all-reduce|all-to-all|collective-permute)", text)
    return max((int(np.prod([int(n) for n in s.split(",") if n], initial=1)) for s in found), default=0)


def check(name, target):
    function, args, specs, most = CASES[name]
    want = jax.tree.leaves(jax.jit(function)(*args))
    placed = [jax.device_put(x, NamedSharding(MESH, s)) for x, s in zip(args, specs, strict=True)]
    compiled = jax.jit(pf.fuse(function, target=target)).lower(*placed).compile()
    have = jax.tree.leaves(compiled(*placed))
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)
    found = gathered(compiled.as_text())
    assert most is None or found <= most, (name, found, most)
    assert most == 0 or found > 0, (name, "nothing was exchanged")
    print(name, target, found)
    return compiled.as_text()


MERGED_BY_SHARES = (
    "keys",
    "keys over both",
    "heads and keys",
    "rows and keys",
    "lengths",
    "entropy",
    "moments over both",
)
"""Where an axis is left for all devices to share: each then has its part of the states, and of results its own."""


def check_shares(name):
    small, sharding._SMALL_STATES = sharding._SMALL_STATES, 0
    try:
        assert "all-to-all" in check(name, "xla"), name
    finally:
        sharding._SMALL_STATES = small


def check_scopes():
    """The program of one device, for which the partitioner asks, is in the scopes of the kernel."""

    def layer(q, k, v):
        with jax.named_scope("layer_7"):
            return attend(q, k, v)

    placed = [jax.device_put(x, NamedSharding(MESH, P("a"))) for x in QKV]
    text = jax.jit(pf.fuse(layer, target="xla")).lower(*placed).compile().as_text()
    names = re.findall(r' exponential\(.*op_name="([^"]*)"', text)
    assert names and all(re.search(r"/layer_7/fused_t\w+/", name) for name in names), names


def check_parts_of_mesh_axes():
    """Eight heads over all devices, which share two pairs of keys and values: a mesh axis is cut where no name says how."""
    q, k, v = normal(2, 8, 32, 16, seed=1), normal(2, 2, 32, 16, seed=2), normal(2, 2, 32, 16, seed=3)
    mesh = jax.make_mesh((COUNT,), ("x",), axis_types=(AxisType.Auto,))

    def function(q, k, v):
        grouped = q.reshape(2, 2, -1, 32, 16)
        s = jnp.einsum("bhgid,bhjd->bhgij", grouped, k)
        return jnp.einsum("bhgij,bhjd->bhgid", jax.nn.softmax(s, -1), v)

    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((q, k, v), (P(None, "x"), P(), P()), strict=True)
    ]
    np.testing.assert_allclose(jax.jit(pf.fuse(function))(*placed), function(q, k, v), atol=2e-5)
    jax.export.export(jax.jit(pf.fuse(function)))(*placed)  # what is exported holds no callbacks


@contextlib.contextmanager
def emitter(name, run):
    real = execution._EMITTERS[name]
    execution._EMITTERS[name] = lambda program, inputs: run(real, program, inputs)
    try:
        yield
    finally:
        execution._EMITTERS[name] = real


def check_options(cases):
    """Tiles, clipped to pieces, and parts are those that were asked for."""
    seen = []

    def record(real, program, inputs):
        seen.append(({a.name: t for a, t in program.tiles}, {a.name: a.extent for a, _ in program.grid}))
        return real(program, inputs)

    def run(case, **options):
        function, args, specs, _ = CASES[case]
        fused = pf.fuse(function, options=pf.FuseOptions(target="interpret", **options))
        placed = [jax.device_put(x, NamedSharding(MESH, s)) for x, s in zip(args, specs, strict=True)]
        seen.clear()
        with emitter("interpret", record):
            np.testing.assert_allclose(fused(*placed), jax.jit(function)(*args), rtol=2e-5, atol=2e-5)
        return seen[0]

    key = pf.fuse(attend).explain(*QKV).kernels[0].group.rolled.name
    for case in cases:
        length = {"rows": 64, "keys": 32}[case]
        tiles, grid = run(case, tiles=((key, 16),), parts=2)
        assert (tiles[key], grid[f"{key}.part"]) == (16, 2), (tiles, grid)
        assert run(case, tiles=((key, 8),))[0][key] == 16  # the smallest of a product
        tiles, grid = run(case, tiles=((key, 64),), parts=3)
        assert (tiles[key], grid.get(f"{key}.part", 1)) == (length, 1), (tiles, grid)


def check_fallback(cases):
    """A kernel that cannot be lowered for one device gives way to another target's, but not one that was asked for."""

    def fail(real, program, inputs):
        raise NotImplementedError("no such instruction")

    broken = dataclasses.replace(targets.INTERPRET, otherwise="xla")
    real = at_hand.default_for
    at_hand.default_for = lambda *_: broken
    try:
        for case in cases:
            function, args, specs, _ = CASES[case]
            placed = [jax.device_put(x, NamedSharding(MESH, s)) for x, s in zip(args, specs, strict=True)]
            with emitter("interpret", fail), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                np.testing.assert_allclose(pf.fuse(function)(*placed), jax.jit(function)(*args), rtol=2e-5, atol=2e-5)
            assert any("no kernel of interpret could be built" in str(w.message) for w in caught), case
            try:
                with emitter("interpret", fail):
                    pf.fuse(function, target="interpret")(*placed)
            except Exception as error:
                assert "no such instruction" in str(error), error
            else:
                raise AssertionError("a target that was asked for is not used")
    finally:
        at_hand.default_for = real


def check_vmap():
    q, k, v = (jnp.stack([x, 2 * x]) for x in QKV)
    specs = (P("a"), P("a", None, "b"), P("a", None, "b"))
    placed = [jax.device_put(x, NamedSharding(MESH, s)) for x, s in zip((q, k, v), specs, strict=True)]
    have = jax.jit(jax.vmap(pf.fuse(attend, target="xla")))(*placed)
    np.testing.assert_allclose(have, jax.vmap(attend)(q, k, v), rtol=2e-5, atol=2e-5)


def check_inside_shard_map():
    """A fused function keeps track of what varies over the mesh."""
    mesh = jax.make_mesh((COUNT,), ("x",), axis_types=(AxisType.Auto,))
    fused = pf.fuse(attend, target="xla")
    have = jax.jit(jax.shard_map(fused, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(*QKV)
    np.testing.assert_allclose(have, attend(*QKV), rtol=2e-5, atol=2e-5)
    try:
        jax.jit(jax.shard_map(fused, mesh=mesh, in_specs=P("x"), out_specs=P()))(*QKV)
    except ValueError as error:
        assert "require replication" in str(error)
    else:
        raise AssertionError("a result that varies was taken for a replicated one")


def check_shard_map_inside():
    """A mesh that only the fused function speaks of, with arguments on one device."""
    mesh = jax.make_mesh((COUNT,), ("x",), axis_types=(AxisType.Auto,))
    x = normal(8 * COUNT, 32)

    def rows(x):
        return jax.shard_map(lambda c: jax.nn.softmax(c, -1), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)

    def constrained(x):
        return jax.nn.softmax(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x"))), -1)

    for function in (rows, constrained):
        want = jax.jit(function)(x)
        for have in (pf.fuse(function)(x), jax.jit(pf.fuse(function))(x)):
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)
            assert have.sharding.is_equivalent_to(want.sharding, want.ndim), have.sharding


def check_merge():
    """States merged over two mesh axes, with tracked types and without."""
    f = pf.fold(attend, axis=(None, 1, 1), length=64)

    def part(q, k, v):
        state = f.update(f.init(q, k, v), q, k, v, start=jax.lax.axis_index(BOTH) * k.shape[1])
        return f.finish(f.merge(state, BOTH))

    specs = (P(), P(None, BOTH), P(None, BOTH))
    for tracked in (False, True):
        run = jax.jit(jax.shard_map(part, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=tracked))
        np.testing.assert_allclose(run(*QKV), attend(*QKV), rtol=2e-5, atol=2e-5)
        assert 0 < gathered(run.lower(*QKV).compile().as_text()) <= 8 * 16 * 8 * COUNT


def check_constraints(cases):
    """Constraints inside a kernel reach its operands, and through them its results: what is sharded is as in the plain function."""

    def constrain(*spec):
        return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))

    def constrained(q, k, v, of_scores=lambda s: s, of_weights=lambda p: p):
        s = of_scores(jnp.einsum("hid,hjd->hij", q, k))
        return jnp.einsum("hij,hje->hie", of_weights(jax.nn.softmax(s, axis=-1)), v)

    def transposed(x):
        return jnp.swapaxes(constrain(None, "a")(jnp.swapaxes(x, 0, 1)), 0, 1)

    heads, rows = constrain("a"), constrain("a", "b")
    functions = {
        "operands": lambda q, k, v: constrained(heads(q), heads(k), heads(v)),
        "scores": lambda q, k, v: constrained(q, k, v, rows),
        "weights of scaled operands": lambda q, k, v: constrained(2 * q, k, v, of_weights=rows),
        "transposed": lambda q, k, v: constrained(transposed(q), transposed(k), v),
        "result": lambda q, k, v: rows(constrained(q, k, v)),
        "result sharded otherwise": lambda q, k, v: constrain("b")(jax.nn.softmax(constrain("a")(k), axis=1)),
        "replicated": lambda q, k, v: constrain()(constrained(constrain()(q), k, v)),
        "one mesh axis twice": lambda q, k, v: constrained(constrain("a")(q), constrain(None, "a")(k), v),
        "disagreement": lambda q, k, v: constrained(constrain("a")(q), constrain("b")(k), v),
        "no part of a dimension": lambda q, k, v: constrained(constrain(None, BOTH)(q[:, :6]), k, v),
    }
    undecided = ("one mesh axis twice", "disagreement", "no part of a dimension")
    placed = [jax.device_put(x, NamedSharding(MESH, P())) for x in QKV]
    for name in cases or functions:
        fused = pf.fuse(functions[name], options=pf.FuseOptions(price=False, check=False))
        (kernel,) = fused.explain(*placed).kernels
        assert len(kernel.group.folds) == 3 - (name == "result sharded otherwise"), name
        want, have = (jax.jit(f)(*placed) for f in (functions[name], fused))
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5, err_msg=name)
        assert name in undecided or have.sharding.is_equivalent_to(want.sharding, want.ndim), (name, have.sharding)
        assert name in undecided or want.sharding.is_fully_replicated is (name == "replicated"), name
        batched = [x[None] for x in placed]
        np.testing.assert_allclose(jax.jit(jax.vmap(fused))(*batched)[0], want, rtol=2e-5, atol=2e-5, err_msg=name)
    text = jax.export.export(jax.jit(fused))(*placed).mlir_module()
    assert "sharding" in text


def check_order_of_products():
    """Sums and products keep the order of the program: another one may move more between devices."""

    def gram(a, x):
        return a.T @ a @ x

    a, x = normal(256, 128, seed=4), normal(128, seed=5)
    fused = pf.fuse(gram, options=pf.FuseOptions(price=True, check=False))
    assert fused.explain(a, x).rewritings  # as it runs on one device
    mesh = jax.make_mesh((COUNT,), ("x",), axis_types=(AxisType.Auto,))
    placed = [jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip((a, x), (P("x"), P()), strict=True)]
    np.testing.assert_allclose(jax.jit(fused)(*placed), gram(a, x), rtol=1e-3, atol=1e-2)
    (call,) = fused_calls(jax.make_jaxpr(fused)(a, x).jaxpr)
    assert call.plan(targets.find("xla")).rewritings and not call.as_written().plan(targets.find("xla")).rewritings
    results = re.findall(r"(?:dot_general|multiply) .*-> tensor<([0-9]*)xf32>", jax.jit(fused).lower(*placed).as_text())
    assert len(results) < 2, results  # products with vectors


SOME = ("rows over both", "grouped", "sequences of pages", "moments", "results along the axis", "few rows")
FEW_CASES = ("grouped", "sequences of pages", "moments")  # the default tier
"""Sharded rows and heads, states exchanged over one mesh axis, what is gathered, and rows that no axis divides."""

if __name__ == "__main__":
    for case in CASES if ALL else FEW_CASES if FEW else SOME:
        if COUNT == 4 or any(BOTH in spec for spec in CASES[case][2]) or case == "heads and keys":
            check(case, "xla")
    for case in ("keys over both", "moments", "rows") if ALL else () if FEW else ("moments",):
        check(case, "interpret")
    for case in MERGED_BY_SHARES if ALL else ("lengths",):
        check_shares(case)
    check_inside_shard_map()
    check_shard_map_inside()
    check_merge()
    if COUNT == 4:
        check_constraints(() if ALL else ("scores",) if FEW else ("scores", "transposed", "result sharded otherwise"))
        check_fallback(("rows", "keys", "rows and keys on one mesh axis") if ALL else ("keys",))
    if not FEW:
        check_scopes()
        check_parts_of_mesh_axes()
        check_order_of_products()
        if COUNT == 4:
            check_vmap()
    if ALL and COUNT == 4:  # `test_tiles_that_a_piece_cannot_have` says the same of one kernel
        check_options(("rows", "keys"))
    print("ok")
