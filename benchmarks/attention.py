"""Attention on one GPU, side by side: pallasfuse, `jax.jit` of the same function, and what users call today.

    python benchmarks/attention.py 2048 8192 --targets mosaic_gpu triton --jobs 6 --json attention.json

Times are sums of kernel times (CUPTI), medians of 12 calls: four rounds in which all implementations take turns in random
order, since a device that has just worked is slower. PyTorch's are measured apart: a process of their own, CUDA graphs. An
implementation that fails keeps its row, with the reason.
`x jit` and `x peer` say how many times as fast a row is as `jax.jit` of the same function, and as the fastest
peer, in the same run; `roof` is the share of what the device could do at best. Peers take a bias only as an array: the
ALiBi bias is made inside the timed call. Kernels are checked, as users get them. With --jobs, operators compile at the same
time, each in a process of its own, and are measured one after the other when all are compiled. `benchmarks/plot.py` draws the JSON
file.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np

import pallasfuse as pf
from benchmarks.cases import ATTENTION, DECODING, MORE_ATTENTION, MORE_DECODING, AttentionCase

CASES = (*ATTENTION, *DECODING, *MORE_DECODING, *MORE_ATTENTION)
ROUNDS, CALLS = 4, 3
MATMUL_FLOP_S, BYTES_S = 800e12, 3.0e12
"""The rates that an H100 was measured to reach: a large half-precision matrix product, a large copy."""
SOFT_CAP = 50.0
JIT = "jax.jit"

Attention = Callable[..., jax.Array]


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation at one size: measured (`ms`), or not (`reason`)."""

    operator: str
    length: int
    implementation: str
    ms: float | None = None
    tflops: float | None = None
    error: float | None = None
    """Largest difference from jax.jit of the same function."""
    reason: str = ""
    roof: float | None = None
    """The time that the device's measured ceilings allow, over `ms`."""

    @property
    def is_peer(self) -> bool:
        return self.implementation != JIT and not self.implementation.startswith("pallasfuse")


def alibi_bias(case: AttentionCase, length: int, dtype: Any) -> jax.Array:
    """[1, heads, query, key]."""
    slopes = 2.0 ** (-8.0 * jnp.arange(1, case.query_heads + 1) / case.query_heads)
    queries, keys = case.lengths(length)
    distance = jnp.arange(keys)[None, :] - jnp.arange(keys - queries, keys)[:, None]
    return (slopes[:, None, None] * distance).astype(dtype)[None]


def variant(case: AttentionCase) -> str:
    """Returns the name of a case without the number of queries."""
    return case.name.split("-", maxsplit=1)[0]


def bias_of(case: AttentionCase, q: jax.Array, k: jax.Array, more: tuple[jax.Array, ...]) -> jax.Array | None:
    """Returns the bias of a case as an array, which is all that peers take; None without a bias."""
    if case.name == "pair":
        return more[0][None]
    return alibi_bias(case, k.shape[1], q.dtype) if variant(case) == "alibi" else None


def gated(case: AttentionCase, out: jax.Array, more: tuple[jax.Array, ...]) -> jax.Array:
    return (out * jax.nn.sigmoid(more[1])).astype(out.dtype) if case.name == "pair" else out


def is_causal(case: AttentionCase) -> bool:
    """Few queries see nearly all keys: the peers are spared the mask."""
    return case.queries is None and variant(case) not in ("global", "pair")


def cudnn(case: AttentionCase) -> Attention:
    def call(q, k, v, *more):
        window = None if case.window is None else (case.window - 1, 0)
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=bias_of(case, q, k, more),
            is_causal=is_causal(case),
            local_window_size=window,
            implementation="cudnn",
        )
        return gated(case, out, more)

    return call


def tokamax_attention(case: AttentionCase, implementation: str) -> Attention:
    # tokamax imports xprof for its own profiling only: a stub lets it import where xprof is not installed.
    if "xprof" not in sys.modules:
        tools = types.ModuleType("xprof.cli.tools")
        tools.get_kernel_stats_tool = None
        stubs = {"xprof": types.ModuleType("xprof"), "xprof.cli": types.ModuleType("xprof.cli"), tools.__name__: tools}
        sys.modules.update(stubs)
    import tokamax

    def call(q, k, v, *more):
        out = tokamax.dot_product_attention(
            q,
            k,
            v,
            bias=bias_of(case, q, k, more),
            is_causal=is_causal(case),
            local_window_size=None if case.window is None else (case.window - 1, 0),
            logits_soft_cap=SOFT_CAP if variant(case) == "softcap" else None,
            implementation=implementation,
        )
        return gated(case, out, more)

    return call


