"""Reports what the kernels of every benchmark case take of an H100, compiled without one (needs `make venv-aot`).

One line for each case, length and type: the seconds to lower and to compile, and for each kernel its schedule, blocks,
threads, shared memory, registers per thread and spilled bytes. Exits 1 when a case does not compile.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import h100  # noqa: E402
from benchmarks.cases import Case, all_cases  # noqa: E402

HEADER = f"{'case':26}{'length':>7} {'dtype':9}{'lower s':>8}{'compile s':>10}"


def report(case: Case, length: int, dtype: str) -> bool:
    """Print the line of one case; True when it compiles."""
    import jax
    import jax.numpy as jnp

    arguments = jax.eval_shape(lambda: case.arrays(length, jnp.dtype(dtype)))
    print(f"{case.name:26}{length:7} {dtype:9}", end="", flush=True)
    start = time.perf_counter()
    try:
        plan = case.fused.explain(*arguments, *case.static, target="triton")
        compiled = h100.compile_for_h100(lambda *a: case.fused(*a, *case.static), arguments)
    except Exception as error:
        seconds = time.perf_counter() - start
        print(f"{seconds:8.2f}  FAILED  {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")
        return False
    print(f"{compiled.lower_s:8.2f}{compiled.compile_s:10.2f}", end="")
    launches = {launch.name: launch for launch in compiled.triton_launches}
    parts = [] if launches else ["  no kernel"]
    for kernel in plan.kernels:
        launch = launches[kernel.program.name[:60]]
        spilled = "not known" if launch.spilled_bytes is None else f"{launch.spilled_bytes} B"
        parts.append(
            f"  [{kernel.schedule}] {launch.blocks} blocks of {launch.threads} threads, "
            f"{kernel.schedule.stages} stages: {launch.shared_bytes / 1024:.1f} KiB shared, "
            f"{launch.registers} registers, {spilled} spilled"
        )
    print(";".join(parts), flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--dtypes", nargs="+", default=["float16", "float32"])
    parser.add_argument("--cases", nargs="+", help="names; all without it")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    options = parser.parse_args()
    if not h100.can_compile():
        sys.exit(f"no CUDA plugin or no ptxas: make venv-aot; JAX_PLATFORMS=cpu .venv-aot/bin/python {sys.argv[0]}")
    warnings.filterwarnings("ignore", message=".*Pallas Triton backend is deprecated")
    cases = [case for case in all_cases() if options.cases is None or case.name in options.cases]
    print(HEADER)
    compiles = [
        report(case.small() if options.small else case, length, dtype)
        for case in cases
        for length in options.lengths
        for dtype in options.dtypes
    ]
    sys.exit(0 if all(compiles) else 1)


if __name__ == "__main__":
    main()
