"""Processes that compile programs at the same time and measure them one by one.

The parent hands out names: first every program is compiled, by whichever process is free; then each is measured by the process
that compiled it, while the others wait. A process that dies (or takes too long) costs the program it was at: what else it had
compiled is given to the others.
"""

import collections
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(slots=True)
class Worker:
    """A process, the pipe to it, and what it holds."""

    process: Any
    pipe: Any
    doing: str | None = None
    since: float = 0.0
    holds: list[str] = field(default_factory=list)


def serve(pipe: Any, fields: Row) -> None:
    """The body of a process: answers ("compile", name) and ("measure", name) until it is told to stop.

    fields: of `program_measurement.Settings`."""
    import jax

    from benchmarks import program_measurement, program_timing, workloads

    settings = program_measurement.Settings(**fields)
    if settings.primed:
        jax.config.update("jax_compilation_cache_dir", f"{settings.folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    prepared = {}
    while True:
        order, name = pipe.recv()
        if order == "stop":
            return
        try:
            if order == "compile":
                entry = next(e for e in workloads.programs((name,)) if e.name == name)
                prepared[name] = program_measurement.prepare(entry, settings)
                pipe.send((order, name, None))
            else:
                pipe.send((order, name, program_measurement.measure(prepared.pop(name), settings)))
        except workloads.NotInstalledError as missing:
            pipe.send((order, name, {"name": name, "not_installed": str(missing)}))
        except Exception as failure:
            prepared.pop(name, None)
            pipe.send((order, name, {"name": name, "failed": program_timing.reason_of(failure)}))


def start(settings: Row) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, settings), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def rows(
    names: list[str], settings: Row, *, jobs: int, compile_s: float, total_s: float, each_s: float
) -> Iterator[Row]:
    """The row of every program, as soon as it is known: failures first, then measurements.

    compile_s: when no further program is compiled. total_s: when the rest is given up. each_s: for one step of one program."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    begin = time.monotonic()
    workers = [start(settings) for _ in range(min(jobs, len(names)))]
    waiting = collections.deque(names)
    try:
        while (waiting and time.monotonic() < begin + compile_s) or any(w.doing for w in workers):
            for worker in workers:
                if not worker.doing and waiting and time.monotonic() < begin + compile_s:
                    _order(worker, "compile", waiting.popleft())
            yield from _answers(workers, waiting, settings, each_s)
        for name in waiting:
            yield {"name": name, "failed": "not compiled: the time is spent"}
        waiting.clear()
        yield from _measured(workers, settings, each_s=each_s, until=begin + total_s)
    finally:
        for worker in workers:
            worker.process.kill()


def _measured(workers: list[Worker], settings: Row, *, each_s: float, until: float) -> Iterator[Row]:
    """One process after the other, which then gives its memory back."""
    for at in range(len(workers)):
        lost: collections.deque[str] = collections.deque()
        for name in list(workers[at].holds):
            if time.monotonic() > until:
                yield {"name": name, "failed": "not measured: the time is spent"}
            elif name in lost:
                yield {"name": name, "failed": "its process died at another program"}
            else:
                _order(workers[at], "measure", name)
                while workers[at].doing:
                    yield from _answers(workers, lost, settings, each_s)
        workers[at].process.kill()
        workers[at].process.join()


def _order(worker: Worker, order: str, name: str) -> None:
    worker.doing, worker.since = name, time.monotonic()
    with contextlib.suppress(OSError):  # of a dead process: the pipe's end is read next
        worker.pipe.send((order, name))


def _answers(workers: list[Worker], waiting: "collections.deque[str]", settings: Row, each_s: float) -> Iterator[Row]:
    """Yields the rows that the processes send within a moment; a dead process is replaced."""
    busy = {w.pipe: w for w in workers if w.doing}
    for pipe in multiprocessing.connection.wait(list(busy), timeout=0.2):
        worker = busy[pipe]
        try:
            order, name, row = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=5)
            yield from _replace(workers, worker, f"its process died ({worker.process.exitcode})", waiting, settings)
            continue
        worker.doing = None
        if order == "compile" and row is None:
            worker.holds.append(name)
        else:
            if name in worker.holds:
                worker.holds.remove(name)
            yield row
    for worker in [w for w in workers if w.doing and time.monotonic() - w.since > each_s]:
        worker.process.kill()
        yield from _replace(workers, worker, f"took longer than {each_s:.0f} s", waiting, settings)


def _replace(workers: list[Worker], worker: Worker, reason: str, waiting: Any, settings: Row) -> Iterator[Row]:
    """A new process in the place of a dead one, whose programs wait again."""
    at = workers.index(worker)
    workers[at] = start(settings)
    yield {"name": worker.doing, "failed": reason}
    waiting.extend(n for n in worker.holds if n != worker.doing)
