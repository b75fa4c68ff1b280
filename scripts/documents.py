"""Runs the examples of the documentation, page by page, and compares what they print with what the page shows.

    python scripts/documents.py                      # every page; prints what differs
    python scripts/documents.py --write masks.md     # writes what the examples print into the page

The ```python blocks of a page are one program: they run one after the other and share their names. A ```text block after one of
them, before the next, is what it prints. In it, `...` stands for anything. HTML comments, which readers do not see, say the rest:

    <!-- program: needs=equinox,transformers -->     above a block: a new program begins, without the names of those before
    <!-- program: devices=4,1 -->                    it runs in a process of its own, with so many devices of one CPU; the deep tier
                                                     of the tests runs it with the other numbers, too
    <!-- program: every-kernel -->                   whatever can be fused is, also where that is not faster
    <!-- program: check -->                          kernels are timed, as for users; elsewhere they are not, so that what is
                                                     printed depends on no clock
    <!-- program: deep -->                           it runs in the deep tier of the tests
    <!-- numbers vary -->                            above a ```text block: only what is no number is compared
"""

import argparse
import contextlib
import difflib
import doctest
import importlib.util
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FILE = "model.py"
"""The file that examples believe to be in: kernels are called by their lines in it."""
_FENCE = re.compile(
    r"(?P<settings><!-- program:(?P<flags>[^>]*)-->\n+)?(?P<vary><!-- numbers vary -->\n+)?"
    r"^```(?P<language>python|text)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL,
)  # fmt: skip
_NUMBER = re.compile(r"-?\d[\d.]*(e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A Python block, and what the page shows as its output."""

    line: int
    code: str
    shown: str | None = None
    vary: bool = False


@dataclass
class Program:
    """The blocks of a page that share their names."""

    page: str
    number: int
    needs: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    check: bool = False
    every_kernel: bool = False
    deep: bool = False
    blocks: list[Block] = field(default_factory=list)

    def __str__(self) -> str:
        return self.page.removesuffix(".md") + (f"-{self.number}" if self.number else "")

    def missing(self) -> list[str]:
        """Lists the packages that the program needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def environment(self, cache: str) -> dict[str, str]:
        """Returns the settings that pallasfuse reads from the environment: those of users, but for the clock.

        cache: the folder of what was measured.
        """
        priced, checked = str(int(not self.every_kernel)), str(int(self.check))
        return {"PALLASFUSE_PRICE": priced, "PALLASFUSE_CHECK": checked, "PALLASFUSE_CACHE_DIR": cache}


def programs(page: Path) -> list[Program]:
    """Reads the programs of a page."""
    text = page.read_text()
    found: list[Program] = []
    for fence in _FENCE.finditer(text):
        if fence["language"] == "text":
            if found and found[-1].blocks and found[-1].blocks[-1].shown is None:
                last = found[-1].blocks.pop()
                found[-1].blocks.append(Block(last.line, last.code, fence["body"], fence["vary"] is not None))
            continue
        if fence["settings"] is not None or not found:
            found.append(_program(page.name, len(found), (fence["flags"] or "").split()))
        found[-1].blocks.append(Block(text.count("\n", 0, fence.start("body")) + 1, fence["body"]))
    return found


def _program(page: str, number: int, flags: list[str]) -> Program:
    program = Program(page, number)
    for flag in flags:
        name, _, value = flag.partition("=")
        match name:
            case "needs":
                program.needs = tuple(value.split(","))
            case "devices":
                program.devices = tuple(map(int, value.split(",")))
            case "check" | "deep" | "every-kernel":
                setattr(program, name.replace("-", "_"), True)
            case _:
                raise ValueError(f"{page}: there is no setting {flag!r} of a program")
    return program


def pages() -> list[Path]:
    """Lists the pages, in the order of their names."""
    return sorted(DOCS.glob("*.md"))


class ExampleError(Exception):
    """A block raised an exception."""


def run_here(program: Program) -> list[str]:
    """Runs a program in this process, and returns what each block prints.

    Raises:
      ExampleError: a block raised; the message begins with its place in the page.
    """
    source = "".join(block.code for block in program.blocks)
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    names = {"__name__": "__main__", "__file__": FILE}
    printed, before = [], 0
    for block in program.blocks:
        output = io.StringIO()
        try:
            code = compile("\n" * before + block.code, FILE, "exec")
            with contextlib.redirect_stdout(output):
                exec(code, names)
        except Exception as error:
            last = before + 1
            step = error.__traceback__
            while step is not None:
                last = step.tb_lineno if step.tb_frame.f_code.co_filename == FILE else last
                step = step.tb_next
            place = f"docs/{program.page}:{block.line + last - before - 1 if last > before else block.line}"
            raise ExampleError(f"{place}: {type(error).__name__}: {error}") from error
        printed.append(output.getvalue())
        before += block.code.count("\n")
    return printed


def run(program: Program, devices: int | None = None) -> list[str]:
    """Runs a program in a process of its own, and returns what each block prints.

    devices: how many the CPU has; None: as the page says.

    Raises:
      ExampleError: a block raised, or the process ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | program.environment(folder) | {"PYTHONPATH": str(ROOT)}
        for count in (devices,) if devices else program.devices[:1]:
            environment["XLA_FLAGS"] = (
                f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
            )
        done = subprocess.run(
            [sys.executable, __file__, "--one", f"{program.page}:{program.number}"],
            capture_output=True, text=True, check=False, timeout=600, env=environment, cwd=folder,
        )  # fmt: skip
    if done.returncode != 0:
        raise ExampleError(done.stderr[-4000:])
    printed: list[str] = json.loads(done.stdout.splitlines()[-1])
    return printed


def differences(program: Program, printed: list[str]) -> Iterator[str]:
    """Yields, for every block whose page shows another output, both as a diff."""
    for block, output in zip(program.blocks, printed, strict=True):
        if block.shown is not None and not _agrees(block, output):
            lines = difflib.unified_diff(
                block.shown.splitlines(), _clean(output).splitlines(), "page", "now", lineterm=""
            )
            yield f"docs/{program.page}:{block.line}: another output\n" + "\n".join(lines)


def _clean(output: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in output.strip("\n").splitlines())


def _agrees(block: Block, output: str) -> bool:
    want, got = (_NUMBER.sub("#", x) if block.vary else x for x in (block.shown or "", _clean(output)))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def write(program: Program, printed: list[str]) -> None:
    """Puts what the blocks print into the page; outputs of which `...` hides a part stay."""
    page = DOCS / program.page
    text = page.read_text()
    for block, output in zip(program.blocks, printed, strict=True):
        if block.shown is None or "..." in block.shown or _agrees(block, output):
            continue
        start = text.index(f"```python\n{block.code}```\n") + len(block.code)
        head, shown = text[:start], text[start:]
        text = head + shown.replace(f"```text\n{block.shown}```", f"```text\n{_clean(output)}```", 1)
    page.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="names of pages; without any, all")
    parser.add_argument("--write", action="store_true", help="write what the examples print into the pages")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        page, _, number = options.one.rpartition(":")
        print("\n" + json.dumps(run_here(programs(DOCS / page)[int(number)])))
        return 0
    failed = False
    for page in pages():
        for program in programs(page) if not options.pages or page.name in options.pages else []:
            if program.missing():
                print(f"{program}: skipped, as {', '.join(program.missing())} is not installed")
                continue
            try:
                printed = run(program)
            except ExampleError as error:
                print(f"{program}: {error}")
                failed = True
                continue
            if options.write:
                write(program, printed)
            else:
                found = list(differences(program, printed))
                failed = failed or bool(found)
                print("\n".join([*found, f"{program}: {'differs' if found else 'as shown'}"]))
    return failed


if __name__ == "__main__":
    sys.exit(main())
