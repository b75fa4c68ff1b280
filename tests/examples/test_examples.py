"""Every example runs; every fused function in one is a single kernel and as accurate as the function it replaces.

The bound on errors is stricter than that of `pallasfuse.testing`, which tells them in other variants from mistakes.
"""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import ATTENTION, all_cases
from examples import moments
from pallasfuse.testing import assert_equivalent
from tests import quick

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = {"quickstart"}
ARGUMENTS = {"decoder": {"length": 128}}
DRAWS, ONE_ROW_DRAWS = 4, 32  # the largest error of a single row is a matter of luck
QUICKLY = {"xla_backend_optimization_level": 0}
"""How references in float64 are compiled: of their errors nothing is seen."""


RUN_ELSEWHERE = {"quickstart", "attention_variants", "linear_cross_entropy", "cross_entropy", "moments", "decoder"}
"""Their functions, or what they print, are compared below or in `tests/xla_backend/test_picking.py`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.deep] if path.stem in RUN_ELSEWHERE else [])
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
def test_example_runs(name, capsys):
    if name in SCRIPTS:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    else:
        importlib.import_module(f"examples.{name}").main(**ARGUMENTS.get(name, {}))
    assert capsys.readouterr().out


def named(cases):
    return [pytest.param(case.small(), id=case.name.replace(" ", "-")) for case in cases]


def in_float64(case, draws):
    """Results of the plain function, evaluated in float64 on the same (rounded) inputs of each draw."""
    with jax.enable_x64(True):
        wide = [
            [np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a) for a in arrays]
            for arrays in draws
        ]
        run = jax.jit(case.plain, static_argnums=case.static_argnums).lower(*wide[0], *case.static).compile(QUICKLY)
        return [[np.asarray(leaf) for leaf in jax.tree.leaves(run(*arrays))] for arrays in wide]


def largest_error(result, reference):
    return float(np.abs(np.asarray(result, np.float64) - reference).max())


def assert_as_accurate_as_plain(case, length, dtype, **sizes):
    """The largest error is at most 1.5 times that of the plain function, or two units in the last place.

    All are means over draws: the largest of a few errors differs by half from one draw to the next. The plain function is compiled
    in two ways, of which the worse one counts: in which order a product sums is XLA's choice, by processor and by shape.
    """
    number = DRAWS if length > 1 else ONE_ROW_DRAWS
    draws = [case.arrays(length, jnp.dtype(dtype), batch=2, draw=draw, **sizes) for draw in range(number)]
    lowered = jax.jit(case.plain, static_argnums=case.static_argnums).lower(*draws[0], *case.static)
    plain = [lowered.compile(), lowered.compile(QUICKLY)]
    rows = []  # by draw and result: the error, that of the plain function, a unit in the last place
    for arrays, exact in zip(draws, in_float64(case, draws), strict=True):
        results = [jax.tree.leaves(case.fused(*arrays, *case.static)), *(jax.tree.leaves(f(*arrays)) for f in plain)]
        for *values, reference in zip(*results, exact, strict=True):
            assert len({(v.dtype, v.shape) for v in values}) == 1
            ulp = float(jnp.finfo(values[0].dtype).eps) * np.abs(reference).max()
            rows.append((*(largest_error(v, reference) for v in values), ulp))
    for ours, first, second, ulp in np.reshape(rows, (number, -1, 4)).mean(0):
        assert ours <= max(1.5 * first, 1.5 * second, 2 * ulp)


@pytest.mark.sampled(4, cover=("length",))
@pytest.mark.parametrize("length", [96, 61])
@pytest.mark.parametrize("case", named(all_cases()))
def test_one_kernel_and_nothing_left_to_xla(case, length):
    plan = case.fused.explain(*case.arrays(length, jnp.float32, batch=2), *case.static)
    assert [str(fallback) for fallback in plan.fallbacks] == []
    assert len(plan.kernels) == 1


@pytest.mark.optimized
@pytest.mark.sampled(60, cover=("dtype", "length"))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("length", [96, 61])
@pytest.mark.parametrize("case", named(all_cases()))
def test_error_against_float64(case, length, dtype):
    assert_as_accurate_as_plain(case, length, dtype)


@pytest.mark.deep
@pytest.mark.parametrize("case", named(all_cases()))
def test_mapped_and_looped(case):
    arrays = case.arrays(61, jnp.float32)
    assert_equivalent(case.fused, *arrays, *case.static, variants=("vmap", "scan"), prove=False)


@pytest.mark.optimized
@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("lengths", [(61, 96), (1, 61)], ids=["61-queries-96-keys", "1-query-61-keys"])
@pytest.mark.parametrize("case", named(ATTENTION))
def test_error_against_float64_with_fewer_queries_than_keys(case, lengths):
    queries, keys = lengths
    assert_as_accurate_as_plain(case, queries, "float32", key_length=keys)


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["variance", "third_moment"])
def test_moments_far_from_zero(name):
    """Mean 1e4 and variance 1 in float32: the frames must be stable, or every digit is lost."""
    x = (1e4 + np.random.default_rng(0).standard_normal((4, 8192))).astype(np.float32)
    centred = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    expected = (centred ** {"variance": 2, "third_moment": 3}[name]).mean(-1)
    assert largest_error(getattr(moments, name)(x), expected) <= 1e-5


def test_readme_shows_what_the_quickstart_prints(request, monkeypatch):
    if request.config.getoption("quick"):
        monkeypatch.setenv("XLA_FLAGS", quick.FLAGS)
    check = [sys.executable, str(EXAMPLES.parent / "scripts" / "readme_output.py")]
    done = subprocess.run(check, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
