"""Pieces that are read and changed anywhere, as measured on an H100."""

import pytest

from pallasfuse import device
from pallasfuse.price.scattered import Pieces, cached_change, cached_read, changed_in_memory, read_from_memory

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
MANY = 1 << 24


def us(cached=0.0, moved=0.0):
    return max(1e-3 * cached / H100.cache_gb_s, 1e-3 * moved / H100.memory_gb_s)


@pytest.mark.parametrize(
    ("width", "source_bytes", "measured_us"),
    [(1, 1 << 22, 149.0), (1, 1 << 26, 401.0), (2, 1 << 26, 215.0), (4, 1 << 26, 131.0)],
)
def test_pieces_that_are_read(width, source_bytes, measured_us):
    """So many floats of each; 16 million together are written, and take 40 us by themselves."""
    pieces = Pieces(MANY / width, 4.0 * width, float(source_bytes))
    predicted = us(cached_read(pieces, H100), read_from_memory(pieces, H100) + min(source_bytes, 4 * MANY) + 4 * MANY)
    assert 0.6 < predicted / measured_us < 1.4


def test_small_tables_are_near():
    assert cached_read(Pieces(MANY, 4.0, 1024.0), H100) == 0.0 == read_from_memory(Pieces(MANY, 4.0, 1024.0), H100)


@pytest.mark.parametrize(
    ("width", "size", "target_bytes", "measured_us"),
    [(1, 4, 1 << 22, 238.0), (1, 4, 1 << 26, 852.0), (4, 4, 1 << 22, 80.0), (1, 2, 1 << 22, 310.0)],
)
def test_pieces_that_are_changed(width, size, target_bytes, measured_us):
    pieces = Pieces(MANY / width, float(size * width), float(target_bytes), width if size < 4 else 0.0)
    predicted = us(cached_change(pieces), changed_in_memory(pieces, H100) + 2 * 4 * MANY)
    assert 0.6 < predicted / measured_us < 1.6
