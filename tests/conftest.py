"""What all tests share: no test measures anything unless it says so, and none writes into the user's cache folder."""

import os
import tempfile

os.environ.setdefault("PALLASFUSE_CHECK", "0")
os.environ.setdefault("PALLASFUSE_CACHE_DIR", tempfile.mkdtemp(prefix="pallasfuse-tests-"))
