"""Differential fuzzing: random programs, fused on every emitter that runs on a CPU, against their float64 evaluation.

  python scripts/fuzz.py --n 10000 --jobs 16 --out fuzz.json

Prints per emitter the shares fully fused, partly fused and left to XLA, the features that occurred, the worst use of the tolerance,
and every failure with the program's source. Failures are shrunk and written to a directory, as files for tests/property/corpus.
Exits with 1 when something failed. Interrupted, it reports what it has.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# workers are processes: one thread each, and no device but the CPU
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("PYTHONPATH", str(ROOT))

from tests.property.fuzzing import Pool, judge_seed, kind_of, shrink_seed  # noqa: E402

EMITTERS = (
    "xla",
    "interpret",
    "xla split",
    "loop program",
    "tiles of xla",
    "tiles of interpret",
    "tiles of triton",
    "tiles of triton split",
)
EVENTS = ("fully fused", "partly fused", "left to XLA")


class Report:
    """Counts what came of all programs."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.programs, self.discarded, self.cpu_seconds, self.kept_emitters = 0, Counter[str](), 0.0, Counter[str]()
        self.events: dict[str, Counter[str]] = {e: Counter() for e in EMITTERS}
        self.features: Counter[str] = Counter()
        self.worst: dict[str, float] = {}
        self.unjudged: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def add(self, seed: int, record: dict[str, Any] | None, why: str) -> None:
        self.programs += 1
        if record is None:
            self.failures.append({"seed": seed, "emitter": "", "problem": why, "source": ""})
            return
        self.cpu_seconds += record["seconds"]
        if record["discarded"]:
            self.discarded[record["discarded"].split("\n")[0][:80]] += 1
            return
        self.features.update(record["features"])
        for emitter, came in record["emitters"].items():
            self.kept_emitters[emitter] += 1
            if emitter in self.events:
                self.events[emitter].update([came["event"], *(["rolls"] if came["rolls"] else [])])
            self.worst[emitter] = max(self.worst.get(emitter, 0.0), came["worst"] if not came["problems"] else 0.0)
            self.unjudged[emitter] += came["unjudged"]
            if came["problems"]:
                self.failures.append(
                    {"seed": seed, "emitter": emitter, "problem": came["problems"][0], "source": record["source"]}
                )

    def summary(self) -> dict[str, Any]:
        kept = max(1, self.programs - sum(self.discarded.values()))
        return {
            "programs": self.programs, "judged": kept, "discarded": dict(self.discarded), "failures": self.failures,
            "seconds": time.monotonic() - self.began, "cpu_seconds": self.cpu_seconds,
            "events": {e: dict(c) for e, c in self.events.items()}, "features": dict(self.features.most_common()),
            "worst_use_of_the_tolerance": self.worst,
            "share_not_judged": {e: n / max(1, self.kept_emitters[e]) for e, n in self.unjudged.items()},
        }  # fmt: skip

    def show(self) -> None:
        s = self.summary()
        kept = s["judged"]
        print(f"\n{self.programs} programs, {sum(self.discarded.values())} discarded, in {s['seconds']:.0f} s "
              f"({self.programs / max(1e-9, self.cpu_seconds):.2f} programs per second and process)")  # fmt: skip
        for reason, count in self.discarded.most_common(5):
            print(f"  discarded {count}: {reason}")
        for emitter, counts in self.events.items():
            judged = max(1, self.kept_emitters[emitter])
            if emitter != "loop program" and self.kept_emitters[emitter]:
                shares = ", ".join(f"{e} {100 * counts[e] / judged:.1f}%" for e in EVENTS)
                print(f"  {emitter}: {shares}; several trips with a repair {100 * counts['rolls'] / judged:.1f}%")
        print("worst use of the tolerance: " + ", ".join(f"{e} {w:.2f}" for e, w in self.worst.items()))
        print("elements without a bound: " + ", ".join(f"{e} {100 * w:.2f}%" for e, w in s["share_not_judged"].items()))
        print("features: " + ", ".join(f"{f} {100 * n / kept:.0f}%" for f, n in self.features.most_common()))
        print(f"{len(self.failures)} failures of {len({f['seed'] for f in self.failures})} programs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no program after that time")
    parser.add_argument("--task-seconds", type=float, default=300.0, help="the most that one program may take")
    parser.add_argument("--emitters", nargs="*", default=list(EMITTERS), choices=EMITTERS, metavar="EMITTER")
    parser.add_argument("--out", type=Path, help="a JSON summary")
    parser.add_argument("--failures", type=Path, default=Path("fuzz_failures"), help="where shrunk failures go")
    parser.add_argument(
        "--shrink", type=int, default=10, help="how many failures to shrink; the others are only listed"
    )
    parser.add_argument("--shrink-seconds", type=float, default=90.0)
    args = parser.parse_args()

    report, pool = Report(), Pool(args.jobs, args.task_seconds)
    emitters = tuple(args.emitters)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())

    def tasks() -> Any:
        for seed in range(args.seed, args.seed + args.n):
            if stopped.is_set() or time.monotonic() - report.began > args.seconds:
                return
            yield judge_seed, seed, emitters

    shown = report.began
    for task, record, why in pool.run(tasks()):
        known = len(report.failures)
        report.add(task[1], record, why)
        for failure in report.failures[known:]:
            print(
                f"FAILED seed {failure['seed']} on {failure['emitter']}: {failure['problem']}\n{failure['source']}",
                flush=True,
            )
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            rate = report.programs / (shown - report.began)
            print(f"{report.programs} of {args.n} programs, {len(report.failures)} failures, {rate:.1f} programs per second, "
                  f"{(args.n - report.programs) / rate / 60:.0f} minutes left", flush=True)  # fmt: skip
    shrunk = list(_shrink(report, pool, args))
    pool.close()
    report.show()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report.summary() | {"n": args.n, "seed": args.seed, "shrunk": shrunk}, indent=1))
    return 1 if report.failures else 0


def _shrink(report: Report, pool: Pool, args: argparse.Namespace) -> Any:
    """Shrink some failures: one of every kind first."""
    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for failure in report.failures:
        if failure["source"]:
            by_kind.setdefault((failure["emitter"], kind_of(failure["problem"])), []).append(failure)
    first = [fs[0] for fs in by_kind.values()]
    chosen = (first + [f for fs in by_kind.values() for f in fs[1:]])[: args.shrink]
    tasks = (
        (shrink_seed, f["seed"], f["emitter"], f["problem"], str(args.failures), args.shrink_seconds) for f in chosen
    )
    for task, record, why in pool.run(tasks):
        if record is None:
            print(f"shrinking seed {task[1]}: {why}")
            continue
        print(f"SHRUNK to {record['shrunk']}: {record['emitter']}: {record['problem']}\n{record['source']}", flush=True)
        yield record


if __name__ == "__main__":
    sys.exit(main())
