"""Many random programs on every emitter, in worker processes that may crash.

A worker takes a task, a function of a module with its arguments, and answers with a plain dictionary. The parent replaces a worker
that dies or that takes too long; what it worked on counts as a failure of its own.
"""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TASKS_PER_WORKER = 250
"""A worker is replaced after so many tasks, before compiled programs fill its memory."""
Record = dict[str, Any]


def judge_seed(seed: int, emitters: tuple[str, ...]) -> Record:
    """Grow the program of a seed and judge it: what came of it on each emitter, its features, and its source if it failed."""
    from tests.property.features import features
    from tests.property.growing import grow
    from tests.property.judging import Case
    from tests.property.programs import Seeded

    began = time.perf_counter()
    record: Record = {"seed": seed, "emitters": {}, "features": [], "discarded": "", "source": ""}
    try:
        program = grow(Seeded(seed))
        record["source"] = str(program)
        case = Case(program.function(), program.arguments(), program.tiles)
        record["features"] = sorted(features(getattr(case.traced, "jaxpr", case.traced)))
        record["elements"] = sum(b.value.size for b in case.truth)
        verdict = case.plain_verdict
    except Exception as error:  # not a program that JAX runs, or one that the analysis does not know
        return record | {"discarded": f"{type(error).__name__}: {error}"[:300], "seconds": time.perf_counter() - began}
    record["emitters"]["plain"] = _summary(verdict)
    for emitter in emitters:
        record["emitters"][emitter] = _summary(judged(case, emitter))
    return record | {"seconds": time.perf_counter() - began}


def judged(case: Any, emitter: str) -> Any:
    """The verdict of a case; an exception is a problem."""
    from tests.property.judging import Verdict

    try:
        return case.judge(emitter)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Verdict((f"raised {type(error).__name__} at {where}: {str(error)[:300]}",))


def _summary(verdict: Any) -> Record:
    return {"event": verdict.event, "rolls": verdict.rolls, "problems": [p[:400] for p in verdict.problems],
            "worst": verdict.worst, "unjudged": verdict.unjudged}  # fmt: skip


def kind_of(problem: str) -> str:
    """What two failures of one cause have in common."""
    return problem.split(":", maxsplit=1)[0] + problem.split(":")[1][:20] if problem.startswith("raised") else "wrong"


def shrink_seed(seed: int, emitter: str, problem: str, directory: str, seconds: float) -> Record:
    """Shrink the program of a seed that fails on an emitter, and write it to a file."""
    from tests.property.corpus import save
    from tests.property.judging import Case
    from tests.property.programs import Program
    from tests.property.shrinking import shrink

    kind = kind_of(problem)
    found = [problem]

    def fails(program: Program) -> bool:
        try:
            case = Case(program.function(), program.arguments(), program.tiles)
            plain = case.plain_verdict
        except Exception:
            return False
        problems = plain.problems if emitter == "plain" else () if plain.problems else judged(case, emitter).problems
        alike = [p for p in problems if kind_of(p) == kind]
        found[0] = alike[0] if alike else found[0]
        return bool(alike)

    program = shrink(seed, fails, seconds)
    fails(program)
    name = f"seed{seed}_{emitter.replace(' ', '_')}"
    path = save(program, f"{emitter}: {found[0]}".replace("\\", "/").replace('"', "'"), Path(directory), name)
    return {"shrunk": str(path), "source": str(program), "problem": found[0], "seed": seed, "emitter": emitter}


def _work(connection: Connection) -> None:
    import warnings

    import jax

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops, and asks for no more
    done = 0
    while True:
        try:
            function, *args = connection.recv()
        except EOFError:  # the parent is gone
            return
        connection.send(function(*args))
        done += 1
        if done % 20 == 0:
            jax.clear_caches()


@dataclass
class _Worker:
    process: Any
    connection: Connection
    task: tuple[Any, ...] | None = None
    since: float = 0.0
    done: int = 0


@dataclass
class Pool:
    """Runs tasks in `jobs` processes; `run` yields each task with its record, or with None and why there is none."""

    jobs: int
    task_seconds: float = 300.0
    workers: list[_Worker] = field(default_factory=list)

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _stop(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()

    def run(self, tasks: Iterator[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Record | None, str]]:
        exhausted = False
        while True:
            while not exhausted and len([w for w in self.workers if w.task]) < self.jobs:
                task = next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                worker = next((w for w in self.workers if w.task is None), None)
                if worker is None:
                    worker = self._start()
                    self.workers.append(worker)
                worker.task, worker.since = task, time.monotonic()
                worker.connection.send(task)
            busy = [w for w in self.workers if w.task]
            if not busy:
                return
            ready = wait([w.connection for w in busy], timeout=5.0)
            for worker in busy:
                task = worker.task
                assert task is not None
                if worker.connection in ready:
                    try:
                        record = worker.connection.recv()
                    except (EOFError, OSError):
                        self._stop(worker)
                        yield task, None, f"the worker crashed (exit code {worker.process.exitcode})"
                        continue
                    worker.task, worker.done = None, worker.done + 1
                    if worker.done >= TASKS_PER_WORKER:
                        self._stop(worker)
                    yield task, record, ""
                elif time.monotonic() - worker.since > self.task_seconds:
                    self._stop(worker)
                    yield task, None, f"took longer than {self.task_seconds:.0f} s"

    def close(self) -> None:
        for worker in list(self.workers):
            self._stop(worker)
