"""The version of the package, which is part of the key of everything that is kept on disk."""

from pathlib import Path

import pallasfuse
from pallasfuse import environment


def test_the_version_depends_on_every_source_and_table_of_the_package():
    folder = Path(pallasfuse.__file__).parent
    found = dict(environment._sources(str(folder)))
    assert found == {
        str(f.relative_to(folder)): str(f) for f in folder.rglob("*") if f.suffix in {".py", ".json", ".toml"}
    }
    assert {"api.py", "ir/fold.py"} <= {name.replace("\\", "/") for name in found}


def test_the_version_changes_with_a_source(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    versions = set()
    for place, text in (("a.py", "1"), ("a.py", "2"), ("inner/b.json", "2"), ("inner/c.pyc", "2")):
        (tmp_path / place).write_text(text)
        versions.add(environment._own_version.__wrapped__())
    assert len(versions) == 3