def jax_mosaic_kernel(case: AttentionCase) -> Attention:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=case.name != "global")
    return lambda q, k, v: attention_mgpu.attention(q / case.head_dim**0.5, k, v, config)


def jax_triton_kernel(case: AttentionCase) -> Attention:
    from jax.experimental.pallas.ops.gpu import attention

    return lambda q, k, v: attention.mha(
        q,
        k,
        v,
        None,
        sm_scale=case.head_dim**-0.5,
        causal=case.name != "global",
        block_sizes=attention.BlockSizes(block_q=64, block_k=64),
        num_warps=4,
        num_stages=3,
    )


def peers(case: AttentionCase) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Name and maker of each peer that offers the operator. A maker raises where its library is missing."""
    if variant(case) != "softcap":
        yield ("cuDNN, bias array" if variant(case) in ("alibi", "pair") else "cuDNN"), lambda: cudnn(case)
    for implementation in ("mosaic", "triton"):
        yield f"tokamax {implementation}", lambda implementation=implementation: tokamax_attention(case, implementation)
    if case.name in ("global", "causal", "gqa", "head256"):
        yield "jax Pallas Mosaic kernel", lambda: jax_mosaic_kernel(case)
    if case.name in ("global", "causal", "head256"):
        yield "jax Pallas Triton kernel", lambda: jax_triton_kernel(case)


def implementations(case: AttentionCase, targets: list[str], *, with_peers: bool) -> Iterator[tuple[str, Any]]:
    """Name and maker of everything to run; jax.jit first, because the others are compared with its result."""
    yield JIT, lambda: lambda *arrays: case.plain(*arrays, *case.static)
    for target in targets:

        def fused(target=target):
            options = pf.FuseOptions(check=True)  # as without a target
            function = pf.fuse(case.plain, target=target, options=options, static_argnums=case.static_argnums)
            return lambda *arrays: function(*arrays, *case.static)

        yield f"pallasfuse {target}", fused
    if with_peers:
        yield from peers(case)


def gpu_ms(compiled: Attention, arrays: tuple[jax.Array, ...]) -> list[float]:
    """Returns the sum of its kernels' times for each of some calls, in milliseconds."""
    from jax.experimental.mosaic.gpu import profiler

    return list(profiler.measure(compiled, iterations=CALLS)(*arrays)[1])


def wall_ms(compiled: Attention, arrays: tuple[jax.Array, ...]) -> list[float]:
    """Returns the wall time of each of some calls, in milliseconds: for CPU."""
    times_ms = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times_ms.append(1e3 * (time.perf_counter() - start))
    return times_ms


def inputs(case: AttentionCase, length: int, dtype: Any) -> tuple[jax.Array, ...]:
    queries, keys = case.lengths(length)
    return case.arrays(queries, dtype, key_length=keys, batch=case.batch)


def flops(case: AttentionCase, length: int) -> float:
    queries, keys = case.lengths(length)
    return case.flops(queries, key_length=keys, batch=case.batch)


def roofline_ms(case: AttentionCase, length: int, itemsize: int = 2) -> float:
    """The larger of arithmetic and traffic, each input read once and the output written once."""
    (queries, keys), value_dim = case.lengths(length), case.value_dim or case.head_dim
    elements = (case.head_dim + value_dim) * (queries * case.query_heads + keys * case.key_heads)
    elements += case.query_heads * queries * (keys + value_dim) if case.more is not None else 0
    return 1e3 * max(flops(case, length) / MATMUL_FLOP_S, case.batch * elements * itemsize / BYTES_S)


def why_not(name: str, case: AttentionCase, length: int, memory_bytes: float) -> str:
    """Returns why an implementation is not worth starting, or nothing."""
    scores_bytes = 4.0 * case.batch * case.query_heads * math.prod(case.lengths(length))
    if name == JIT and 1.5 * scores_bytes > memory_bytes:
        return f"not run: its float32 scores alone need {scores_bytes / 1e9:.0f} GB"
    return ""


@dataclass(frozen=True, slots=True)
class Job:
    """One row to measure: compiled, or with the reason why not."""

    case: AttentionCase
    row: Row
    compiled: Any = None


