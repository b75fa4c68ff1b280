"""A folder of small JSON files that remembers what was measured: one record for each identity, safe for several processes at once.

An *identity* says of what the record is: strings by name (the part of a program, the device, the versions of everything that the
outcome depends on). A file is called by the hash of its identity and repeats it, so that a file of another program, another
version or another format is never taken for an answer.
"""

import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

Identity = Mapping[str, str]
Record = dict[str, Any]

FORMAT = 1
"""The format of the files. Another number means another folder: nothing is converted."""
_FOLDER_VARIABLE = "PALLASFUSE_CACHE_DIR"


class Store:
    """Records on disk, with a copy in memory in front. Where the folder cannot be written, the copy in memory is all there is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"v{FORMAT}"
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        self._memory: dict[str, Record] = {}
        self._warned: set[str] = set()

    def get(self, identity: Identity) -> Record | None:
        """The record of an identity; None where there is none. The caller must not change it."""
        name = _name(identity)
        with self._lock:
            found = self._memory.get(name)
        if found is None:
            found = self._read(self._path(name), identity)
            if found is not None:
                with self._lock:
                    found = self._memory.setdefault(name, found)
        return found

    def update(self, identity: Identity, change: Callable[[Record], Record], *, on_disk: bool = True) -> Record:
        """Replace a record by what `change` makes of it (of an empty one, where there is none) and return that.

        The newest file is read before and replaced as a whole after: of two processes that change one record at the same
        instant, the last one's change stays. on_disk: False keeps the change to this process.
        """
        name = _name(identity)
        with self._changing:
            with self._lock:
                in_memory = self._memory.get(name, {})
            newest = self._read(self._path(name), identity) if on_disk else None
            changed = change({**in_memory, **(newest or {})})
            with self._lock:
                self._memory[name] = changed
            if on_disk:
                self._write(name, {"identity": dict(identity), "record": changed})
        return changed

    def entries(self) -> Iterator[tuple[dict[str, str], Record]]:
        """Every identity on disk with its record, in no particular order."""
        for path in sorted(self.folder.glob("*/*.json")):
            found = self._load(path)
            if found is not None:
                yield found

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name[2:]}.json"

    def _read(self, path: Path, identity: Identity) -> Record | None:
        found = self._load(path)
        if found is None:
            return None
        if found[0] != dict(identity):
            self.warn("foreign", f"{path} is not of what its name says: it is ignored, and may be deleted")
            return None
        return found[1]

    def _load(self, path: Path) -> tuple[dict[str, str], Record] | None:
        try:
            content = json.loads(path.read_bytes())
            identity, record = content["identity"], content["record"]
            if not isinstance(identity, dict) or not isinstance(record, dict):
                raise TypeError("not an object")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.warn("read", f"{path} cannot be read ({error}): what it may hold is measured again")
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.warn("corrupt", f"{path} is damaged ({error}): it is ignored, and may be deleted")
            return None
        return identity, record

    def _write(self, name: str, content: Record) -> None:
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(content, file)
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            self.warn("write", f"{path.parent} cannot be written ({error}): what was measured is forgotten with this process. "
                                f"{_FOLDER_VARIABLE} names another folder.")  # fmt: skip

    def warn(self, kind: str, message: str) -> None:
        """Warns once about each kind of trouble: a damaged folder is not a thousand warnings."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            warnings.warn(f"pallasfuse's cache: {message}", stacklevel=2)


def _name(identity: Identity) -> str:
    text = json.dumps(dict(identity), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@cache
def _store_in(folder: str) -> Store:
    return Store(Path(folder).expanduser())


def current() -> Store:
    """The store that `PALLASFUSE_CACHE_DIR` names, or the one in the user's cache folder."""
    return _store_in(os.environ.get(_FOLDER_VARIABLE) or platformdirs.user_cache_dir("pallasfuse", appauthor=False))
