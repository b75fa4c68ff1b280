"""Sharded arrays under `jax.jit`: the partitioner runs a fused kernel piece by piece, and exchanges nothing larger than states."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import placement
from pallasfuse.ir.tensors import Tensor
from pallasfuse.tiling import states
from tests.pallas_backend.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]


DEEP = pytest.mark.deep


@pytest.mark.parametrize(
    ("cases", "devices", "which"),
    [
        ("on_devices", 4, "few"),
        pytest.param("on_devices", 4, "some", marks=DEEP), pytest.param("on_devices", 4, "all", marks=DEEP),
        pytest.param("on_devices", 8, "all", marks=DEEP), pytest.param("on_explicit_axes", 4, "some", marks=DEEP),
        pytest.param("on_explicit_axes", 4, "all", marks=DEEP), pytest.param("on_explicit_axes", 8, "all", marks=DEEP),
    ],
)  # fmt: skip
def test_on_devices(cases, devices, which):
    result = subprocess.run(
        [sys.executable, "-m", f"tests.sharding.{cases}", str(devices), which],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "ok"


def test_tiles_that_a_piece_cannot_have():
    """They are chosen anew, and the target is kept; others are those that were asked for."""
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in VARIANTS["causal"].arrays("bfloat16")]
    plan = pf.fuse(VARIANTS["causal"].function).explain(*shapes, target="mosaic_gpu")
    (kernel,) = plan.kernels
    group, rolled = kernel.group, kernel.group.rolled
    (row,) = (a for a, t in kernel.schedule.grid if t > 1)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}
    given = {t: {d: a for d, a in enumerate(tensors[t].axes) if a == rolled} for t in group.inputs}
    piece = states.localize(group, tensors, {rolled: 96}, given)
    for rows, columns, kept in ((16, 32, False), (64, 64, True), (1024, 1024, False)):
        options = pf.FuseOptions(tiles=((row.name, rows), (rolled.name, columns)))
        whole, part = (
            placement.place(group, plan.target, tensors, options)[0],
            placement.phase_of_state(group, piece, plan.target, options),
        )
        for phase in (whole, part):
            assert phase.target.name == "mosaic_gpu"
            sizes = {a.name: t for a, t in phase.program.tiles}
            assert (sizes[row.name] == rows and sizes[rolled.name] == columns) is kept, sizes
