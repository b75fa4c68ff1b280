"""JAX's configuration: modes for debugging, contexts that change between calls, and its persistent compilation cache."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from tests.programs_by_name import softmax

ROOT = Path(__file__).resolve().parents[2]
X = np.random.default_rng(0).normal(size=(6, 41)).astype("float32")


def same(got, want, **tolerance):
    np.testing.assert_allclose(got, want, **{"rtol": 2e-5, "atol": 1e-6} | tolerance)


# --- debugging


def test_disable_jit_runs_the_function_itself():
    seen = []

    @pf.fuse
    def function(x):
        seen.append(x)
        return softmax(x) if x.sum() > -1e9 else x

    with jax.disable_jit():
        same(function(X), softmax(X))
    assert seen[0] is X


def test_checking_leaks():
    with jax.checking_leaks():
        same(pf.fuse(lambda x: softmax(x) * 3)(X), softmax(X) * 3)


def test_debug_nans_names_the_nan_and_accepts_infinities():
    function = pf.fuse(lambda x: softmax(jnp.where(jnp.arange(41) < 30, x, -jnp.inf)))
    with jax.debug_nans(True):
        same(function(X).sum(-1), np.ones(6))
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\)"):
            function(X * np.nan)
    assert np.isnan(function(X * np.nan)).all()


@pytest.mark.parametrize(
    "context", [jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")], ids=["rank", "dtype"]
)
def test_promotion_rules_apply_to_the_user_s_function_only(context):
    with context:
        same(pf.fuse(lambda x: softmax(x * 5))(X), softmax(X * 5))


def test_rank_promotion_of_the_user_raises_as_in_jax():
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion='raise'"):
        pf.fuse(lambda x: softmax(x + jnp.ones(41)))(X)


# --- contexts that change between calls


def test_x64_is_looked_at_in_every_call():
    wide = X.astype("float64") + 1e-12
    fused = pf.fuse(softmax)
    for enabled, dtype in [(False, "float32"), (True, "float64"), (False, "float32"), (True, "float64")]:
        with jax.enable_x64(enabled):
            got = fused(wide)
            assert got.dtype == dtype
            same(got, jax.jit(softmax)(wide), rtol=1e-13 if enabled else 2e-5)


def test_matmul_precision_is_looked_at_in_every_call():
    def function(q, k):
        return softmax(q @ k.T) @ k

    fused, shapes = pf.fuse(function), [jax.ShapeDtypeStruct((64, 32), jnp.float32)] * 2

    def precisions(target):
        (kernel,) = fused.explain(*shapes, target=target).kernels
        return {n.precision for n in (*(f.nest for f in kernel.group.folds), *kernel.group.inner) if n.precision}

    for target in ("xla", "triton"):
        assert precisions(target) == {"DEFAULT"}
        with jax.default_matmul_precision("highest"):
            assert precisions(target) == {"HIGHEST"}
        assert precisions(target) == {"DEFAULT"}
    text = fused.trace(*shapes).fuse().tile().lower().as_text()
    assert "HIGHEST" not in text
    with jax.default_matmul_precision("highest"):
        text = fused.trace(*shapes).fuse().tile().lower().as_text()
        assert "HIGHEST" in text


def test_the_user_s_precision_beats_the_context():
    def function(q, k):
        return softmax(jnp.matmul(q, k.T, precision="highest")) @ k

    with jax.default_matmul_precision("bfloat16"):
        (kernel,) = pf.fuse(function).explain(*[jax.ShapeDtypeStruct((64, 32), jnp.float32)] * 2).kernels
    assert "HIGHEST" in {n.precision for n in (*(f.nest for f in kernel.group.folds), *kernel.group.inner)}


def test_a_global_that_the_function_reads_is_read_when_jax_jit_would():
    scale = [1.0]

    def function(x):
        return softmax(x * scale[0])

    fused, jitted = pf.fuse(function), jax.jit(function)
    for value, x in [(1.0, X), (2.0, X), (2.0, X[:3])]:  # the second call finds both compiled
        scale[0] = value
        same(fused(x), jitted(x))


# --- JAX's persistent compilation cache, the only thing on a disk: pallasfuse stores nothing itself

CALL = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
import pallasfuse as pf
x = np.random.default_rng(0).normal(size=(6, 41)).astype("float32")
fused, want = pf.fuse(jax.nn.softmax), np.exp(x) / np.exp(x).sum(-1, keepdims=True)
np.testing.assert_allclose(fused(x), want, rtol=2e-5)
entries = [p for p in Path(sys.argv[1]).rglob("*-cache") if p.is_file()]
print(len(entries))
for path in entries:
    path.write_bytes(b"not what was written" + path.read_bytes()[:40])
jax.clear_caches()
np.testing.assert_allclose(fused(x), want, rtol=2e-5)
"""


def entries_of(cache):
    """Calls a function, spoils what was written, and calls it again after the caches in memory are cleared, too.

    In a process of its own, whose caches no other test needs. Returns the number of files that were written.
    """
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(cache)], cwd=ROOT, check=False, capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_corrupt_compilation_cache_and_clearing_caches_between_calls(tmp_path):
    assert entries_of(tmp_path)


@pytest.mark.deep
def test_a_compilation_cache_that_is_no_folder(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")  # as a read-only folder, also for root
    assert not entries_of(blocked)
