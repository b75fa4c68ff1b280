"""What happens once: warnings, and the imports that wait for the first plan."""

from threading import Lock, RLock

IMPORTS = RLock()
"""Held while the modules that make plans are imported, at the first call: two threads that import modules of one package in
different orders would wait for each other."""


class Once:
    """Answers True the first time it is asked, and False from then on. One per fused function, shared by all its traces."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._fired = False

    def first(self) -> bool:
        with self._lock:
            fired, self._fired = self._fired, True
        return not fired
