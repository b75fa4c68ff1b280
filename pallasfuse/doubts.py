"""Reasons to leave to XLA what is predicted to be faster as a kernel: it may not come true, and nobody would see it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallasfuse.options import FuseOptions
from pallasfuse.plan import Kernel
from pallasfuse.price.terms import NOTHING, Price
from pallasfuse.targets import Target

if TYPE_CHECKING:  # who uses a plan that was kept imports nothing that makes plans
    from pallasfuse.fusion.judging import Judge

_JOINED = 0.5
"""The part of the shortest kernel's time that XLA's price may be too high by, where it joins a kernel with a neighbour:
an estimate, in place of a model of these fusions."""
_NOTICED = 0.01
"""The least part of a program's time that is worth kernels. XLA fuses what is around a kernel otherwise than without it, which its
price does not always see. (Of programs on an H100 whose kernels were to save less, 23 took from 15% more to 2% less time; of the
others most were written otherwise as well, or had kernels in loops; one took 9% less, by a kernel that was to save 0.9%.)"""


def doubtful(kernel: Kernel, target: Target, options: FuseOptions, boundary: Price = NOTHING) -> str | None:
    """Returns why a kernel is not kept that nothing times: it saves less than a launch that XLA may not need; None if it saves
    more. boundary: the price of what XLA stores for it at its boundary."""
    if target.timed or target.platform != "gpu" or not may_leave(options):
        return None
    apart_us = kernel.replaced.us
    if apart_us > kernel.price.us + boundary.us + _JOINED * target.device.kernel_us:
        return None
    around = f" and {boundary.us:.3g} us at its boundary" if boundary.us else ""
    return (
        f"one kernel would hardly be faster: {kernel.price.us:.3g} us predicted{around}, {apart_us:.3g} us apart, where XLA may "
        "join one of its kernels with another"
    )


def too_little(
    judge: "Judge", kernels: Sequence[Kernel], stored_us: float, target: Target, options: FuseOptions
) -> str | None:
    """Returns why no kernel of a program is kept: all of them together save too little of its time; None if they save more.

    A clock is not asked either, as it is not exact enough to tell: there they are what they save at most, should their prices be
    too high by the error of prices. judge: of the program. stored_us: the time of what XLA stores for the kernels.
    """
    if not kernels or target.platform != "gpu" or not may_leave(options):
        return None
    whole_us = judge.apart_us(())
    saved_us = sum(k.replaced.us - k.price.us * min(1.0, target.margin) for k in kernels) - stored_us
    if saved_us >= _NOTICED * whole_us:
        return None
    return (
        f"all kernels of the program together would hardly make it faster: they save at most {max(0.0, saved_us):.3g} of "
        f"{whole_us:.3g} us"
    )


def may_leave(options: FuseOptions) -> bool:
    """May something be left to XLA because it is as fast there?"""
    return options.price and not (options.strict or options.shapes_kernels)
