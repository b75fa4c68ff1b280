"""Bodies of loops and branches are planned by themselves, once, and run as fused calls inside their loops."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import bodies, check, pipeline, primitive, report
from pallasfuse.ir.boundary import NO_LOOP
from pallasfuse.loop_invariants import split, stored_for
from pallasfuse.options import FuseOptions
from pallasfuse.price.terms import Price
from pallasfuse.proof import Counterexample
from pallasfuse.targets import find

WIDTH, ROWS = 16, 24


def layer(x, p):
    """Attention with a norm before it and projections around it."""
    n = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    q, k, v = (n @ p[name] for name in "qkv")
    i = jnp.arange(x.shape[0])
    weights = jax.nn.softmax(jnp.where(i[:, None] >= i[None, :], q @ k.T, -1e9), -1)
    return x + weights @ v @ p["o"]


def parameters(*leading, seed=0):
    rng = np.random.default_rng(seed)
    return {name: 0.1 * rng.normal(size=(*leading, WIDTH, WIDTH)).astype("float32") for name in "qkvo"}


def rows(*leading, seed=1):
    return np.random.default_rng(seed).normal(size=(*leading, ROWS, WIDTH)).astype("float32")


def scanned(x, ps):
    return jax.lax.scan(lambda c, p: (layer(c, p), c.sum()), x, ps)


def backwards(x, ps):
    return jax.lax.scan(lambda c, p: (layer(c, p), c[0]), x, ps, reverse=True, unroll=2)


def repeated(x, p):
    return jax.lax.fori_loop(0, 3, lambda i, c: layer(c, p) + i, x)


def until(x, p):
    def small(state):
        return (state[0] < 4) & (jnp.abs(state[1]).max() < p["q"].sum() + 1e3)

    return jax.lax.while_loop(small, lambda s: (s[0] + 1, layer(s[1], p)), (0, x))[1]


def chosen(x, p):
    return jax.lax.cond(x[0, 0] > 0, lambda c: layer(c, p), lambda c: 2 * c, x)


def switched(x, p):
    which = jnp.int32(x[0, 0] > 0) + 1
    return jax.lax.switch(which, [lambda c: c, lambda c: layer(c, p), lambda c: layer(-c, p)], x)


def mapped(x, p):
    return jax.lax.map(lambda c: layer(c, p), jnp.stack([x, 2 * x]))


def nested(x, ps):
    return jax.lax.fori_loop(0, 2, lambda i, c: scanned(c, ps)[0], x)


def beside(x, p):
    """A kernel outside, that reads what the loop has made."""
    return jax.nn.softmax(repeated(x, p) @ x.T, -1) @ x


ONE, THREE = (rows(), parameters()), (rows(), parameters(3))
PROGRAMS = {
    "scan": (scanned, THREE),
    "backwards": (backwards, THREE),
    "fori": (repeated, ONE),
    "while": (until, ONE),
    "cond": (chosen, (abs(rows()), parameters())),
    "cond, not taken": (chosen, (-abs(rows()), parameters())),
    "switch": (switched, ONE),
    "map": (mapped, ONE),
    "nested": (nested, THREE),
    "beside": (beside, ONE),
}


def everything(function, **more):
    return pf.fuse(function, options=FuseOptions(price=False, check=False, **more))


def close(have, want, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def innermost(plan):
    return [p for p in plan.all() if p.kernels]


@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_bodies_have_kernels(name):
    function, arguments = PROGRAMS[name]
    fused = everything(function)
    close(fused(*arguments), jax.jit(function)(*arguments))
    close(jax.jit(fused)(*arguments), function(*arguments))
    plan = fused.explain(*arguments)
    assert plan.bodies and all(
        "planned by itself" in str(f) for f in plan.fallbacks if f.operation in ("scan", "while", "cond")
    )
    assert any("max" in str(k.group.folds) for p in innermost(plan) for k in p.kernels), plan.summary


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", ["scan", "while", "cond"])
def test_bodies_are_proved(name):
    function, arguments = PROGRAMS[name]
    report = pf.verify(everything(function), *arguments, delta=1e-4)
    assert report.equivalent, str(report)
    assert any("body of" in s or "branch" in s for s in report.proof.stages)


def test_a_wrong_body_is_found(monkeypatch):
    """The counterexample of a body is the program's."""
    wrong = Counterexample("lowering", "t", (), "1", "2")
    original = report.prove_plan

    def proved(plan, **how):
        found = original(plan, **how)
        return found if plan.bodies else replace(found, holds=False, counterexample=wrong)

    monkeypatch.setattr(report, "prove_plan", proved)
    found = pf.verify(everything(scanned), *THREE, delta=1e-4)
    assert not found.equivalent and found.counterexample is wrong


