"""The target that a function is planned for, with the numbers of the device that is at hand."""

from dataclasses import replace

import jax

from pallasfuse import device
from pallasfuse.errors import TargetError
from pallasfuse.isolation import cores
from pallasfuse.options import FuseOptions
from pallasfuse.targets import Target, default_for, find


def target_for(platform: str, options: FuseOptions) -> Target:
    """Returns the target that `options` name for a platform, or its default.

    Raises:
      TargetError: the named target does not run on the platform.
    """
    if options.target is None:
        return for_device_at_hand(default_for(platform, _capabilities() if platform == "cuda" else frozenset()))
    target = find(options.target)
    runs_on = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}[target.platform]
    if platform not in runs_on and target.platform != "cpu":
        raise TargetError(f"target {target.name!r} runs on {' or '.join(runs_on)}, but the function is compiled for {platform}: "
                          "choose target=None for the best one")  # fmt: skip
    found = _capabilities() if target.capability and platform == "cuda" else frozenset()
    if found - {target.capability}:
        raise TargetError(f"target {target.name!r} is for GPUs of compute capability {target.capability}, but here are some of "
                          f"{', '.join(sorted(found))}: choose target=None for the best one")  # fmt: skip
    return for_device_at_hand(target)


def for_device_at_hand(target: Target) -> Target:
    """Returns a target with the numbers of the device of its platform that is at hand; where there is none, of the assumed one."""
    if target.platform == "cpu":
        return target.on(replace(target.device, multiprocessors=cores()))
    if target.platform != jax.default_backend():
        return target
    here = jax.devices()[0]
    numbers = device.find(here.device_kind, target.platform)
    return target.on(replace(numbers, multiprocessors=int(getattr(here, "core_count", 0) or numbers.multiprocessors)))


def _capabilities() -> frozenset[str]:
    """Names the compute capabilities of the CUDA devices at hand."""
    try:
        return frozenset(str(getattr(d, "compute_capability", "")) for d in jax.devices("cuda"))
    except RuntimeError:
        return frozenset()