def compile_jobs(
    cases: list[AttentionCase], lengths: list[int], *, dtype: Any, makers: Any, memory_bytes: float, deadline_s: float
) -> list[Job]:
    jobs = []
    for length in lengths:
        for case in cases:
            if length > case.longest:
                continue
            shapes = jax.eval_shape(lambda c=case, n=length: inputs(c, n, dtype))
            for name, make in makers(case):
                row = Row(case.name, length, name, reason=why_not(name, case, length, memory_bytes))
                compiled = None
                if not row.reason and time.monotonic() > deadline_s:
                    row = dataclasses.replace(row, reason="not run: the budget is spent")
                if not row.reason:
                    try:
                        compiled = jax.jit(make()).lower(*shapes).compile()
                    except Exception as failure:  # a peer may fail in any way; the row says how
                        row = dataclasses.replace(row, reason=reason_of(failure))
                jobs.append(Job(case, row, compiled))
    return jobs


def reason_of(failure: Exception) -> str:
    return f"failed: {type(failure).__name__}: {' '.join(str(failure).split())[:100]}"


def measure(jobs: list[Job], *, dtype: Any, timer: Callable[..., list[float]], deadline_s: float) -> Iterator[Row]:
    """The implementations of an operator and a length take turns, so that none has a cooler device than the others."""
    for (_, length), together in itertools.groupby(jobs, key=lambda job: (job.case.name, job.row.length)):
        group = list(together)
        case = group[0].case
        arrays = jax.block_until_ready(inputs(case, length, dtype))
        rows, times, reference = [job.row for job in group], [[] for _ in group], None
        order = list(enumerate(group))
        for turn in range(ROUNDS + 1):
            if turn:
                random.shuffle(order)
            for n, job in order:
                if not rows[n].reason and time.monotonic() > deadline_s and not times[n]:
                    rows[n] = dataclasses.replace(rows[n], reason="not run: the budget is spent")
                if rows[n].reason:
                    continue
                try:
                    if turn:
                        times[n] += timer(job.compiled, arrays)
                        continue
                    result = np.asarray(job.compiled(*arrays), np.float32)  # also warms it up
                    reference = result if job.row.implementation == JIT else reference
                    error = None if reference is None else float(np.abs(result - reference).max())
                    rows[n] = dataclasses.replace(rows[n], error=error)
                except Exception as failure:
                    rows[n] = dataclasses.replace(rows[n], reason=reason_of(failure))
        for unmeasured, measured in zip(rows, times, strict=True):
            row = unmeasured
            if not row.reason:
                ms = statistics.median(measured)
                row = dataclasses.replace(
                    row, ms=ms, tflops=flops(case, length) / ms / 1e9, roof=roofline_ms(case, length) / ms
                )
            shown = f"{row.ms:.4f} ms" if row.ms is not None else row.reason
            print(f"{row.operator} {row.length} {row.implementation}: {shown}", file=sys.stderr, flush=True)
            yield row