def test_transformations():
    fused = everything(scanned)
    xs = rows(3)
    close(jax.vmap(fused, (0, None))(xs, THREE[1]), jax.vmap(scanned, (0, None))(xs, THREE[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ours, theirs = (jax.grad(lambda x, f=f: f(x, THREE[1])[0].sum())(THREE[0]) for f in (fused, scanned))
    close(ours, theirs, 2e-3)


def test_a_body_is_planned_once_whoever_asks(monkeypatch):
    made = []
    original = primitive.plan_of
    monkeypatch.setattr(primitive, "plan_of", lambda *a: made.append(a) or original(*a))
    close(everything(scanned)(*THREE), jax.jit(scanned)(*THREE))
    assert len(made) == 2  # the program and its body, for three layers


def test_what_does_not_change_is_computed_before_the_loop():
    def steps(x, cost):
        def step(i, c):
            kernel = jnp.exp(-((cost[:, None] - cost[None, :]) ** 2).sum(-1))
            return jax.nn.softmax(kernel @ c + i, -1) @ c.T @ c

        return jax.lax.fori_loop(0, 3, step, x)

    arguments = rows(), rows(seed=5)
    fused = everything(steps)
    close(fused(*arguments), jax.jit(steps)(*arguments), 1e-4)
    (body,) = fused.explain(*arguments).bodies
    assert not any("exp(-" in str(n.body) or "square" in str(n.body) for n in body.plan.program.nests)


NEAR = (np.arange(ROWS)[:, None] + np.arange(-2, 3)) % ROWS


def test_what_no_kernel_reads_stays_in_the_loop():
    def steps(x, weights, shares):
        def step(i, c):
            normed = jax.nn.softmax(shares @ c + i, -1)
            summed = jnp.cumsum(weights[:, NEAR] + c.T[:, :, None], -1)  # no kernel has running sums
            return normed + 0.01 * summed[:, :, -1].T

        return jax.lax.fori_loop(0, 3, step, x)

    def read_by_a_kernel(x, weights, shares):
        def step(i, c):
            return jax.nn.softmax(weights[:, NEAR] * c.T[:, :, None] + i, -1).sum(-1).T

        return jax.lax.fori_loop(0, 3, step, x)

    arguments = rows(), parameters()["q"][:, :1] + rows(seed=3).T, rows(seed=4) @ rows(seed=5).T

    def read_in_another_layout(x, weights, shares):
        def step(i, c):
            around = jnp.flip(weights[:, NEAR], -1)  # no kernel reads backwards: XLA turns it
            return jax.nn.softmax(around * c.T[:, :, None] + i, -1).sum(-1).T

        return jax.lax.fori_loop(0, 3, step, x)

    def read_in_a_loop_inside(x, weights, shares):
        def step(i, c):
            around = weights[:, NEAR]

            def inner(j, c):
                return jax.nn.softmax(around * c.T[:, :, None] + j, -1).sum(-1).T

            return jax.lax.fori_loop(0, 2, inner, c)

        return jax.lax.fori_loop(0, 3, step, x)

    def inside(function):
        fused = everything(function)
        close(fused(*arguments), jax.jit(function)(*arguments), 1e-4)
        (loop,) = [e for e in fused.explain(*arguments).converted.jaxpr.eqns if e.primitive.name in ("scan", "while")]
        body = loop.params.get("body_jaxpr", loop.params.get("jaxpr"))
        return [e.outvars[0].aval.shape for e in body.eqns if e.primitive.name == "gather"]

    assert (WIDTH, *NEAR.shape) in inside(steps)
    for function in (read_by_a_kernel, read_in_another_layout, read_in_a_loop_inside):
        assert (WIDTH, *NEAR.shape) not in inside(function), function.__name__


@pytest.mark.parametrize(
    ("trips", "target", "is_used"),
    [(1, "triton", False), (1000, "triton", True), (None, "triton", True), (1, "xla", True)],
)
def test_kernels_save_more_in_all_trips_than_it_takes_to_store_what_they_read(trips, target, is_used):
    body = jax.make_jaxpr(lambda around, c: around.sum(-1) + c)(jnp.ones((64, 24, 5)), jnp.ones((64, 24)))

    def stored(read):
        assert read == {0}
        return jax.make_jaxpr(lambda weights: weights[:, NEAR])(jax.ShapeDtypeStruct((1 << 16, ROWS), "float32"))

    kernel = SimpleNamespace(replaced=Price(9.0, ()), price=Price(8.0, ()), takes_slices=False, reads=("around",))
    plan = SimpleNamespace(
        fuses=True, kernels=[kernel], at_boundary={}, options=FuseOptions(price=True), target=find(target),
        converted=SimpleNamespace(jaxpr=body, variable={"around": body.jaxpr.invars[0]}),
    )  # fmt: skip
    form = bodies.BodyForm(body, NO_LOOP, trips=trips, stored=stored)
    assert (bodies.best_form([form], lambda _: ("call", plan)) is not None) == is_used


def test_stored_for_kernels_alone_are_elements_of_smaller_arrays():
    def body(weights, table, c):
        around = jnp.where(weights[:, NEAR] > 0, weights[:, NEAR], -1.0)
        sums = jnp.cumsum(table.astype("float32"), 0)  # XLA stores them, too
        return (c * around, c * sums, c * (table @ table.T).sum(), c * jnp.where(weights > 0, weights, -1.0).sum())

    arguments = rows().T, rows().astype("float16"), rows()[0, 0]
    whole = jax.make_jaxpr(body)(*arguments)
    parts = split(whole, [True, True, False])
    passed = [v.aval.shape for v in parts.passed]
    assert {(WIDTH, *NEAR.shape), (ROWS, WIDTH), ()} <= {*passed}
    (stored,) = stored_for(parts, whole, range(len(passed))).outvars
    assert stored.aval.shape == (WIDTH, *NEAR.shape)
    assert stored_for(parts, whole, ()) is None


@pytest.mark.parametrize(("trips", "has_kernels"), [(1, False), (9, True)])
def test_a_loop_of_few_trips_stores_nothing_for_kernels_alone(trips, has_kernels):
    def steps(x, table, places):
        def step(c, _):
            bias = table[places]  # as large as the scores, of 64 numbers
            return jax.nn.softmax(c @ c.T * 0.1 + bias, -1).astype(c.dtype) @ c, None

        return jax.lax.scan(step, x, length=trips)[0]

    shapes = ((512, 64), "bfloat16"), ((64,), "float32"), ((512, 512), "int8")
    plan = pf.fuse(steps, options=FuseOptions(price=True)).explain(
        *(jax.ShapeDtypeStruct(*s) for s in shapes), target="triton"
    )
    assert [len(b.plan.kernels) for b in plan.bodies] == [1] * has_kernels


def test_a_body_without_kernels_is_what_it_was():
    """Nothing of the loop is rebuilt: the program is the very one that jax.jit compiles."""

    def plain(x):
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ c.T @ c), x)

    def text(f):
        return jax.jit(f).lower(rows()).as_text()

    fused = pf.fuse(plain, options=FuseOptions(price=True, check=False))
    assert not fused.explain(rows()).fuses
    assert "while" in text(fused) and text(fused).count("dot_general") == text(plain).count("dot_general")


def test_effects_inside_stay(capfd):
    def talks(x, ps):
        def step(c, p):
            jax.debug.print("step")
            return layer(c, p), None

        return jax.lax.scan(step, x, ps)[0]

    close(everything(talks)(*THREE), jax.jit(scanned)(*THREE)[0])
    jax.effects_barrier()
    assert capfd.readouterr().out.count("step") == 3


def test_strict_says_that_a_loop_is_left():
    with pytest.raises(pf.FusionError, match="scan"):
        pf.fuse(scanned, strict=True)(*THREE)


def test_tiles_that_are_asked_for_are_those_outside():
    fused = everything(beside, tiles=(("i", 8),))
    close(fused(*ONE), jax.jit(beside)(*ONE), 1e-4)


def test_scanned_modules():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x)), None

    layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()
    x = rows(2)
    variables = layers.init(jax.random.key(0), x, None)
    fused = everything(lambda v, x: layers.apply(v, x, None)[0])
    close(fused(variables, x), layers.apply(variables, x, None)[0], 1e-4)
    (body,) = fused.explain(variables, x).bodies
    assert sum(len(k.group.folds) == 3 for k in body.plan.kernels) == 1


