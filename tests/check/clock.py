"""Stand-ins for the clock of the check, and the small programs that its tests fuse."""

import numpy as np
from jax import lax

from pallasfuse import check, execution, whole_calls
from pallasfuse.executables import Executables
from pallasfuse.measure import Measured
from tests.programs_by_name import softmax

X = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")


def same(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


class Clock:
    """Stands in for what measures: kernels are faster or slower, as told; what was compared is kept."""

    def __init__(self, *speedups, uncompiled=(), failed=(), skipped=(), kernels=None):
        self.speedups, self.uncompiled, self.failed = list(speedups), list(uncompiled), list(failed)
        self.skipped, self.kernels = list(skipped), kernels or {}
        self.compared, self.parts, self.below = [], [], []

    def __call__(self, functions, avals, device, *, budget_s, expected_us=None, parts=False, below=(), **_):
        number = len(self.compared)
        self.parts.append(parts)
        self.below.append(list(below))
        self.compared.append([a.shape for a in avals])
        first, *others = functions
        if number in self.uncompiled:
            return Measured(
                uncompiled=dict.fromkeys(others, "XlaError: shared memory"),
                skipped="nothing else compiles",
                seconds=0.1,
            )
        if number in self.failed:
            return Measured(failed=dict.fromkeys(others, "XlaError: illegal address"), skipped="it fails", seconds=0.1)
        if number in self.skipped:
            return Measured(skipped="it takes 9 MiB, and 8 MiB are free", seconds=0.1)
        speedup = self.speedups[min(number, len(self.speedups) - 1)]
        times = {first: 100.0} | dict.fromkeys(others, 100.0 / speedup)
        alone = self.kernels.get(number)
        kernels = {} if alone is None else {first: 50.0} | dict.fromkeys(others, 50.0 / alone)
        faster = frozenset(others if speedup > 1 else ())
        return Measured(times, others[0] if speedup > 1 else first, faster, seconds=0.1, kernels=kernels)


def timed_by(monkeypatch, compare):
    """Kernels and whole calls are compared by this from now on, and not compiled for it."""
    for module in (check, whole_calls):
        monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(Executables, "of", lambda self, requests, device: [None] * len(requests))


def left_to_xla(x):
    """What no kernel takes in, and nothing decomposes along the last axis of many rows."""
    return lax.cummax(x, axis=1)


def layers(x):
    """Two equal parts, and what XLA keeps before them."""
    return softmax(left_to_xla(x)), softmax(left_to_xla(-x))


def kernels_run(monkeypatch):
    """The names of the kernels that are lowered from now on."""
    seen = []
    original = execution.run_kernel
    monkeypatch.setattr(
        execution, "run_kernel", lambda plan, kernel, arrays: seen.append(kernel.name) or original(plan, kernel, arrays)
    )
    return seen
