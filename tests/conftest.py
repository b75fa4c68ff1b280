"""Defaults for all tests: nothing is timed, and whatever can be fused is, whether that is faster or not."""

import os

os.environ.setdefault("PALLASFUSE_CHECK", "0")
os.environ.setdefault("PALLASFUSE_PRICE", "0")
