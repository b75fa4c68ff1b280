"""Measures how long `pallasfuse.verify` takes for every example, at a bound of 1e-9.

Each example is verified at full size from its shapes alone, planned for the CPU and for the GPU (which need not be there),
and at a small size with arrays, whose results are compared with float64. Each case runs in a process of its own: it pays
for its own tables and derivations. Imports do not count.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

DELTA = 1e-9
SHAPES_LENGTH, ARRAYS_LENGTH = 8192, 256
COLUMNS = (("xla shapes", "xla", SHAPES_LENGTH), ("triton shapes", "triton", SHAPES_LENGTH),
           ("xla arrays", "xla", ARRAYS_LENGTH))  # fmt: skip


def measure(case_name: str) -> dict[str, Any]:
    """One case in this process."""
    import jax
    import jax.numpy as jnp
    import sympy  # noqa: F401

    import pallasfuse as pf
    from benchmarks.cases import all_cases

    case = next(case for case in all_cases() if case.name == case_name)
    rows = []
    for column, target, length in COLUMNS:
        if length == ARRAYS_LENGTH:
            arrays = jax.block_until_ready(case.arrays(length, jnp.float32))
        else:
            arrays = jax.eval_shape(lambda: case.arrays(SHAPES_LENGTH, jnp.float32))
        start = time.perf_counter()
        report = pf.verify(case.fused, *arrays, *case.static, target=target, delta=DELTA)
        seconds = time.perf_counter() - start
        rows.append({
            "arguments": column, "length": length, "target": target, "seconds": seconds,
            "equivalent": report.equivalent, "bound": report.bound, "trials": report.proof.trials,
            "not_measured": report.not_measured,
        })  # fmt: skip
    return {"case": case_name, "runs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="one case, in this process, as a line of JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "verification.json")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return

    import jax

    from benchmarks.cases import all_cases

    print(f"{'case':28}" + "".join(f"{column + ' s':>18}" for column, _, _ in COLUMNS) + f"{'bound':>10}")
    results = []
    for case in all_cases():
        command = [sys.executable, __file__, "--case", case.name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"{case.name:28}failed: {done.stderr.strip().splitlines()[-1][:90]}")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        results.append(row)
        cells = "".join(f"{r['seconds']:17.2f}{' ' if r['equivalent'] else '!'}" for r in row["runs"])
        print(f"{case.name:28}{cells}{max(r['bound'] for r in row['runs']):10.1e}", flush=True)
    worst = max((r["seconds"] for row in results for r in row["runs"]), default=0.0)
    print(f"worst: {worst:.2f} s; ! marks what is not equivalent")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"jax": jax.__version__, "delta": DELTA, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
