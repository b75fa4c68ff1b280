"""Checks that the README's first example is examples/quickstart.py and shows what it prints; --write updates both.

The README marks the two blocks with `<!-- quickstart code -->` and `<!-- quickstart output -->`.
"""

import argparse
import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
QUICKSTART = ROOT / "examples" / "quickstart.py"


def code() -> str:
    """The example without its docstring."""
    source = QUICKSTART.read_text()
    docstring = ast.parse(source).body[0]
    return "".join(source.splitlines(keepends=True)[docstring.end_lineno :]).strip()


def output() -> str:
    """Runs the example and returns what it prints."""
    # What is printed depends neither on what was measured here before nor on what tests switch off.
    environment = os.environ | {"PALLASFUSE_CHECK": "0", "PALLASFUSE_PRICE": "1"}
    done = subprocess.run(
        [sys.executable, str(QUICKSTART)], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def with_block(text: str, name: str, language: str, content: str) -> str:
    """`text` with the fenced block after the marker `name` replaced by `content`."""
    block = re.compile(rf"(<!-- quickstart {name} -->\n)```{language}\n.*?\n```\n", re.DOTALL)
    replaced, count = block.subn(lambda match: f"{match[1]}```{language}\n{content}\n```\n", text)
    if count != 1:
        sys.exit(f"README.md: expected one ```{language} block after '<!-- quickstart {name} -->', found {count}")
    return replaced


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update README.md")
    options = parser.parse_args()
    present = README.read_text()
    expected = with_block(with_block(present, "code", "python", code()), "output", "text", output())
    if options.write:
        README.write_text(expected)
    elif expected != present:
        print(
            "\n".join(
                difflib.unified_diff(present.splitlines(), expected.splitlines(), "README.md", "now", lineterm="")
            )
        )
        print("README.md is out of date: run scripts/readme_output.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
