"""Numbers of devices, kept as data in `devices/` and read by the price: estimates, or measured by `scripts/calibrate.py`.

The `source` of each file says which. Those of today are estimates that were fitted to measured kernels.
"""

import json
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

Platform = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """The numbers of one kind of device. A GPU's rates are for the whole device, a CPU's for one core unless said."""

    kind: str
    """As JAX names it (`jax.Device.device_kind`)."""
    platform: Platform
    source: str
    """Where the numbers come from."""
    multiprocessors: int
    """Multiprocessors of a GPU, or cores of a CPU."""
    clock_ghz: float
    """Under load."""
    memory_gb_s: float
    """Reads and writes of device memory together."""
    cache_gb_s: float
    """From the cache that all share (a GPU's L2, a CPU's last level)."""
    cache_bytes: int
    shared_memory_bytes: int
    """The most bytes of shared memory that one block may hold; 0 for a CPU."""
    matmul_tflop_s: dict[str, float]
    """The rate of the library's large products, by type of the operands; `float32` at full precision, `tf32` at the default one."""
    vector_gop_s: float
    """Simple operations on float32."""
    special_gop_s: float
    """Exponentials and the like."""
    kernel_us: float
    """The shortest kernel; on a CPU, a thunk of a program."""
    launch_us: float
    """From the end of a kernel to the beginning of the next one; on a CPU, what it adds to spread a thunk over the cores."""
    latency_us: float
    """From a load to its value, where the memory is busy."""
    cache_latency_us: float
    """The same from the shared cache."""
    trip_us: float
    """One trip of a loop that does next to nothing; on a CPU, a thunk of such a trip."""
    port_bytes: float = 0.0
    """The bytes that one multiprocessor of a GPU takes from the shared cache in a clock, at most; what several ask for comes at
    this rate. 0: no more than the rate of the cache."""
    longest_row: int = 0
    """Elements of a row that one of XLA's own kernels reduces and reads again."""
    page_gb_s: float = 1.0
    """Memory that the system hands out anew (CPUs)."""
    call_us: float = 6.0
    """One call of the library that reduces and multiplies, whatever its size (CPUs)."""
    looped_call_us: float = 6.0
    """The same in the body of a loop of XLA's, whose trips have no other work at the same time (CPUs)."""
    kept_bytes: int = 32 << 20
    """Larger buffers go back to the system when they are freed, and are made anew at every call (CPUs)."""
    in_body: bool = False
    """Does the program that is priced stand in the body of a loop, or in a branch? XLA's CPU backend leaves out passes there."""
    library: dict[str, float] = field(default_factory=dict)
    """Rates of what a library computes that is no product, by name (`price/plain_gpu.py` and `price/plain_cpu.py` say what each
    is); empty where nobody knows them."""
    found_share: float = 1.0
    """The share of the shared cache in which a kernel finds what it reads: other kernels of a program fill the rest."""
    price_error: float = 1.2
    """By which factor a kernel must be predicted to be faster than XLA's to be kept unchecked.

    Of 104 kernels on an H200, the advantage over XLA was predicted within 1.32 for half, and within 1.7 for four of five.
    """

    def from_cache_us(self, once: Any, again: Any) -> Any:
        """Returns the time in which the shared cache hands out bytes for the first time, and others again.

        Data that many multiprocessors ask for at about the same time, and well ahead, is limited by their ports. once, again:
        bytes, as numbers or as arrays of them.
        """
        ports_gb_s = self.port_bytes * self.clock_ghz * self.multiprocessors
        return 1e-3 * (once / self.cache_gb_s + again / max(ports_gb_s, self.cache_gb_s))

    def among(self, total: float) -> "Device":
        """Returns the device as a program finds it whose arguments and results have `total` bytes together.

        Where the cache does not hold all of them, other kernels have read and written the rest since: a part in proportion is left.
        """
        share = 1.0 if self.platform != "gpu" else min(1.0, self.cache_bytes / max(total, 1.0))
        return self if share == self.found_share else replace(self, found_share=share)

    def inside_loops(self) -> "Device":
        """Returns the device as the bodies of loops find it."""
        inside = self.inside_branches()
        return inside if self.call_us == self.looped_call_us else replace(inside, call_us=self.looped_call_us)

    def inside_branches(self) -> "Device":
        """Returns the device as programs find it that are a branch of a choice, or a body."""
        return self if self.in_body or self.platform != "cpu" else replace(self, in_body=True)

    @property
    def found_bytes(self) -> float:
        """The most bytes that a kernel finds in the shared cache when it begins."""
        return self.cache_bytes * self.found_share

    def share(self, count: int) -> "Device":
        """Returns a device that has a part, one of so many, of this one's units and rates."""
        return replace(
            self, multiprocessors=max(1, self.multiprocessors // count), memory_gb_s=self.memory_gb_s / count,
            cache_gb_s=self.cache_gb_s / count, vector_gop_s=self.vector_gop_s / count,
            special_gop_s=self.special_gop_s / count,
            matmul_tflop_s={kind: rate / count for kind, rate in self.matmul_tflop_s.items()},
        )  # fmt: skip


def _read(name: str) -> Device:
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath("devices", name).read_text())
    known = {f.name for f in fields(Device)}
    return Device(**{k: v for k, v in data.items() if k in known})


@cache
def known() -> tuple[Device, ...]:
    """Every device that has a file of numbers."""
    folder = resources.files(__package__).joinpath("devices")
    return tuple(_read(f.name) for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".json"))


_ASSUMED: dict[Platform, str] = {"cpu": "cpu", "gpu": "NVIDIA H100 80GB HBM3"}


@cache
def assumed(platform: Platform) -> Device:
    """The device that plans are made for where none of the platform is at hand."""
    return next(d for d in known() if d.kind == _ASSUMED[platform])


@cache
def find(kind: str, platform: Platform) -> Device:
    """The numbers of a kind of device, as JAX names it.

    Of one that was never measured, careful ones: the least of what is known, so that only what is faster by far is fused.
    """
    same = [d for d in known() if d.platform == platform]
    for device in same:
        if device.kind == kind or kind.startswith(device.kind):
            return device
    numbers: dict[str, Any] = {}
    for f in fields(Device):
        values = [getattr(d, f.name) for d in same]
        if f.name in ("kernel_us", "launch_us", "latency_us", "cache_latency_us", "trip_us", "longest_row"):
            numbers[f.name] = max(values)
        elif f.name == "price_error":
            numbers[f.name] = _UNKNOWN_ERROR * max(values)
        elif isinstance(values[0], int | float):
            numbers[f.name] = min(values)
        elif isinstance(values[0], dict):
            shared = set(values[0]).intersection(*values)
            numbers[f.name] = {k: min(v[k] for v in values) for k in values[0] if k in shared}
        else:
            numbers[f.name] = values[0]
    numbers["shared_memory_bytes"] = min(numbers["shared_memory_bytes"], _LEAST_SHARED_BYTES)
    return Device(**{**numbers, "kind": kind, "source": "unknown: the least of what is known"})


_LEAST_SHARED_BYTES = 99 << 10
"""Bytes that a block may have on every GPU of the last generations."""
_UNKNOWN_ERROR = 1.3
"""The factor by which a kernel must be predicted to win on a device that was never measured."""
