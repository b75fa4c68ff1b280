"""Plans: what they record, strictness, overrides, and their execution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.errors import FusionError, TargetError
from pallasfuse.execution import execute
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import INTERPRET, TARGETS, TRITON, XLA_CPU, Target, default_for, find
from tests.programs_by_name import attention, masked_attention, softmax, variance

ROWS = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
QKV = [jax.ShapeDtypeStruct((1024, 64), jnp.float32)] * 3


def plan_of(function, *shapes, target=XLA_CPU, **options):
    return make_plan(jax.make_jaxpr(function)(*shapes), target, FuseOptions(**options))


# --- what a kernel says about itself


def test_fields_of_a_rolling_kernel():
    plan = plan_of(attention, *QKV, tiles=(("l", 256),))
    (kernel,) = plan.kernels
    assert kernel.strategy == "rolling_update"
    assert kernel.axes == {"i": 1024, "l": 1024, "j": 64, "m": 64}
    assert set(kernel.tiles) == set(kernel.axes)
    assert all(1 <= kernel.tiles[a] <= n for a, n in kernel.axes.items())
    assert len(kernel.repairs) == 2
    assert all("exp(" in matrix for matrix in kernel.repairs.values())
    # inputs once, output once
    assert kernel.bytes_read == 3 * 1024 * 64 * 4
    assert kernel.bytes_written == 1024 * 64 * 4
    assert kernel.flops > 4 * 1024 * 1024 * 64
    assert kernel.price.us > 0 and kernel.price.limit in str(kernel.price)
    assert kernel.replaced.us > 1  # kernels, where no price was asked for
    assert kernel.visited_share == 1.0


def test_a_row_that_fits_is_a_single_pass():
    (kernel,) = plan_of(softmax, jax.ShapeDtypeStruct((4096, 128), jnp.float32), target=TRITON).kernels
    assert kernel.strategy == "single_pass"
    assert kernel.schedule.trips == 1


def test_masked_tiles_do_not_count():
    causal = masked_attention(lambda i, j: j <= i)
    (full,), (half,) = (plan_of(f, *QKV, tiles=(("i", 64), ("l", 64))).kernels for f in (attention, causal))
    assert half.visited_share == pytest.approx(sum(range(1, 17)) / 16**2)
    assert half.flops < 0.75 * full.flops


def test_conditions():
    assert plan_of(softmax, ROWS).conditions[0] == "reassociation only"
    nothing = plan_of(lambda x: x + 1, ROWS)
    assert (nothing.kernels, nothing.conditions) == ((), ())
    assert "none: nothing was fused" in str(nothing)


def test_skipped_tiles_are_an_exception():
    """A NaN in a row of v that no query sees is a NaN of the original: 0 * NaN."""
    causal = plan_of(masked_attention(lambda i, j: j <= i), *QKV, tiles=(("l", 256),))
    assert any("finite" in exception for exception in causal.exceptions)
    assert set(causal.exceptions) < set(causal.conditions)
    assert "exception: where l <= i is false" in causal.summary


def test_fallbacks_name_operation_line_and_reason():
    def sorted_softmax(x):
        return softmax(jnp.sort(x, axis=-1))

    plan = plan_of(sorted_softmax, ROWS)
    (fallback,) = plan.fallbacks
    assert fallback.operation == "sort"
    assert "test_pipeline.py" in fallback.source
    assert "sorted_softmax" in fallback.source
    assert str(fallback) == f"sort at {fallback.source}: {fallback.reason}"
    assert len(plan.kernels) == 1


def test_layout_is_no_fallback():
    assert plan_of(lambda x: softmax(x.T).reshape(-1).astype(jnp.float16), ROWS).fallbacks == ()


# --- the text of a plan


@pytest.mark.parametrize("target", [XLA_CPU, INTERPRET, TRITON], ids=lambda t: t.name)
def test_text_of_a_plan(target):
    plan = plan_of(attention, *QKV, target=target)
    text = str(plan)
    heads = [line for line in text.splitlines() if line.startswith("==")]
    assert heads[0] == f"== loop program (target {target.name})"
    assert heads[1].startswith(f"== kernel 1: {plan.kernels[0].name}, {plan.kernels[0].strategy}, from ")
    assert "programs_by_name.py" in heads[1]
    assert heads[2:] == ["== left to XLA: nothing but layout", "== conditions"]
    for part in (str(plan.program), str(plan.kernels[0].group), str(plan.kernels[0].program)):
        assert all(line.strip() in text for line in part.splitlines())
    assert "repair M(r, r') = " in text
    assert "100% of the tiles" in text
    assert "hoisted 1 / t8[i]" in text


def test_text_names_what_is_left():
    assert "  sort at " in str(plan_of(lambda x: softmax(jnp.sort(x, axis=-1)), ROWS))


def test_text_says_why_a_pass_is_not_shared():
    text = str(plan_of(lambda x: jnp.sum(jnp.round(x / jnp.max(x, -1, keepdims=True)), -1), ROWS))
    assert "cannot share pass 1: " in text


# --- strictness


def test_strict_lists_every_line_and_reason():
    def messy(x):
        a = jnp.sort(x, axis=-1)
        return softmax(a) + jnp.cumsum(x, axis=-1)

    with pytest.raises(FusionError) as error:
        plan_of(messy, ROWS, strict=True)
    message = str(error.value)
    lines = [line for line in message.splitlines() if " at " in line]
    assert len(lines) == len(plan_of(messy, ROWS).fallbacks) >= 2
    assert message.startswith(f"strict: {len(lines)} operations are left to XLA:")
    assert all("test_pipeline.py" in line for line in lines)
    assert message.endswith("Remove them from the fused function, or drop strict=True.")


def test_strict_accepts_what_is_fused_entirely():
    assert plan_of(softmax, ROWS, strict=True).fallbacks == ()


@pytest.mark.parametrize("target", [XLA_CPU, INTERPRET, TRITON], ids=lambda t: t.name)
def test_strict_has_no_exceptions(target):
    """The weighted sum waits for the finished maximum and visits what the mask hides; the others skip it."""
    causal, tiles = masked_attention(lambda i, j: j <= i), (("i", 64), ("l", 64))
    plan = plan_of(causal, *QKV, target=target, strict=True, tiles=tiles)
    (kernel,) = plan.kernels
    assert plan.exceptions == () and plan.conditions == ("reassociation only",)
    assert [f.pass_index for f in kernel.group.folds] == [0, 0, 1]
    half = sum(range(1, 17)) / 16**2
    assert kernel.visited_share == pytest.approx((half + 1) / 2)


def test_strict_keeps_the_single_pass_of_bounded_terms():
    """Sums of exponentials below a running maximum are finite whatever the data: they need no other pass."""
    for function in (
        softmax,
        lambda x: jax.nn.logsumexp(x, axis=-1),
        lambda x: jnp.sum(jnp.exp(x - x.max(-1, keepdims=True)), -1),
    ):
        (kernel,) = plan_of(function, ROWS, strict=True).kernels
        assert kernel.group.passes == 1


def test_strict_fuses_what_costs_alone_would_leave():
    """Scores of wide heads are computed twice on a CPU: slower than XLA, and what a strict user asked for."""
    wide = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 64), (4096, 64), (4096, 64))]
    plan = plan_of(attention, *wide, strict=True)
    assert len(plan.kernels) == 1 and not plan.exceptions


# --- options


def test_tiles_override_the_schedule():
    (kernel,) = plan_of(attention, *QKV, tiles=(("i", 32), ("l", 48), ("unknown", 7))).kernels
    assert (kernel.tiles["i"], kernel.tiles["l"]) == (32, 48)
    assert "i:1024/32" in str(kernel.program)
    (kernel,) = plan_of(attention, *QKV, tiles=(("l", 1 << 20),)).kernels
    assert kernel.tiles["l"] == 1024
    assert kernel.strategy == "single_pass"


def test_warps_and_stages_override_the_hints():
    (kernel,) = plan_of(attention, *QKV, target=TRITON, warps=2, stages=5).kernels
    assert (kernel.program.warps, kernel.program.stages) == (2, 5)


# --- execution


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("target", [XLA_CPU, INTERPRET], ids=lambda t: t.name)
def test_a_plan_runs_steps_in_order(target):
    def function(x, y):
        return softmax(jnp.sort(x, axis=-1)) @ y, jnp.sort(variance(y))

    x, y = (np.random.default_rng(n).normal(size=s).astype("float32") for n, s in enumerate([(20, 33), (33, 7)]))
    jaxpr = jax.make_jaxpr(function)(x, y)
    got = execute(make_plan(jaxpr, target, FuseOptions()), [x, y])
    for value, want in zip(got, function(x, y), strict=True):
        np.testing.assert_allclose(value, want, rtol=2e-5, atol=1e-6)


def test_outputs_that_are_inputs_literals_or_repeated():
    def function(x):
        s = softmax(x)
        return s, x, s, jnp.float32(3.0)

    x = np.random.default_rng(0).normal(size=(6, 9)).astype("float32")
    got = execute(plan_of(function, x), [x])
    for value, want in zip(got, function(x), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-6)


def test_a_target_without_an_emitter_is_an_error():
    nowhere = Target("nowhere", "cpu", "exact", XLA_CPU.device, 1024)
    with pytest.raises(TargetError, match="'nowhere' has no emitter"):
        execute(plan_of(softmax, ROWS, target=nowhere), [np.zeros((512, 4096), np.float32)])


# --- targets


def test_targets_are_found_by_name():
    assert all(find(name) is target for name, target in TARGETS.items())
    with pytest.raises(TargetError) as error:
        find("metal")
    assert (
        str(error.value) == f"no target 'metal': choose one of {', '.join(sorted(TARGETS))}, or None for the best one"
    )


def test_default_targets():
    assert {p: default_for(p).name for p in ("cpu", "cuda", "rocm", "gpu")} == {
        "cpu": "xla", "cuda": "triton", "rocm": "triton", "gpu": "triton"}  # fmt: skip
    assert default_for("cuda", frozenset({"9.0"})).name == "mosaic_gpu"
    assert default_for("cuda", frozenset({"9.0", "10.0"})).name == "triton"


def test_plans_for_a_gpu_need_no_device():
    plan = pf.fuse(attention).explain(*QKV, target="triton")
    assert plan.target is TRITON
    (kernel,) = plan.kernels
    assert all(t & (t - 1) == 0 for t in kernel.tiles.values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exponentials_of_half_precision_products_become_exp2(dtype):
    plan = pf.fuse(attention).explain(*[jax.ShapeDtypeStruct((1024, 64), dtype)] * 3, target="triton")
    (kernel,) = plan.kernels
    half = dtype != "float32"
    assert ("exp2(" in str(kernel.program)) is half
    assert any("exp2" in c for c in plan.conditions) is half


@pytest.mark.parametrize("target", ["triton", "mosaic_gpu"])
def test_products_without_an_exponential_have_no_condition_on_it(target):
    def chain(a, b, d):
        return (a @ b) @ d

    arrays = [jax.ShapeDtypeStruct(s, "float16") for s in ((64, 64), (64, 128), (128, 64))]
    plan = pf.fuse(chain).trace(*arrays).fuse(target).tile().plan
    assert (len(plan.kernels), plan.conditions) == (1, ("reassociation only",))
    assert not any("exp2" in e for e in plan.exceptions)
