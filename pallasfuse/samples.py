"""Arguments to measure a program on: arrays of given shapes and types on a device, and the memory that there is for them."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PERIOD = 65521
"""Drawn numbers repeat after so many: a prime, so that rows differ. Time does not depend on it, drawing does."""
_ON_HOST_BYTES = 32 << 20
"""Larger arrays are written out on the device."""
_SHARE = 0.8
"""The share of the free memory that a check may take."""


def drawn(
    avals: Sequence[Any], device: Any, below: Sequence[int | tuple[int, ...] | None] = (), *, skew: float = 1.0
) -> list[jax.Array]:
    """Draws arrays of these shapes and types: floats normal, booleans mixed, integers from 0 on, as lengths and indices are.

    below: of each array, the number that its integers stay below, or one for each column of its last axis; None: the largest
    extent of all dimensions, and one more. A number by itself is half of that: a length is neither the shortest nor the longest.
    skew: where they have such a number, integers are `below * u**skew`, for numbers u that are even between 0 and 1: a user's are
    rarely even.

    Raises:
      TypeError: a type has no such values.
    """
    most = max((n for a in avals for n in a.shape), default=1) + 1
    known = below or [None] * len(avals)
    return [
        _drawn(a.shape, a.dtype, n or most, skew if n else 1.0, device, seed)
        for seed, (a, n) in enumerate(zip(avals, known, strict=True))
    ]


def _drawn(
    shape: tuple[int, ...], dtype: Any, below: int | tuple[int, ...], skew: float, device: Any, seed: int
) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.empty(shape, dtype)  # zeros, and as good as any
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"values of type {dtype} are not drawn")
    random = np.random.default_rng(seed)
    columns = below if isinstance(below, tuple) else (below,)
    block = np.stack([_block(dtype, n, skew, random) for n in columns], axis=-1).reshape(-1)
    if not shape and jnp.issubdtype(dtype, jnp.integer):
        block = np.full((), min(columns[0] // 2, jnp.iinfo(dtype).max), dtype)
    size = math.prod(shape)
    if device.platform == "cpu" or size * block.dtype.itemsize <= _ON_HOST_BYTES:
        written: jax.Array = jax.device_put(np.resize(block, shape), device)
    else:
        written = _written_out(jax.device_put(block, device), shape)
    return written


def _block(dtype: Any, below: int, skew: float, random: np.random.Generator) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.bool_):
        return random.random(_PERIOD) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        most = min(below - 1, int(jnp.iinfo(dtype).max))
        return np.minimum((most + 1) * random.random(_PERIOD) ** skew, most).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (random.standard_normal(_PERIOD) + 1j * random.standard_normal(_PERIOD)).astype(dtype)
    return random.standard_normal(_PERIOD).astype(dtype)


@jax.jit(static_argnums=1)
def _written_out(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.resize(block, shape)


def room_for(compiled: Sequence[Any], device: Any) -> str | None:
    """Returns why the free memory of a device is too little for compiled programs of the same arguments; None where it does.

    One of the programs runs at a time.
    """
    free = free_bytes(device)
    if free is None:
        return None
    needed = 0
    for program in compiled:
        needed = max(needed, needed_bytes(program))
    if needed <= _SHARE * free:
        return None
    return f"it takes {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free"


def needed_bytes(program: Any) -> int:
    """Returns the bytes of memory that a compiled program and its arguments take, as far as it says; its results twice, as one
    call may begin before those of the last are gone."""
    sizes = program.memory_analysis()
    if sizes is None:
        return 0
    return int(sizes.argument_size_in_bytes + 2 * sizes.output_size_in_bytes + sizes.temp_size_in_bytes)


def free_bytes(device: Any) -> int | None:
    """Returns the bytes that may still be allocated on a device, as far as it says; None where nobody knows."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return int(stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else None
    known = [n for n in (_host_bytes(), _group_bytes()) if n is not None]
    return min(known, default=None)


def _host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        if "SC_AVPHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_bytes() -> int | None:
    """Returns the bytes that the control group of a container leaves, where it limits memory."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