# --- what is around


def test_exceptions_of_bodies_are_the_plans():
    plan = everything(scanned).explain(*THREE)
    (body,) = plan.bodies
    assert set(body.plan.exceptions) <= set(plan.exceptions) <= set(plan.conditions) and plan.exceptions


def test_bodies_know_how_many_trips_save_what_their_kernels_do():
    """Nobody knows the trips of a while loop; and what is computed before a loop saves more than its kernels."""

    def hoisted(x, p):
        return jax.lax.scan(lambda c, _: (layer(c, {**p, "q": p["q"] @ p["q"].T @ p["q"]}), None), x, None, length=4)[0]

    def trips(function, *arrays):
        return [b.trips for b in everything(function).explain(*arrays).bodies]

    assert trips(scanned, *THREE) == [3]
    assert trips(repeated_by_while, *ONE) == [None]
    assert trips(hoisted, *ONE[:2]) == [None]


def test_stages_lower_bodies_for_the_target_that_they_show():
    tiled = everything(scanned).trace(*THREE).fuse("interpret").tile()
    assert all(k.target.name == "interpret" for p in tiled.plan.all() for k in p.kernels)
    compiled = tiled.lower().compile()
    close(compiled(*THREE), jax.jit(scanned)(*THREE), 1e-4)


def test_kernels_of_bodies_are_among_those_that_fail(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))  # what fails is remembered
    plan = everything(scanned).explain(*THREE)
    monkeypatch.setattr(check, "compiled", lambda *_: "RuntimeError: shared memory")
    found = check.find_failures(plan, jax.devices()[0])
    assert len(found) == len({k.name for p in plan.all() for k in p.kernels})


