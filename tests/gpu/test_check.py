"""On a GPU: what is checked is not slower, short programs win by the time of their kernels, too, and nothing crashes."""

import statistics
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasfuse as pf
from pallasfuse import execution, measure, timing
from pallasfuse.check import check as check_plan
from pallasfuse.isolation import apart
from pallasfuse.options import FuseOptions

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PALLASFUSE_CHECK", "1")


def normal(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def attend(q, k, v, bias=0.0, mask=True):
    s = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5 + bias
    p = jax.nn.softmax(jnp.where(mask, s, -jnp.inf), axis=-1)
    return jnp.einsum("hij,hjd->hid", p.astype(q.dtype), v)


def relative(q, k, v, table):
    n = q.shape[1]
    distance = jnp.clip(jnp.arange(n)[:, None] - jnp.arange(n) + 64, 0, 127)
    return attend(q, k, v, jnp.moveaxis(table[distance], -1, 0))


def paged(q, keys, values, pages):
    k, v = (jnp.moveaxis(x[pages].reshape(-1, *x.shape[2:]), 1, 0) for x in (keys, values))
    return attend(q, k, v)


def pairs(q, k, v, bias, mask):
    return attend(q, k, v, bias, mask[:, None] & mask)


HEAD = [normal(8, 1024, 64, seed=s) for s in range(3)]
CASES = {
    "relative": (relative, [*HEAD, normal(128, 8, dtype=jnp.float32)]),
    "paged": (paged, [normal(8, 16, 64), normal(64, 32, 8, 64), normal(64, 32, 8, 64), jnp.arange(64)[::-1]]),
    "pairs": (pairs, [*HEAD, normal(8, 1024, 1024, dtype=jnp.float32), jnp.arange(1024) < 1000]),
}


def medians_ms(*calls, rounds=20):
    """Of eight calls that are awaited together, in turns."""
    taken = [[] for _ in calls]
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(rounds):
        for found, call in zip(taken, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(8)])
            found.append(1e3 * (time.perf_counter() - start) / 8)
    return [statistics.median(f) for f in taken]


@pytest.mark.parametrize("check", [None, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", list(CASES))
def test_what_crashed_runs(name, check):
    function, arguments = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel may be given up with a warning
        got = pf.fuse(function, options=FuseOptions(check=check))(*arguments)
    want = jax.jit(function)(*arguments)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.05)


def too_large(x):
    """A kernel whose operands do not fit in shared memory."""

    def kernel(given, result):
        result[...] = jnp.dot(given[...], given[...].T).astype(x.dtype)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((512, 512), x.dtype))(x)


def test_too_much_shared_memory_is_a_warning(monkeypatch):
    """In the check, and without it by the call itself."""
    original = execution.run_phases

    def run(phases, arrays):
        found = original(phases, arrays)
        return {n: x + too_large(x.reshape(512, 1024))[0, 0] for n, x in found.items()}

    monkeypatch.setattr(execution, "run_phases", run)
    x = normal(512, 1024)
    for check in (False, None):
        with pytest.warns(UserWarning, match="does not run on .*Shared memory"):
            got = pf.fuse(softmax, options=FuseOptions(check=check))(x if check is None else x.reshape(512, 1, 1024))
        np.testing.assert_allclose(
            np.asarray(got, np.float32).reshape(x.shape), np.asarray(softmax(x), np.float32), atol=0.01
        )


@pytest.mark.parametrize("shape", [(256, 1024), (4096, 4096), (64, 65536)])
def test_what_is_checked_is_not_slower(shape):
    x = normal(*shape)
    fused, plain = pf.fuse(softmax), jax.jit(softmax)
    checked, jitted = medians_ms(lambda: fused(x), lambda: plain(x))
    assert checked <= 1.05 * jitted + 0.005


def test_a_first_check_is_quick():
    plan = pf.fuse(attend).trace(*HEAD).fuse().tile().plan

    for _ in range(2):  # what JAX and CUDA do once for a process is not of the check
        start = time.perf_counter()
        found = check_plan(plan, jax.devices()[0])
        taken = time.perf_counter() - start
    assert taken < 0.01
    assert sum(v.seconds for v in found.verdicts) == 0
    assert all(v.remembered for v in found.verdicts)


def compared(functions, *arguments):
    device = jax.devices()[0]
    return apart(lambda: measure.compare(functions, arguments, device, budget_s=0.25), device)


def longer(x):
    """Two products, and then all that softmax does."""
    return softmax(x @ (x.T @ x))


def test_a_short_program_that_wins_has_the_faster_kernels():
    """The loop in which short programs run also pays for every start of a kernel: it says no more than who may have won."""
    found = compared({"longer": longer, "softmax": softmax}, normal(256, 1024))
    assert found.winner == "softmax"
    assert found.kernels["softmax"] < found.kernels["longer"]
    for name, kernels_us in found.kernels.items():
        assert kernels_us < found.microseconds[name]


@pytest.mark.parametrize("shape", [(64, 512), (256, 1024), (1024, 1024)])
def test_a_short_kernel_of_ours_wins_only_by_the_time_of_kernels(shape):
    fused = pf.fuse(softmax, options=FuseOptions(check=False))
    found = compared({"xla": softmax, "fused": fused}, normal(*shape))
    assert set(found.microseconds) == {"xla", "fused"}
    if "fused" in found.faster:
        assert found.kernels["fused"] < found.kernels["xla"]


def test_a_loop_runs_as_often_as_it_says():
    x = normal(2048, 2048)
    one, many = jax.jit(softmax), jax.jit(timing.repeated(softmax, 32))
    once, often = medians_ms(lambda: one(x), lambda: many(x))
    assert often > 8 * once or once < 0.05
