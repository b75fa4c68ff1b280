"""The tiers of tests, and what every test runs with. CONTRIBUTING.md says how the tiers are used."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Hashable
from functools import cache
from pathlib import Path

import pytest

from tests import quick
from tests.tiers import sample, shares

# Before JAX or pallasfuse are imported; child processes inherit both.
os.environ.setdefault("PALLASFUSE_CHECK", "0")  # nothing is timed unless a test asks for it
os.environ.setdefault("PALLASFUSE_PRICE", "0")  # whatever can be fused is, whether that is faster or not
os.environ.setdefault("PALLASFUSE_KEEP_PLANS", "0")  # tests change passes, and a plan that was kept would not see it
# Dozens of tests start processes, which would compile the whole package anew: it is kept in __pycache__, as it is by default.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Mosaic's interpreter compiles and runs programs inside callbacks, which hold threads of XLA's pool: a pool of one thread for each
# of two cores runs out now and then, and all wait for each other. XLA takes the size of its pool from here.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the folder of the process that started them
    os.environ["PALLASFUSE_CACHE_DIR"] = tempfile.mkdtemp(prefix="pallasfuse_tests_")
    atexit.register(shutil.rmtree, os.environ["PALLASFUSE_CACHE_DIR"], ignore_errors=True)

TESTS = Path(__file__).parent
ROOMS_WITHOUT_JAX = ("ir", "repair", "fusion", "tiling", "schedule")
"""Those of the import contract "Plans are made without JAX"; other tests say so with the marker `any_jax`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="XLA compiles with the least effort (tests/quick.py), but for tests marked `optimized`",
    )
    parser.addoption(
        "--share",
        type=_share,
        metavar="K/N",
        help="run the K-th of N disjoint shares of the tests: of the cases of every function, each N-th",
    )


def _share(text: str) -> tuple[int, int]:
    k, n = (int(part) for part in text.split("/"))
    if not 1 <= k <= n:
        raise ValueError(f"--share {text}: not 1 <= K <= N")
    return k, n


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # workers and child processes inherit it


def _compile_with_least_effort() -> bool:
    """With `--quick`, and as soon as JAX is imported."""
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ or "jax" not in sys.modules:
        return False
    quick.install()
    return True


def pytest_pycollect_makemodule() -> None:
    _compile_with_least_effort()  # some modules compute their arrays when they are imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _compile_with_least_effort():
        sys.modules["jax"].config.update("jax_disable_most_optimizations", not item.get_closest_marker("optimized"))


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if _is_without_jax(item.path):
            item.add_marker("any_jax")
        if item.get_closest_marker("sampled") and isinstance(item, pytest.Function):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        (one_in,) = cases[0].get_closest_marker("sampled").args
        kept = sample([_covered(case) for case in cases], one_in)
        for n, case in enumerate(cases):
            if n not in kept:
                case.add_marker("deep")
    if share := config.getoption("--share"):
        k, n = share
        chosen = [share % n == k - 1 for share in shares([item.nodeid for item in items])]
        config.hook.pytest_deselected(items=[item for item, mine in zip(items, chosen, strict=True) if not mine])
        items[:] = [item for item, mine in zip(items, chosen, strict=True) if mine]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # what is imported and collected is no garbage
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and collected tests live until the end. Looking for garbage among them takes a tenth of the time of the tests."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.freeze()  # the end of the process takes what lives until then, and pytest need not look through it for garbage


@cache
def _is_without_jax(path: Path) -> bool:
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[0] in ROOMS_WITHOUT_JAX


def _covered(case: pytest.Function) -> list[tuple[str, Hashable]]:
    """The values of which each stays in the default tier."""
    values = case.callspec.params
    cover = case.get_closest_marker("sampled").kwargs.get("cover", tuple(values))
    return [(name, values[name] if isinstance(values[name], str) else id(values[name])) for name in cover]
