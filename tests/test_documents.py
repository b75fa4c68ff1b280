"""The documentation says what is so: its examples run and print what is shown, its links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pallasfuse.tiling.rules import RULES
from scripts import api_reference, documents, pictures
from tests import quick

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = [program for page in documents.pages() for program in documents.programs(page)]


def cases():
    """Lists every program, with the number of devices; other numbers than a program's first one are deep."""
    found = []
    for program in PROGRAMS:
        for n, devices in enumerate(program.devices or (None,)):
            marks = [pytest.mark.deep] if program.deep or n else []
            found.append(pytest.param(program, devices, id=f"{program}{f'-{devices}' if n else ''}", marks=marks))
    return found


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(("program", "devices"), cases())
def test_program_runs_and_prints_what_is_shown(program, devices, request, monkeypatch, tmp_path):
    if missing := program.missing():
        pytest.skip(f"needs {', '.join(missing)}: outside of the test extra")
    if program.devices or program.check:  # in a process of its own
        if request.config.getoption("quick") and not program.check:  # which compares times
            monkeypatch.setenv("XLA_FLAGS", quick.FLAGS)
        printed = documents.run(program, devices)
    else:
        for name, value in program.environment(str(tmp_path)).items():
            monkeypatch.setenv(name, value)
        printed = documents.run_here(program)
    found = list(documents.differences(program, printed))
    assert not found, "\n".join([*found, f"scripts/documents.py --write {program.page}"])


def test_examples_are_many():
    assert sum(len(p.blocks) for p in PROGRAMS) >= 60
    assert sum(b.shown is not None for p in PROGRAMS for b in p.blocks) >= 35


@pytest.mark.any_jax
@pytest.mark.parametrize("page", documents.pages(), ids=lambda p: p.stem)
def test_page_has_no_python_that_is_not_run(page):
    fences = re.findall(r"^ *```(python|py)\b.*$", page.read_text(), re.MULTILINE)
    assert len(fences) == sum(len(p.blocks) for p in documents.programs(page))
    for program in documents.programs(page):
        assert all(block.shown != "" for block in program.blocks), (
            "an output is empty: run scripts/documents.py --write"
        )


@pytest.mark.any_jax
class TestMechanism:
    """A wrong example fails, at the line that is to blame."""

    def read(self, tmp_path, text):
        page = tmp_path / "page.md"
        page.write_text(text)
        return documents.programs(page)

    def test_programs_have_names_of_their_own(self, tmp_path):
        first, second = self.read(
            tmp_path, "```python\na = 1\n```\n<!-- program: -->\n\n```python\nprint('a' in globals())\n```\n"
        )
        documents.run_here(first)
        assert documents.run_here(second) == ["False\n"]

    def test_another_output_differs(self, tmp_path):
        (program,) = self.read(tmp_path, "```python\nprint('one 1')\n```\n\n```text\none 2\n```\n")
        (found,) = documents.differences(program, documents.run_here(program))
        assert "-one 2\n+one 1" in found

    def test_dots_stand_for_anything(self, tmp_path):
        (program,) = self.read(tmp_path, "```python\nprint('one 1')\n```\n\n```text\none ...\n```\n")
        assert list(documents.differences(program, documents.run_here(program))) == []

    def test_numbers_vary_where_the_page_says_so(self, tmp_path):
        text = "```python\nprint('1.5 us, %s')\n```\n\n<!-- numbers vary -->\n\n```text\n2 us, {}\n```\n"
        for word, differs in (("b", False), ("c", True)):
            (program,) = self.read(tmp_path, (text % "b").format(word))
            assert bool(list(documents.differences(program, documents.run_here(program)))) == differs

    def test_an_error_is_placed(self, tmp_path):
        (program,) = self.read(
            tmp_path, "# Title\n\n```python\na = 1\n```\n\ntext\n\n```python\nb = 2\nc = a / 0\n```\n"
        )
        with pytest.raises(documents.ExampleError, match=r"page\.md:11: ZeroDivisionError"):
            documents.run_here(program)

    def test_a_package_that_is_not_there(self, tmp_path):
        (program,) = self.read(tmp_path, "<!-- program: needs=json,no_such_package -->\n\n```python\n1\n```\n")
        assert program.missing() == ["no_such_package"]

    def test_an_unknown_setting(self, tmp_path):
        with pytest.raises(ValueError, match="no setting 'device=4'"):
            self.read(tmp_path, "<!-- program: device=4 -->\n\n```python\n1\n```\n")


