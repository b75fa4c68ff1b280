"""The corpus: programs that were once wrong, one file each, as small as they could be made.

A file is a module: its docstring says what was wrong, `fn` is the program, `INPUTS` describe random arguments made from `DATA_SEED`
(or `arguments()` gives them), and `TILES` are the tile sizes, by axis.
`test_corpus.py` replays every file on every emitter, or on its `EMITTERS`.
"""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.property.judging import EMITTERS, Case
from tests.property.programs import AXIS_NAMES, Input, Program

CORPUS = Path(__file__).parent / "corpus"


def text(program: Program, comment: str) -> str:
    """The file of a program."""
    inputs = "".join(f"    {i},\n" for i in program.inputs)
    sizes = dict(program.tiles)
    tiles = "()" if not sizes else f"tuple(zip(AXIS_NAMES, {[sizes.get(a, 1) for a in AXIS_NAMES]}))"
    used = [m for m in ("jax", "jnp", "lax") if re.search(rf"\b{m}\.", program.source)]
    lines = {"jax": "import jax", "jnp": "import jax.numpy as jnp", "lax": "from jax import lax"}
    imports = "\n".join(lines[m] for m in used)
    wanted = "AXIS_NAMES, Input" if sizes else "Input"
    return (
        f'"""{comment}"""\n\n{imports}\n\nfrom tests.property.programs import {wanted}\n\n'
        f"INPUTS = (\n{inputs})\nTILES = {tiles}\nDATA_SEED = {program.data_seed}\n\n\n{program.source}"
    )


def save(program: Program, comment: str, directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.py"
    path.write_text(text(program, comment))
    return path


def load(path: Path) -> tuple[Case, str, tuple[str, ...]]:
    """The case of a file, what was wrong, and the emitters that it is for."""
    scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "lax": jax.lax, "Input": Input}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    if "arguments" in scope:
        args = scope["arguments"]()
    else:
        rng = np.random.default_rng(scope["DATA_SEED"])
        args = [i.make(rng) for i in scope["INPUTS"]]
    return Case(scope["fn"], args, tuple(scope["TILES"])), scope.get("__doc__") or "", scope.get("EMITTERS", EMITTERS)
