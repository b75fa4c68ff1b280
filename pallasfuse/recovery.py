"""A call whose program did not compile, or failed, is made again without the kernels that are to blame: nobody's program ends
because of a fused kernel."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasfuse.check import find_failures
from pallasfuse.options import FuseOptions
from pallasfuse.plan import Plan


def may_recover(options: FuseOptions, leaves: Sequence[Any]) -> bool:
    """Says whether a call that failed may be made again without its kernels.

    Inside a trace it may not, because the error is of something else; nor where a target or kernels were asked for: then the error
    is the answer.
    """
    return not (options.target or options.shapes_kernels or options.strict) and not any(
        isinstance(x, jax.core.Tracer) for x in leaves
    )


def recover(
    name: str, error: Exception, plan: Plan, leaves: Sequence[Any], again: Callable[[], Any], plain: Callable[[], Any]
) -> tuple[Any, bool]:
    """The result of a call that failed, and whether it is that of the unfused function.

    again: makes the call anew; kernels that are known to fail are then left out. plain: calls the unfused function.

    Raises:
      Exception: the unfused function fails, too: its own error.
    """
    device = device_of(leaves)
    found = find_failures(plan, device) if device is not None else []
    if found:
        warnings.warn(f"pallasfuse: {name}: {'; '.join(found)}", stacklevel=4)
        try:
            return again(), False
        except jax.errors.JaxRuntimeError as other:
            error = other
    result = plain()
    reason = " ".join(str(error).split())[:300]
    warnings.warn(f"pallasfuse: {name} does not run as it is fused, and is not fused for arguments of these shapes: {reason}",
                  stacklevel=4)  # fmt: skip
    return result, True


def device_of(leaves: Sequence[Any]) -> Any:
    """The one device on which a call with these arguments runs; None where they are on several."""
    devices = set().union(*(x.devices() for x in leaves if isinstance(x, jax.Array)))
    if len(devices) > 1:
        return None
    if devices:
        return devices.pop()
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]
