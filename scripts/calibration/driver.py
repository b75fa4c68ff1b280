"""Asks the driver of an NVIDIA GPU for attributes, clocks and its version, from its libraries, which need no toolkit."""

import ctypes
from dataclasses import dataclass
from functools import cache

_CACHE, _MULTIPROCESSORS, _SHARED_MEMORY = 38, 16, 97
"""Attributes of `cuDeviceGetAttribute`."""
_MULTIPROCESSOR_CLOCK = 1
"""A clock of `nvmlDeviceGetClockInfo`."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """Sizes of the first device."""

    multiprocessors: int
    cache_bytes: int
    shared_memory_bytes: int


def attributes() -> Attributes:
    """The attributes of the first device.

    Raises:
      OSError: there is no driver.
      RuntimeError: it refuses.
    """
    library = ctypes.CDLL("libcuda.so.1")
    _check("cuInit", library.cuInit(0))
    device = ctypes.c_int()
    _check("cuDeviceGet", library.cuDeviceGet(ctypes.byref(device), 0))

    def ask(attribute: int) -> int:
        value = ctypes.c_int()
        _check("cuDeviceGetAttribute", library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        return value.value

    return Attributes(ask(_MULTIPROCESSORS), ask(_CACHE), ask(_SHARED_MEMORY))


def clock_mhz() -> float:
    """The clock of the multiprocessors, now.

    Raises:
      OSError: there is no library that tells.
      RuntimeError: it refuses.
    """
    library, device = _management()
    clock = ctypes.c_uint()
    _check("clock", library.nvmlDeviceGetClockInfo(device, _MULTIPROCESSOR_CLOCK, ctypes.byref(clock)))
    return float(clock.value)


def version() -> str:
    """The version of the driver; empty where nobody knows."""
    try:
        library, _ = _management()
        text = ctypes.create_string_buffer(96)
        _check("version", library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))))
        return text.value.decode()
    except (OSError, RuntimeError):
        return ""


@cache
def _management() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    _check("nvmlInit", library.nvmlInit_v2())
    device = ctypes.c_void_p()
    _check("device", library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device)))
    return library, device


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call}: error {status} of the driver")
