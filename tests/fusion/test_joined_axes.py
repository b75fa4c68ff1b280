"""Neighbouring axes that are one axis: where they are, where something tells them apart, and what that is worth."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.first_time import Later
from pallasfuse.fusion.joined_axes import with_joined_axes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.expr import apply, const, index, mul, read, select
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, verify
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.proof.result import Record
from pallasfuse.proof.stages import joining

IMAGES = jax.ShapeDtypeStruct((3, 6, 5, 8), jnp.float32)


def _program(function, *structs):
    return convert(jax.make_jaxpr(function)(*structs)).program


def _extents(program):
    return {t.name: [a.extent for a in t.axes] for t in program.definitions()}


def _values(program, arrays):
    given = {t.name: a.reshape([x.extent for x in t.axes]) for t, a in zip(program.inputs, arrays, strict=True)}
    found = evaluate(program, given)
    return [np.asarray(found[name]).ravel() for name in program.outputs]


def group_norm(x):
    parts = x.reshape(3, 6, 5, 2, 4)
    centred = parts - parts.mean((1, 2, 4), keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.square(centred).mean((1, 2, 4), keepdims=True) + 1e-5)).reshape(x.shape)


def batch_norm(x):
    centred = x - x.mean((0, 1, 2))
    return centred * jax.lax.rsqrt(jnp.square(centred).mean((0, 1, 2)) + 1e-5)


def two_images(x, y):
    return jnp.square(x - y).mean((1, 2)), jax.nn.logsumexp(x, (1, 2))


@pytest.mark.parametrize(
    "function, structs, extents",
    [
        (group_norm, [IMAGES], [3, 30, 2, 4]),
        (batch_norm, [IMAGES], [90, 8]),
        (two_images, [IMAGES, IMAGES], [3, 30, 8]),
        (lambda x: x.mean(), [IMAGES], [720]),
    ],
)
def test_what_is_never_told_apart_is_one_axis(function, structs, extents):
    program = _program(function, *structs)
    joined = with_joined_axes(program)
    assert _extents(joined)[program.inputs[0].name] == extents
    arrays = [np.random.default_rng(n).normal(size=s.shape) for n, s in enumerate(structs)]
    for got, want in zip(_values(joined, arrays), _values(program, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def masked(x):
    return jnp.where(jnp.arange(6)[:, None] < jnp.arange(5), x.sum((0, 3)), 0.0).sum()


APART = {
    "a position along one": lambda x: jnp.where(jnp.arange(6)[None, :, None, None] < 4, x, 0.0).sum((1, 2)),
    "positions along both": masked,
    "a sum over one": lambda x: (x - x.mean(1, keepdims=True)).sum((1, 2)),
    "a factor along one": lambda x: (x * x[:1, :1, :, :1]).sum((1, 2)),
    "another order": lambda x: (x * x.transpose(0, 2, 1, 3).reshape(x.shape)).sum((1, 2)),
    "another order of one array": lambda x: jnp.einsum("bijc,bjic->bc", x, x.transpose(0, 2, 1, 3) + 1.0),
    "an element of one": lambda x: (x - x[:, 2:3]).sum((1, 2)),
    "a maximum that is compared along one": lambda x: (x >= x.max(2, keepdims=True)).sum((1, 2)),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_told_apart_stays(name):
    program = _program(APART[name], IMAGES)
    joined = with_joined_axes(program)
    if joined is not None:  # others may be one: no array has images of 30 elements
        assert all(30 not in extents for extents in _extents(joined).values()), name
        (x,) = (np.random.default_rng(0).normal(size=IMAGES.shape),)
        for got, want in zip(_values(joined, [x]), _values(program, [x]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


N, I, J, K, L = (Axis(name, extent) for name, extent in zip("nijkl", (3, 6, 5, 6, 5), strict=True))  # noqa: E741
X = Tensor("x", (N, I, J), "float32")
U, V = Tensor("u", (I,), "float32"), Tensor("v", (J,), "float32")
TURNED = Tensor("y", (L, K), "float32")
ROWS, COLUMNS = Tensor("r", (I, N), "float32"), Tensor("c", (N, J), "float32")
XR, XKL = (read("x", axes, "float32") for axes in ((N, I, J), (N, K, L)))


def total(name, body, axes=(N,), reduced=(I, J)):
    return Nest(name, axes, body, "float32", reduced, SUM)


def of(tensor):
    return read(tensor.name, tensor.axes, tensor.dtype)


def below(axis, many):
    return apply("lt", index(axis), const(many, "int32"))


SPLIT = {
    "a factor along the first": [total("s", mul(XR, of(U)))],
    "a factor along the second": [total("s", mul(XR, of(V)))],
    "the first before another": [total("s", mul(XR, of(ROWS)))],
    "the second after another": [total("s", mul(XR, of(COLUMNS)))],
    "another order": [total("s", mul(XR, read("y", (J, I), "float32")))],
    "a position along the first": [total("s", select(below(I, 4), XR, const(0.0, "float32")))],
    "a position along the second": [total("s", select(below(J, 3), XR, const(0.0, "float32")))],
    "a sum over the first": [total("s", XR), total("m", XR, (N, J), (I,))],
    "a sum over the second": [total("s", XR), total("m", XR, (N, I), (J,))],
    "a sum over the first of what does not have it": [total("s", XR), total("m", const(2.0, "float32"), (), (I,))],
    "a sum over the second of what does not have it": [total("s", XR), total("m", const(2.0, "float32"), (), (J,))],
    "told apart under another name": [total("s", XR), total("m", XKL, (N, K), (L,))],
    "a position under another name": [
        total("s", XR),
        Nest("m", (N, K, L), select(below(L, 3), XKL, const(0.0, "float32")), "float32"),
    ],
}


@pytest.mark.parametrize("name", SPLIT)
def test_each_way_to_tell_axes_apart(name):
    nests = SPLIT[name]
    needed = {t for n in nests for t in n.reads}
    inputs = tuple(t for t in (X, TURNED, U, V, ROWS, COLUMNS) if t.name in needed)
    program = verify(LoopProgram(inputs, tuple(nests), (nests[-1].name,)))
    assert with_joined_axes(program) is None


def test_axes_of_what_is_looked_up_stay():
    pages, table = Tensor("p", (K, I, J), "float32"), Tensor("t", (N,), "int32")
    found = Tensor("w", (N, I, J), "float32")
    made = External("w", found.axes, "float32", ("p", "t"), "a gather", lookup=Lookup(found, pages, table, K))
    nests = (made, total("s", of(found)))
    assert with_joined_axes(verify(LoopProgram((pages, table), nests, ("s",)))) is None
    without = (replace(made, lookup=None), total("s", of(found)))
    assert with_joined_axes(verify(LoopProgram((pages, table), without, ("s",)))) is not None


def test_names_of_one_dimension_are_joined_together():
    """One nest sums over `i` and `j` of a tensor, another over the same dimensions as `k` and `l`."""
    program = verify(LoopProgram((X,), (total("s", XR), total("m", mul(XKL, XKL), reduced=(K, L))), ("s", "m")))
    joined = with_joined_axes(program)
    assert [len(n.reduced) for n in joined.nests] == [1, 1] and _extents(joined)["x"] == [3, 30]
    x = np.random.default_rng(0).normal(size=(3, 6, 5))
    for got, want in zip(_values(joined, [x]), _values(program, [x]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_axes_that_nothing_sums_over_together_stay():
    assert with_joined_axes(_program(lambda x: jax.nn.softmax(x, -1), IMAGES)) is None


def test_tensors_that_are_read_under_two_names_are_joined_under_both():
    def distances(x, y):
        return jnp.square(x[:, None] - y[None]).sum((2, 3))

    square = jax.ShapeDtypeStruct((4, 6, 5), jnp.float32)
    program = _program(lambda x: distances(x, x), square)
    joined = with_joined_axes(program)
    assert _extents(joined)[program.inputs[0].name] == [4, 30]
    x = np.random.default_rng(0).normal(size=square.shape)
    np.testing.assert_allclose(_values(joined, [x])[0], _values(program, [x])[0], rtol=1e-12)


LARGE = jax.ShapeDtypeStruct((8, 64, 64, 512), jnp.bfloat16)


def large_norm(x):
    parts = x.astype(jnp.float32).reshape(8, 64, 64, 32, 16)
    centred = parts - parts.mean((1, 2, 4), keepdims=True)
    return (centred * jax.lax.rsqrt(parts.var((1, 2, 4), keepdims=True) + 1e-5)).reshape(x.shape).astype(x.dtype)


def test_a_norm_over_images_is_one_kernel_only_with_them():
    assert pf.fuse(large_norm).trace(LARGE).fuse("triton").tile().plan.kernels
    without = pf.fuse(large_norm, options=pf.FuseOptions(rewrite=False)).trace(LARGE).fuse("triton").tile().plan
    assert not without.kernels


def test_a_plan_with_joined_axes_is_right_proved_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PALLASFUSE_KEEP_PLANS", "1")
    monkeypatch.setattr(
        "pallasfuse.form_choice.predicted_us",
        lambda placements, groups: -float(placements.converted.unjoined is not None and len(groups) > 0),
    )
    monkeypatch.setattr("pallasfuse.fusion.judging.Judge.saving", lambda judge, *_: 1.0)
    x = jax.random.normal(jax.random.key(0), (4, 32, 32, 16)) + 3

    def norm(x):
        centred = x - x.mean((0, 1, 2))
        return centred * jax.lax.rsqrt(jnp.square(centred).mean((0, 1, 2)) + 1e-5)

    options = pf.FuseOptions(check=False)
    fused = pf.fuse(norm, options=options)
    plan = fused.explain(x)
    assert plan.converted.unjoined is not None and plan.kernels
    np.testing.assert_allclose(fused(x), norm(x), rtol=2e-5, atol=2e-5)
    report = pf.verify(fused, x, delta=1e-4)
    assert report.proof.counterexample is None and not report.proof.uncovered, report
    monkeypatch.setattr("pallasfuse.pipeline.make_plan", lambda *args: pytest.fail("it is planned again"))
    again = pf.fuse(norm, options=options)
    np.testing.assert_array_equal(again(x), fused(x))
    kept = again.explain(x)
    assert kept.converted.unjoined is not None and str(kept.program) == str(plan.program)


@pytest.mark.parametrize("wrong", ["another order", "another sum"])
def test_the_proof_notices_axes_that_were_joined_wrongly(wrong):
    converted = convert(jax.make_jaxpr(group_norm)(IMAGES))
    joined = with_joined_axes(converted.program)
    nests = list(joined.nests)
    if wrong == "another sum":
        at = next(n for n, nest in enumerate(nests) if nest.is_reduction)
        nests[at] = replace(nests[at], reducer=MAX)
    else:
        at = next(n for n, nest in enumerate(nests) if len(nest.axes) > 2)
        nests[at] = replace(nests[at], axes=(*nests[at].axes[:-2], *nests[at].axes[:-3:-1]))
    record = Record()
    joining(converted.joined(Later(lambda: replace(joined, nests=tuple(nests)))), record)
    assert record.counterexample() is not None
    right = Record()
    joining(converted.joined(Later(lambda: joined)), right)
    assert right.counterexample() is None and right.stages


@pytest.mark.parametrize("tiles", [(("j", 4),), (("i", 2), ("k", 4))])
def test_who_asks_for_tiles_names_the_axes_of_the_program_as_it_is_written(tiles):
    images = jax.ShapeDtypeStruct((16, 32, 128, 128), jnp.float32)

    def norm(x):
        return (x - x.mean((2, 3), keepdims=True)) * jax.lax.rsqrt(x.var((2, 3), keepdims=True) + 1e-5)

    options = pf.FuseOptions(target="triton", check=False, price=True, tiles=tiles)
    assert pf.fuse(norm, options=options).explain(images).converted.unjoined is None
    assert (
        pf.fuse(norm, options=pf.FuseOptions(target="triton", check=False, price=True))
        .explain(images)
        .converted.unjoined
        is not None
    )


def test_forms_of_the_same_equations_are_compared_by_what_their_kernels_save(monkeypatch):
    """Whatever XLA is thought to take for the rest in other axes, it runs the same rest."""
    from pallasfuse import form_choice

    known = form_choice.predicted_us
    images = jax.ShapeDtypeStruct((16, 32, 128, 128), jnp.float32)

    def norm(x):
        return (x - x.mean((2, 3), keepdims=True)) * jax.lax.rsqrt(x.var((2, 3), keepdims=True) + 1e-5)

    options = pf.FuseOptions(target="triton", check=False, price=True)
    assert pf.fuse(norm, options=options).explain(images).converted.unjoined is not None
    for error_us in (1000.0, -1000.0):  # in the joined form, with kernels and without
        monkeypatch.setattr(
            form_choice, "predicted_us", lambda p, g, e=error_us: known(p, g) + e * (p.converted.unjoined is not None)
        )
        assert pf.fuse(norm, options=options).explain(images).converted.unjoined is not None


def turned(x, angles):
    """Halves of a head turned by tables that are tiled for both, as queries and as keys."""
    cos, sin = jnp.tile(jnp.cos(angles), (1, 2)), jnp.tile(jnp.sin(angles), (1, 2))
    first, second = jnp.split(x, 2, -1)
    y = x * cos + jnp.concatenate([-second, first], -1) * sin
    return y @ y.T


def turned_by_signs(x, angles):
    signs = jnp.where(jnp.arange(x.shape[1]) < x.shape[1] // 2, -1.0, 1.0)
    y = x * jnp.tile(jnp.cos(angles), (1, 2)) + jnp.roll(x, x.shape[1] // 2, 1) * signs
    return y @ y.T


LONG, ANGLES = jax.ShapeDtypeStruct((40, 32), jnp.float32), jax.ShapeDtypeStruct((40, 16), jnp.float32)


@pytest.mark.parametrize("function", [turned, turned_by_signs])
def test_small_repetitions_do_not_cut_an_axis(function):
    """The tables are no larger than an eighth of the largest array."""
    structs = jax.ShapeDtypeStruct((40, 9, 32), jnp.float32), ANGLES

    def of_heads(x, angles):
        return jax.vmap(lambda head: function(head, angles), 1)(x)

    program = _program(of_heads, *structs)
    joined = with_joined_axes(program)
    sums = [n for n in joined.nests if isinstance(n, Nest) and n.is_reduction]
    assert [[a.extent for a in n.reduced] for n in sums] == [[32]]
    left = [
        n
        for n in joined.nests
        if isinstance(n, External) and n.name in {d.name for d in program.nests if isinstance(d, Nest)}
    ]
    assert left
    assert all(max(a.extent for a in n.axes) <= 40 and len(n.axes) <= 2 for n in left)


def test_large_repetitions_stay():
    assert with_joined_axes(_program(turned, LONG, ANGLES)) is None


@pytest.mark.parametrize("function", [pytest.param(turned, marks=pytest.mark.deep), turned_by_signs])
def test_values_with_repetitions_left(function):
    rng = np.random.default_rng(0)
    x, angles = (
        jnp.asarray(rng.normal(size=(40, 9, 32)), jnp.float32),
        jnp.asarray(rng.normal(size=(40, 16)), jnp.float32),
    )

    def attention(x, angles):
        scores = jax.vmap(lambda head: function(head, angles), 1)(x)
        return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(scores, -1), x)

    fused = pf.fuse(attention, options=pf.FuseOptions(check=False, price=False, target="interpret"))
    np.testing.assert_allclose(fused(x, angles), attention(x, angles), rtol=2e-5, atol=2e-5)
    assert pf.verify(fused, x, angles, delta=1e-4).counterexample is None