@contextlib.contextmanager
def turn(folder: Path | None, name: str, everyone: int) -> Iterator[None]:
    """Waits until everyone has compiled, and holds the device alone."""
    if folder is None:
        yield
        return
    (folder / f"{name}.ready").touch()
    while len(list(folder.glob("*.ready"))) < everyone:
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_processes(options: argparse.Namespace) -> list[Row]:
    """One process for each operator; rows in the order of one process."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        # each process takes what memory it needs, and gives it back
        environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        children: list[tuple[str, Any]] = []
        with_torch = options.operators if options.torch == [] else options.torch or []
        everyone = str(len(options.operators) + len(with_torch))
        for operator in with_torch:
            name = f"torch-{operator}"
            script = str(Path(__file__).with_name("attention_torch.py"))
            command = [sys.executable, script, *map(str, options.lengths), "--operator", operator,
                       "--json", f"{folder}/{name}.json", "--turns", folder, everyone]  # fmt: skip
            command += ["--dtype", options.dtype] if options.dtype else []
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            children.append((name, subprocess.Popen(command, env=environment | {"PYTHONPATH": path})))
        for operator in options.operators:
            command = [sys.executable, __file__, *map(str, options.lengths), "--operators", operator,
                       "--json", f"{folder}/{operator}.json", "--budget-s", str(options.budget_s),
                       "--turns", folder, everyone]  # fmt: skip
            command += ["--no-peers"] if options.no_peers else []
            command += ["--dtype", options.dtype] if options.dtype else []
            command += ["--targets", *options.targets] if options.targets is not None else []
            children.append((operator, subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)))
        while any(child.poll() is None for _, child in children):
            for name, child in children:  # nobody waits for one that failed
                if child.poll():
                    (Path(folder) / f"{name}.ready").touch()
            time.sleep(0.5)
        for file in (Path(folder) / f"{name}.json" for name, _ in children):
            if file.exists():
                rows += [Row(**r) for r in json.loads(file.read_text())["rows"]]
    order = {name: n for n, name in enumerate(options.operators)}
    return sorted(rows, key=lambda row: (options.lengths.index(row.length), order[row.operator]))


def table(rows: list[Row]) -> str:
    """All rows, those of one operator and length together, fastest first."""
    titles = f"{'ms':>10}{'TFLOP/s':>9}{'roof':>6}{'x jit':>8}{'x peer':>8}{'error':>10}"
    lines = [f"{'operator':10}{'length':>7}  {'implementation':26}{titles}"]
    for key in dict.fromkeys((row.operator, row.length) for row in rows):
        group = [row for row in rows if (row.operator, row.length) == key]
        jit_ms = next((row.ms for row in group if row.implementation == JIT), None)
        peer_ms = min((row.ms for row in group if row.is_peer and row.ms is not None), default=None)
        lines.append("")
        for row in sorted(group, key=lambda row: row.ms if row.ms is not None else float("inf")):
            head = f"{row.operator:10}{row.length:7}  {row.implementation:26}"
            if row.ms is None:
                lines.append(f"{head}  {row.reason}")
                continue
            x_jit = f"{jit_ms / row.ms:8.2f}" if jit_ms is not None else f"{'-':>8}"
            x_peer = f"{peer_ms / row.ms:8.2f}" if peer_ms is not None else f"{'-':>8}"
            error = f"{row.error:10.1e}" if row.error is not None else f"{'-':>10}"
            lines.append(f"{head}{row.ms:10.4f}{row.tflops:9.1f}{row.roof or 0:6.0%}{x_jit}{x_peer}{error}")
    return "\n".join(lines)


def write_json(path: Path, rows: list[Row], device: str, dtype: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "device": device,
        "jax": jax.__version__,
        "dtype": dtype,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", type=int, nargs="*", default=[2048, 8192], help="query and key length")
    parser.add_argument("--operators", nargs="+", default=[case.name for case in CASES])
    parser.add_argument(
        "--targets", nargs="*", help="pallasfuse targets (default: mosaic_gpu, triton; with --cpu: xla)"
    )
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help="on a GPU (default: float16)")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the rows (default: attention.json in $OUT, if set)")
    parser.add_argument("--jobs", type=int, default=1, help="more than 1: a process for every operator")
    parser.add_argument(
        "--torch", nargs="*", metavar="OPERATOR", help="with --jobs: PyTorch's attention too (default: all)"
    )
    parser.add_argument("--turns", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no measurement after this time")
    parser.add_argument(
        "--cpu", action="store_true", help="without a GPU: wall times of jax.jit and pallasfuse, float32"
    )
    options = parser.parse_args()

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        device = jax.devices("cpu")[0]
    on_gpu = device.platform == "gpu"
    if not on_gpu and not options.cpu:
        print("No GPU here: nothing to measure. (--cpu measures jax.jit and pallasfuse on the CPU.)")
        return
    path = options.json or (Path(os.environ["OUT"]) / "attention.json" if os.environ.get("OUT") else None)
    if options.jobs > 1 and on_gpu:
        rows = in_processes(options)
    else:
        targets = options.targets if options.targets is not None else ["mosaic_gpu", "triton"] if on_gpu else ["xla"]
        dtype = jnp.dtype(options.dtype or ("float16" if on_gpu else "float32"))
        limit = (device.memory_stats() or {}).get("bytes_limit", 80e9) if on_gpu else 4e9
        deadline_s = time.monotonic() + options.budget_s
        jobs = compile_jobs(
            [c for c in CASES if c.name in options.operators], options.lengths, dtype=dtype, memory_bytes=limit,
            deadline_s=deadline_s,
            makers=lambda case: implementations(case, targets, with_peers=on_gpu and not options.no_peers),
        )  # fmt: skip
        folder, everyone = (Path(options.turns[0]), int(options.turns[1])) if options.turns else (None, 1)
        with turn(folder, options.operators[0], everyone):
            random.seed(0)
            rows = list(measure(jobs, dtype=dtype, timer=gpu_ms if on_gpu else wall_ms, deadline_s=deadline_s))
    if path:
        write_json(path, rows, device.device_kind, options.dtype or ("float16" if on_gpu else "float32"))
    print(f"{device.device_kind}, jax {jax.__version__}, {options.dtype or ('float16' if on_gpu else 'float32')}")
    print(table(rows))


if __name__ == "__main__":
    main()
