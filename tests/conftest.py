"""Defaults for all tests: nothing is timed, nothing is written into the user's cache folder, and whatever can be fused is, whether
that is faster or not."""

import os
import tempfile

os.environ.setdefault("PALLASFUSE_CHECK", "0")
os.environ.setdefault("PALLASFUSE_PRICE", "0")
os.environ.setdefault("PALLASFUSE_CACHE_DIR", tempfile.mkdtemp(prefix="pallasfuse-tests-"))
