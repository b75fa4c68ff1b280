"""The numbers of devices: files are whole, an unknown device gets careful ones."""

import dataclasses
import json
from importlib import resources

import pytest

from pallasfuse import device
from pallasfuse.price import cpu

pytestmark = pytest.mark.any_jax


def test_every_file_has_the_fields_of_a_device_and_no_others():
    known = {f.name for f in dataclasses.fields(device.Device)} | {"how"}
    files = [f for f in resources.files("pallasfuse").joinpath("devices").iterdir() if f.name.endswith(".json")]
    assert len(files) == len(device.known()) >= 3
    for file in files:
        numbers = json.loads(file.read_text())
        assert not numbers.keys() - known, file.name
        measured = [
            numbers[f] for f in ("memory_gb_s", "cache_gb_s", "vector_gop_s", "special_gop_s", "kernel_us", "trip_us")
        ]
        assert all(value > 0 for value in measured) and numbers["price_error"] >= 1.0


def test_a_known_device_is_found_by_the_beginning_of_its_name():
    assert device.find("NVIDIA H200 NVL", "gpu").kind == "NVIDIA H200"
    assert device.find("cpu", "cpu").platform == "cpu"


def test_an_unknown_device_gets_numbers_that_flatter_no_kernel():
    gpus = [d for d in device.known() if d.platform == "gpu"]
    found = device.find("NVIDIA of next year", "gpu")
    assert found.kind == "NVIDIA of next year" and "unknown" in found.source
    assert device.find("NVIDIA A100-SXM4-40GB", "gpu").shared_memory_bytes <= 163 << 10
    for name in ("memory_gb_s", "cache_gb_s", "vector_gop_s", "multiprocessors"):
        assert getattr(found, name) == min(getattr(d, name) for d in gpus)
    for name in ("kernel_us", "latency_us", "trip_us", "longest_row"):
        assert getattr(found, name) == max(getattr(d, name) for d in gpus)
    for dtype, rate in found.matmul_tflop_s.items():
        assert rate == min(d.matmul_tflop_s[dtype] for d in gpus)
    assert found.price_error > max(d.price_error for d in gpus)


def test_only_buffers_that_the_allocator_does_not_keep_are_new_pages():
    here = dataclasses.replace(device.assumed("cpu"), kept_bytes=1000, page_gb_s=0.5)
    assert cpu.pages([999, 1000], here).us == 0.0
    assert cpu.pages([999, 4000], here).us == pytest.approx(1e-3 * 4000 / 0.5)
