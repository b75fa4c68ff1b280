"""The tiers themselves: each value of a parameter stays in the default one, shares are disjoint and complete; and `--quick`."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import quick
from tests.tiers import sample, shares

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("one_in", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("sizes", [(5, 3), (3, 5), (4, 4), (1, 6), (2, 3, 4)], ids=str)
def test_every_value_is_in_a_sample(sizes, one_in):
    cases = [list(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    kept = sample(cases, one_in)
    assert {v for n in kept for v in cases[n]} == {v for case in cases for v in case}
    assert len(kept) <= max(sum(sizes), -(-len(cases) // one_in) + max(sizes))
    assert len(kept) * one_in >= len(cases)


def test_cases_without_values_are_spread_evenly():
    assert sample([()] * 10, 4) == {0, 4, 8}
    assert sample([()] * 3, 1) == {0, 1, 2}


def test_cases_of_a_function_are_dealt_out_evenly():
    names = [f"test_a.py::test_{f}[{case}-{case % 3}]" for f in "xyz" for case in range(40)]
    for count in (3, 20):
        found = [share % count for share in shares(names)]
        for n in range(0, len(names), 40):
            of_one = [found[n : n + 40].count(k) for k in range(count)]
            assert sum(of_one) == 40 and max(of_one) - min(of_one) <= 1
    single = [share % 3 for share in shares([f"test_a.py::test_{n}" for n in range(300)])]
    assert min(single.count(k) for k in range(3)) > 70


SUITE = """
import pytest

@pytest.mark.sampled(4)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_product(a, b):
    pass

@pytest.mark.deep
def test_deep():
    pass

@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("seed", range(8))
def test_seeds(seed):
    pass
"""


def collected(folder, *options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest",
               "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *options, str(folder)]  # fmt: skip
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_tiers_and_shares_divide_a_suite(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    everything = collected(tmp_path)
    default, deep = (collected(tmp_path, "-m", m) for m in ("not deep", "deep"))
    assert len(everything) == 25 and default | deep == everything and not default & deep
    assert len(default) == 4 + 2
    shares = [collected(tmp_path, "-m", "deep", "--share", f"{k}/2") for k in (1, 2)]
    assert set.union(*shares) == deep and sum(map(len, shares)) == len(deep)
    assert max(map(len, shares)) < len(deep)


class TestQuick:
    """What `--quick` compiles with the least effort, and what it does not."""

    @pytest.fixture
    def options(self, monkeypatch):
        """Returns the options of a compilation, for overrides of a caller."""
        from jax._src import compiler

        made = compiler.get_compile_options
        monkeypatch.setattr(compiler, "get_compile_options", getattr(made, "with_all_effort", made))
        each = compiler.backend_compile_and_load
        monkeypatch.setattr(compiler, "backend_compile_and_load", getattr(each, "every_time", each))
        quick.install()
        return lambda overrides: compiler.get_compile_options(1, 1, env_options_overrides=overrides)

    @pytest.mark.parametrize("off", [True, False])
    @pytest.mark.parametrize(
        "overrides", [{}, {"xla_backend_optimization_level": 0}, {"xla_backend_optimization_level": 2}], ids=str
    )
    def test_only_what_is_not_optimized_is_compiled_with_the_least_effort(self, options, off, overrides):
        import jax

        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", off)
        try:
            made = options(overrides).SerializeAsString()
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
        least = overrides.get("xla_backend_optimization_level", 0 if off else 3) == 0
        for name in quick.SETTINGS:
            assert (name.encode() in made) == least

    def test_other_options_are_kept(self):
        from jax._src.lib import xla_client

        options = xla_client.CompileOptions()
        options.num_partitions = 2
        options.device_assignment = xla_client.DeviceAssignment.create(np.array([[0, 1]], np.int32))
        options.env_option_overrides = [("xla_backend_optimization_level", 0)]
        options.executable_build_options.debug_options.xla_llvm_disable_expensive_passes = True
        least = quick.least_effort(options)
        assert least.num_partitions == 2 and least.device_assignment.computation_count() == 2
        assert least.env_option_overrides == options.env_option_overrides
        assert least.executable_build_options.debug_options.xla_llvm_disable_expensive_passes

    def test_equal_programs_are_compiled_once(self):
        """Lines do not count, nor names of variables; numbers do, and functions of Python that a program calls."""
        import jax
        from jax._src.lib import xla_client

        compiled = []
        recent = quick.CompiledOnce(lambda backend, module, *_: compiled.append(module) or len(compiled), size=2)

        def made(function, host_callbacks=()):
            module = jax.jit(function).lower(np.ones(3, np.float32)).compiler_ir()
            return recent(
                jax.local_devices()[0].client, module, jax.devices(), xla_client.CompileOptions(), host_callbacks
            )

        def plus_two(x):
            return x + 2

        assert made(lambda x: x + 1) == 1
        assert made(lambda y: y + 1) == 1
        assert made(plus_two) == 2
        assert made(lambda x: x + 1, [print]) == 3
        assert made(lambda x: x + 1) == 1
        assert made(lambda x: x + 3) == 4
        assert made(plus_two) == 5, "only the last two are kept"
        assert made(lambda x: jax.pure_callback(np.sin, x, x)) != made(lambda x: jax.pure_callback(np.sin, x, x))

    @pytest.mark.deep  # children with these flags are tests/sharding
    def test_flags_say_the_same(self):
        """A process that has them in `XLA_FLAGS` makes the options that `least_effort` makes."""
        code = "from jax._src.lib import xla_client; print(xla_client.CompileOptions().SerializeAsString().hex())"
        plain, flagged = (
            bytes.fromhex(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                                         env=os.environ | {"XLA_FLAGS": flags}).stdout)
            for flags in ("", quick.FLAGS)
        )  # fmt: skip
        from jax._src.lib import xla_client

        assert plain != flagged
        least = quick.least_effort(xla_client.CompileOptions.ParseFromString(plain))
        again = xla_client.CompileOptions.ParseFromString(flagged)
        assert least.SerializeAsString() == again.SerializeAsString()
