"""`import pallasfuse` takes little longer than `import jax`: what makes plans is imported at the first call."""

import subprocess
import sys

import pytest

LATER = ("sympy", "tqdm", "jax.experimental.pallas", "jax._src.pallas", "jax.experimental.mosaic", "jax._src.pallas.triton",
         "jaxlib.mlir.dialects.nvvm", "pallasfuse.primitive", "pallasfuse.pipeline", "pallasfuse.repair",
         "pallasfuse.pallas_backend")  # fmt: skip


def run(code):
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_what_makes_plans_is_imported_at_the_first_call_and_only_what_it_needs():
    """Neither with the package nor by what a program does before its first call. Pallas for GPUs takes longer to import than
    a kernel on the CPU to plan: a call on the CPU does not need it.
    """
    before, after = run("""
import sys
import pallasfuse as pf

@pf.fuse(static_argnums=1, options=pf.FuseOptions(target="xla"))
def function(x, n):
    return x

class Layer:
    method = pf.fuse(lambda self, x: x)

Layer().method
print(*sys.modules)

import jax.numpy as jnp

f = pf.fuse(lambda x: x / x.sum(-1, keepdims=True), target="xla")
f(jnp.ones((4, 64))).block_until_ready()
print(*sys.modules)
""").splitlines()
    assert "pallasfuse.api" in before.split()
    assert not set(LATER) & set(before.split())
    assert "pallasfuse.execution" in after.split()
    assert not {"jax.experimental.pallas", "jax.experimental.mosaic", "sympy"} & set(after.split())


@pytest.mark.deep  # `test_all_names_together` asks for most of them in one process
@pytest.mark.parametrize("name", ["fold", "Plan", "verify", "tune", "tuning", "repair", "FoldState"])
def test_every_name_is_found_when_it_is_asked_for(name):
    assert run(f"import pallasfuse; print(bool(pallasfuse.{name}), '{name}' in dir(pallasfuse))").endswith("True\n")


def test_all_names_together():
    """Those of jaxprs are the same as in `jax.extend`, which takes more time to import than the place that they come from."""
    run("""
import pallasfuse
assert not hasattr(pallasfuse, "no_such_name")
assert {"fold", "FoldState", "Plan", "repair", "tune", "tuning", "verify"} <= set(dir(pallasfuse))
from pallasfuse import *
fold, tune, tuning, verify, Kernel, Report, StreamedFunction, Tuned

from jax.extend import core
from pallasfuse import _compat
for name in ("Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"):
    assert getattr(core, name) is getattr(_compat, name)
""")


def test_the_first_call_may_be_under_a_transformation():
    """What is imported there must not keep values of the trace."""
    run("""
import jax, jax.numpy as jnp
import pallasfuse as pf

def loss(x):
    return jnp.sum(f(x) ** 2)

f = pf.fuse(lambda x: jax.nn.softmax(x), options=pf.FuseOptions(price=False, check=False))
x = jnp.linspace(0, 1, 24).reshape(4, 6)
with jax.checking_leaks():
    jax.jit(jax.vmap(jax.grad(loss)))(x)
assert jnp.allclose(f(x), jax.nn.softmax(x))
assert f.explain(x).kernels
""")


@pytest.mark.deep  # hostile/test_threads.py calls from several threads, too, in a process that has made plans
def test_first_calls_of_several_threads():
    run("""
import sys
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp
import pallasfuse as pf

sys.setswitchinterval(1e-5)
x = jnp.linspace(0, 1, 24).reshape(4, 6)
calls = [
    lambda: pf.fuse(lambda x: jax.nn.softmax(x))(x),
    lambda: pf.fuse(lambda x: jax.nn.softmax(x)).explain(x),
    lambda: pf.fold(lambda x: jax.nn.logsumexp(x, axis=-1), axis=1).init(x),
    lambda: pf.verify,
    lambda: pf.fuse(lambda x: x.sum()).trace(x),
    lambda: pf.tune,
]
with ThreadPoolExecutor(len(calls)) as pool:
    for done in [pool.submit(call) for call in calls]:
        done.result(timeout=120)
""")


CALL = """
import sys
import jax, jax.numpy as jnp
import pallasfuse as pf
from pallasfuse import check
from pallasfuse.measure import Measured

def compare(functions, *_, **__):
    assert {measures}, "measured again"
    times = {{name: 2.0 - (name == "fused") for name in functions}}
    return Measured(microseconds=times, faster=frozenset({{"fused"}}))

check.compare = compare
f = pf.fuse(lambda x: jax.nn.softmax(x), options=pf.FuseOptions(price=False, check={checked}))
x = jnp.linspace(0, 1, 24).reshape(4, 6)
assert jnp.allclose(f(x), jax.nn.softmax(x), rtol=1e-6)
modules = set(sys.modules)
plan = f.explain(x)
assert plan.kernels and bool(plan.verdicts) == {checked}
print(*modules)
"""
"""A call, and the modules that were imported by then."""
PLANNING = ("jaxpr_frontend.conversion", "fusion", "tiling", "placement", "pipeline", "repetition", "proof", "repair",
            "pallas_backend", "price.kernel", "price.cpu")  # fmt: skip
OF_PARTS = ("partial", "sharding")
"""Modules that plan parts of kernels, or pieces of arrays."""


@pytest.mark.parametrize("checked", [pytest.param(False, marks=pytest.mark.deep), True])  # True: a kept plan, too
def test_a_plan_that_was_kept_imports_nothing_that_makes_plans(tmp_path, monkeypatch, checked):
    """Nor does a verdict that is known, where the kernel has won."""
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    for name in ("PALLASFUSE_KEEP_PLANS", "PALLASFUSE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    first, second = (set(run(CALL.format(checked=checked, measures=m)).split()) for m in (True, False))
    assert {f"pallasfuse.{name}" for name in PLANNING} <= first
    never = tuple(f"pallasfuse.{name}" for name in (*PLANNING, *OF_PARTS))
    assert not {module for module in second if module.startswith(never)}
