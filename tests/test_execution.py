"""What runs a plan: kernels under the scopes of the user that they replace, so that HLO and profiles show them."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import store
from pallasfuse.execution import as_function
from pallasfuse.options import FuseOptions

X, W = jax.ShapeDtypeStruct((2048, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)


def attend(x, weights):
    with jax.named_scope("attn"):
        q = x @ weights
        return jax.nn.softmax(q @ x.T, -1) @ x


def stack(x, weights, layers=2):
    for n in range(layers):
        with jax.named_scope(f"layer_{n}"):
            x = jnp.tanh(x + attend(x, weights))  # short enough for the kernels of every target
    return x


def named_instructions(text):
    """The instructions of an HLO text that say where they come from: what they do, and from where."""
    return re.findall(r'^.* ([a-z][\w-]*)\(.*op_name="([^"]*)"', text, re.MULTILINE)


def compiled(fused, *arguments):
    return named_instructions(jax.jit(fused).lower(*arguments).compile().as_text())


def on_h100():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("layers", [2, 12])  # of the latter, equal kernels are one function, of all layers
def test_operations_of_kernels_are_in_the_scopes_that_they_replace(layers):
    fused = pf.fuse(lambda x, w: stack(x, w, layers), target="xla")
    plan = fused.explain(X, W)
    assert plan.repeated or layers == 2
    attention = [k for k in plan.kernels if len(k.group.folds) >= 2]
    assert len(attention) == layers
    found = compiled(fused, X, W)
    for number, kernel in enumerate(attention):
        assert str(plan.scopes_of(kernel)) == f"layer_{number}/attn"
        scopes = f"/layer_{number}/attn/{kernel.name}/" if layers == 2 else "layer_*/attn/fused_t*/"
        inside = {what for what, name in found if scopes in name}
        assert {"exponential", "while"} <= inside
    kept = {name for what, name in found if what == "dot" and "/fused_" not in name}
    assert all(f"/layer_{n}/attn/dot_general" in " ".join(kept) for n in range(layers))  # what XLA keeps
    assert all("layer_" in name for what, name in found if what == "exponential")


def test_operations_in_modules_of_flax_are_in_their_scopes():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.SelfAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
            return x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(96, name="up")(x)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for n in range(2):
                x = Layer(name=f"layer_{n}")(x)
            return x

    model, x = Model(), jnp.ones((1, 256, 64))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = compiled(pf.fuse(model.apply, target="xla"), variables, x)
    for layer in ("layer_0", "layer_1"):
        inside = [(what, name) for what, name in found if re.search(rf"/{layer}/attention/attention/fused_t\w+/", name)]
        assert any(what == "exponential" for what, _ in inside)
    rest = [name for what, name in found if what in ("exponential", "rsqrt") and "/fused_" not in name]
    assert all("/layer_" in name for name in rest)  # a kernel may compute parts of two layers


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("target", ["triton", "mosaic_gpu"])
def test_kernels_for_gpus_are_in_the_scopes_that_they_replace(target, layers):
    x, w = (jax.ShapeDtypeStruct(s, jnp.float16) for s in ((4096, 64), (64, 64)))
    fused = pf.fuse(lambda x, w: stack(x, w, layers), target=target)
    plan = fused.explain(x, w)
    assert plan.repeated or layers == 2
    kernels = [k for k in plan.kernels if len(k.group.folds) >= 2]
    assert len(kernels) == layers and target in {k.target.name for k in kernels}
    with on_h100():
        text = jax.jit(fused).trace(x, w).lower(lowering_platforms=("cuda",)).as_text(dialect="hlo", debug_info=True)
    found = [(what, name) for what, name in named_instructions(text) if what in ("custom-call", "call")]
    for number, kernel in enumerate(kernels):
        assert any(f"layer_{number}/attn/{kernel.name}/" in name for _, name in found)
    calls = [name.split("/")[-2] for what, name in found if what == "custom-call" and name.endswith("/pallas_call")]
    assert calls and all(
        re.fullmatch(r"fused(_t?[0-9]+)+", name) for name in calls
    )  # plain names, also of shared kernels


def test_what_is_computed_outside_does_not_name_a_kernel():
    """A mask that all layers share is computed in each kernel; what counts are its reductions."""

    def causal(x):
        visible = jnp.tril(jnp.ones((2048, 2048), bool))
        for n in range(2):
            with jax.named_scope(f"layer_{n}"):
                rows = 1024 * (n + 1)
                yield jax.nn.softmax(jnp.where(visible[:rows], x[:rows] @ x.T, -jnp.inf), -1) @ x

    plan = pf.fuse(lambda x: list(causal(x)), target="xla").explain(X)
    assert sorted(str(plan.scopes_of(k)) for k in plan.kernels) == ["layer_0", "layer_1"]


def test_a_kernel_of_two_scopes_is_in_the_one_around_both():
    def normalised(x):
        with jax.named_scope("outer"):
            with jax.named_scope("maximum"):
                m = x.max(-1, keepdims=True)
            with jax.named_scope("sum"):
                return jnp.exp(x - m).sum(-1)

    plan = pf.fuse(normalised, target="xla").explain(X)
    assert [str(plan.scopes_of(k)) for k in plan.kernels] == ["outer"]


def test_bodies_of_loops_are_in_their_scopes():
    def scanned(x, w):
        def trip(x, _):
            with jax.named_scope("block"):
                return jnp.sin(attend(x, w)), None

        with jax.named_scope("layers"):
            return jax.lax.scan(trip, x, None, length=3)[0]

    found = compiled(pf.fuse(scanned, target="xla"), X, W)
    inside = [name for what, name in found if what == "exponential"]
    assert inside and all(re.search(r"/layers/while/body/.*block/attn/fused_t\w+/", name) for name in inside)


@pytest.mark.optimized
def test_a_kept_plan_has_the_scopes_of_the_program_at_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_KEEP_PLANS", "1")
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))

    def scopes(prefix):
        def layers(x, w):
            with jax.named_scope(prefix):
                return stack(x, w, 12)

        store._store_in.cache_clear()
        fused = pf.fuse(layers, options=FuseOptions(target="xla", price=False))
        plan = fused.explain(X, W)
        found = {name for what, name in compiled(fused, X, W) if what == "exponential"}
        assert all(f"{prefix}/layer_*/attn/" in name for name in found)
        return type(plan.kernels[0]).__name__, [str(plan.scopes_of(k)) for k in plan.kernels]

    (_, first), (kept, second) = scopes("one"), scopes("another")
    assert kept == "_Kept" and "one/layer_3/attn" in first
    assert second == [name.replace("one/", "another/") for name in first]


def test_scopes_around_a_loop_are_said_once():
    """`exclude` knows them inside of its body, too, whether it names one of them or not."""

    def model(x, w):
        with jax.named_scope("model"):
            return jax.lax.scan(lambda c, _: (stack(c, w, 1), None), x, None, length=3)[0]

    def exponentials(*exclude):
        fused = pf.fuse(model, options=FuseOptions(target="xla", price=False, exclude=exclude))
        return bool(fused.explain(X, W).bodies), {name for what, name in compiled(fused, X, W) if what == "exponential"}

    assert exponentials("another") == exponentials()
    fuses, names = exponentials("another")
    assert fuses and all(name.count("/model/") == 1 for name in names)
    assert not exponentials("model")[0] and not exponentials("model/layer_0")[0]


@pytest.mark.parametrize(("target", "barriers"), [("triton", 1), ("xla", 0)])
def test_results_in_another_shape_are_reshaped_out_of_sight_of_xla_on_gpus(target, barriers):
    """The kernel stores both axes of the keys, the program has one: rows of one axis are rows that XLA keeps on the chip."""

    def function(q, k):
        return jnp.tanh(jnp.einsum("bmd,bnd->bmn", q, k.reshape(64, 640, 64)))

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 80, 64), (64, 8, 80, 64))]
    plan = pf.fuse(function, options=FuseOptions(check=False, price=False)).explain(*shapes, target=target)
    (kernel,) = plan.kernels
    assert [a.extent for a in kernel.group.outputs[0].axes] == [64, 80, 8, 80]
    lines = str(jax.make_jaxpr(as_function(plan))(*shapes)).splitlines()
    assert sum("optimization_barrier" in line and "[64,80,640]" in line for line in lines) == barriers