def test_symbolic_shapes():
    """A body of known shapes is planned in a program whose own are not known."""

    def each(xs, p):
        return jax.lax.scan(lambda c, x: (c + layer(x, p).sum(), layer(x, p)), jnp.float32(0), xs)

    (count,) = jax.export.symbolic_shape("b")
    xs = jax.ShapeDtypeStruct((count, ROWS, WIDTH), jnp.float32)
    plan = everything(each).explain(xs, parameters())
    assert [len(b.plan.kernels) > 0 for b in plan.bodies] == [True]


@pytest.mark.parametrize("typed", [False, True])
def test_inside_a_shard_map(typed):
    """Arrays that vary over a mesh have types of their own."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows_of, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    fused = everything(scanned)
    run = jax.shard_map(
        lambda x, p: fused(x, p)[0], mesh=mesh, in_specs=(rows_of, whole), out_specs=rows_of, check_vma=typed
    )
    close(jax.jit(run)(*THREE), jax.jit(scanned)(*THREE)[0])


def test_a_loop_that_cannot_be_rebuilt_has_no_bodies(monkeypatch):
    def refuses(*_, **__):
        raise TypeError("no such scan")

    monkeypatch.setattr(bodies.jax.lax, "scan", refuses)
    plan = everything(repeated_by_while).explain(*ONE)
    monkeypatch.undo()
    assert plan.bodies  # a while loop is no scan
    jaxpr = jax.make_jaxpr(scanned)(*THREE)
    monkeypatch.setattr(bodies.jax.lax, "scan", refuses)
    call = primitive.FusedCall(jaxpr, FuseOptions(price=False, check=False), "scanned", primitive.Once())
    kept, found = call.with_bodies(find("xla"))
    assert kept is jaxpr and found == ()


def repeated_by_while(x, p):
    return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layer(s[1], p)), (0, x))[1]


def test_a_body_that_is_proved_wrong_is_an_error(monkeypatch):
    def wrong(plan, **_):
        raise pf.VerificationError("a counterexample")

    monkeypatch.setattr(pipeline, "prove_plan", wrong)
    with pytest.raises(pf.VerificationError):
        everything(scanned, verify="stages")(*THREE)


def test_options_that_switch_the_check_off_do_so_in_bodies(monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CHECK", "1")
    jaxpr = jax.make_jaxpr(scanned)(*THREE)
    for options, checked in ((FuseOptions(parts=1), False), (FuseOptions(check=True), True)):
        call = primitive.FusedCall(jaxpr, replace(options, price=False), "scanned", primitive.Once())
        call.with_bodies(find("xla"))
        assert [b.options.check for b in call.bodies.values()] == [checked]


def test_metadata_of_a_loop_is_kept():
    metadata = pytest.importorskip("jax.experimental.xla_metadata")

    def marked(x, ps):
        with metadata.set_xla_metadata(mark="here"):
            return scanned(x, ps)

    assert 'mark = "here"' in jax.jit(everything(marked)).lower(*THREE).as_text()
