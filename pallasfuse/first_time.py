"""What happens once: warnings, and the imports that wait for the first plan."""

from threading import Lock, RLock

IMPORTS = RLock()
"""Held while the modules that make plans are imported, at the first call: two threads that import modules of one package in
different orders would wait for each other."""


class Once:
    """Answers True the first time it is asked about a thing, and False from then on. Every fused function has one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._told: set[str] = set()

    def first(self, what: str) -> bool:
        with self._lock:
            told = what in self._told
            self._told.add(what)
        return not told
