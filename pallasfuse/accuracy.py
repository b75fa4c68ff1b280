"""Errors of results in floating point: their unit, and where NaN and infinities differ."""

from typing import Any

import jax.numpy as jnp
import numpy as np

_SPECIAL = (np.isnan, np.isposinf, np.isneginf)


def last_place(dtype: Any, largest: float) -> float:
    """The unit in the last place of a type, at a magnitude."""
    info = jnp.finfo(dtype)
    return float(info.eps) * 2.0 ** float(np.floor(np.log2(largest))) if largest > 0 else float(info.tiny)


def special_differences(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Where a result is NaN or infinite otherwise than the plain result and than the exact one.

    What overflows in the plain program, and not in exact arithmetic, may be finite: that is no mistake.
    """
    differs = np.zeros(ours.shape, bool)
    for special in _SPECIAL:
        differs |= (special(ours) != special(theirs)) & (special(ours) != special(exact))
    return differs