def slug(heading):
    """The anchor of a heading, as mkdocs makes it."""
    words = re.sub(r"[^\w\s-]", "", heading.lower().replace("`", "")).strip()
    return re.sub(r"[-\s]+", "-", words)


def anchors(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(h) for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.any_jax
@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *documents.pages()], ids=lambda p: p.stem
)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        if name.endswith(documents.DOCS.name + "/" + api_reference.PAGE) or name == api_reference.PAGE:
            continue  # made when the site is built
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.any_jax
def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (?:\w+: )?(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*(p.name for p in documents.pages()), api_reference.PAGE])


@pytest.mark.any_jax
def test_every_rule_that_refuses_a_schedule_is_listed():
    """Bounds (10) are derived: no tree breaks that rule."""
    rows = re.findall(r"^\| (\d+) ([a-z ]+) \|", (ROOT / "docs/schedules.md").read_text(), re.MULTILINE)
    assert rows == [(str(number), name) for number, name in RULES.items() if number != 10]


def test_pictures_are_current():
    for name, draw in pictures.PICTURES.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text() == str(draw()), "scripts/pictures.py --write"


@pytest.mark.any_jax
def test_readme_shows_one_example():
    """It is examples/quickstart.py, which tests/examples runs."""
    assert len(re.findall(r"^```python$", (ROOT / "README.md").read_text(), re.MULTILINE)) == 1


@pytest.mark.any_jax
class TestApiReference:
    def test_has_every_public_name(self):
        import pallasfuse as pf

        described = api_reference.public_names("pallasfuse")
        assert sorted([*described, "tuning"]) == sorted(pf.__all__)
        page = api_reference.page()
        for name in described:
            assert f"\n### {name}\n" in page

    def test_has_what_docstrings_say(self):
        page = api_reference.page()
        assert "- `target`: 'xla', 'xla_gpu'" in page
        assert "\n#### FusedFunction.explain\n" in page
        assert "fuse(function: Callable[..., Any] | None=None, /, *, target: str | None=None" in page

    @pytest.mark.parametrize("module", api_reference.MODULES)
    def test_every_name_has_a_docstring(self, module):
        names = api_reference.public_names(module)
        assert names
        page = api_reference.page()
        for name in names:
            short = f"{module}.{name}".removeprefix("pallasfuse.")
            assert re.search(
                rf"^### {re.escape(short)}\n\n```python\n.*?\n```\n\n\S", page, re.MULTILINE | re.DOTALL
            ), name


def python_with_mkdocs():
    """Returns a Python that has mkdocs: this one, or that of `make docs`."""
    own = ROOT / ".venv-docs" / "bin" / "python"
    return sys.executable if importlib.util.find_spec("mkdocs") else str(own) if own.exists() else None


@pytest.mark.any_jax
@pytest.mark.skipif(
    python_with_mkdocs() is None, reason="needs mkdocs: outside of the test extra (make docs installs it)"
)
def test_site_is_built_and_loads_nothing_from_elsewhere(tmp_path):
    build = [python_with_mkdocs(), "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    built = list(tmp_path.rglob("*.html"))
    assert len(built) > len(documents.pages())
    loads = r"<(?:script|img|iframe)[^>]*src=\"(?:https?:)?//[^\"]*|<link[^>]*href=\"(?:https?:)?//[^\"]*"
    for path in built:
        assert re.findall(loads, path.read_text()) == [], path.name
