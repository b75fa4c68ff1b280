"""Attention on one GPU, side by side: pallasfuse, `jax.jit` of the same function, and what users call today.

    python benchmarks/attention.py 2048 8192 --targets triton --json attention.json

Times are sums of kernel times (CUPTI), medians of eight calls. An implementation that fails keeps its row, with the
reason. `x jit` and `x peer` say how many times as fast a row is as `jax.jit` of the same function, and as the fastest
peer, in the same run. Peers take a bias only as an array: the ALiBi bias is made inside the timed call.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
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
from benchmarks.cases import ATTENTION, AttentionCase

CALLS = 8
SOFT_CAP = 50.0
JIT = "jax.jit"

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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

    @property
    def is_peer(self) -> bool:
        return self.implementation != JIT and not self.implementation.startswith("pallasfuse")


def alibi_bias(case: AttentionCase, length: int, dtype: Any) -> jax.Array:
    """[1, heads, query, key]."""
    slopes = 2.0 ** (-8.0 * jnp.arange(1, case.query_heads + 1) / case.query_heads)
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    return (slopes[:, None, None] * distance).astype(dtype)[None]


def cudnn(case: AttentionCase) -> Attention:
    def call(q, k, v):
        bias = alibi_bias(case, q.shape[1], q.dtype) if case.name == "alibi" else None
        window = None if case.window is None else (case.window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, bias=bias, is_causal=case.name != "global", local_window_size=window, implementation="cudnn"
        )

    return call


def tokamax_attention(case: AttentionCase, implementation: str) -> Attention:
    # tokamax imports xprof for its own profiling only: a stub lets it import where xprof is not installed.
    if "xprof" not in sys.modules:
        tools = types.ModuleType("xprof.cli.tools")
        tools.get_kernel_stats_tool = None
        stubs = {"xprof": types.ModuleType("xprof"), "xprof.cli": types.ModuleType("xprof.cli"), tools.__name__: tools}
        sys.modules.update(stubs)
    import tokamax

    def call(q, k, v):
        return tokamax.dot_product_attention(
            q,
            k,
            v,
            bias=alibi_bias(case, q.shape[1], q.dtype) if case.name == "alibi" else None,
            is_causal=case.name != "global",
            local_window_size=None if case.window is None else (case.window - 1, 0),
            logits_soft_cap=SOFT_CAP if case.name == "softcap" else None,
            implementation=implementation,
        )

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
    if case.name != "softcap":
        yield ("cuDNN, bias array" if case.name == "alibi" else "cuDNN"), lambda: cudnn(case)
    for implementation in ("mosaic", "triton"):
        yield f"tokamax {implementation}", lambda implementation=implementation: tokamax_attention(case, implementation)
    if case.name in ("global", "causal", "gqa"):
        yield "jax Pallas Mosaic kernel", lambda: jax_mosaic_kernel(case)
    if case.name in ("global", "causal"):
        yield "jax Pallas Triton kernel", lambda: jax_triton_kernel(case)


def implementations(case: AttentionCase, targets: list[str], *, with_peers: bool) -> Iterator[tuple[str, Any]]:
    """Name and maker of everything to run; jax.jit first, because the others are compared with its result."""
    yield JIT, lambda: lambda q, k, v: case.plain(q, k, v, *case.static)
    for target in targets:

        def fused(target=target):
            function = pf.fuse(case.plain, target=target, static_argnums=case.static_argnums)
            return lambda q, k, v: function(q, k, v, *case.static)

        yield f"pallasfuse {target}", fused
    if with_peers:
        yield from peers(case)


def gpu_ms(function: Attention, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, float]:
    """Result, and the median over calls of the sum of kernel times."""
    from jax.experimental.mosaic.gpu import profiler

    compiled = jax.jit(function)
    result, _ = profiler.measure(compiled)(*arrays)
    _, times_ms = profiler.measure(compiled, iterations=CALLS)(*arrays)
    return result, statistics.median(times_ms)


def wall_ms(function: Attention, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, float]:
    """Result, and the median wall time of a call: for CPU."""
    compiled = jax.jit(function)
    result = jax.block_until_ready(compiled(*arrays))
    times_ms = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times_ms.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times_ms)


def why_not(name: str, case: AttentionCase, length: int, memory_bytes: float) -> str:
    """Why an implementation is not worth starting, or nothing."""
    scores_bytes = 4.0 * case.query_heads * length * length
    if name == JIT and 1.5 * scores_bytes > memory_bytes:
        return f"not run: its float32 scores alone need {scores_bytes / 1e9:.0f} GB"
    return ""


def measure_case(
    case: AttentionCase,
    length: int,
    *,
    dtype: Any,
    makers: list[tuple[str, Any]],
    timer: Callable[..., tuple[jax.Array, float]],
    memory_bytes: float,
    deadline_s: float,
) -> Iterator[Row]:
    arrays = jax.block_until_ready(case.arrays(length, dtype))
    reference = None
    for name, make in makers:
        row = Row(case.name, length, name, reason=why_not(name, case, length, memory_bytes))
        if not row.reason and time.monotonic() > deadline_s:
            row = dataclasses.replace(row, reason="not run: the budget is spent")
        if not row.reason:
            try:
                result, ms = timer(make(), arrays)
                result = np.asarray(result, np.float32)
                error = None if reference is None else float(np.abs(result - reference).max())
                if name == JIT:
                    reference, error = result, 0.0
                row = dataclasses.replace(row, ms=ms, tflops=case.flops(length) / ms / 1e9, error=error)
            except Exception as failure:  # a peer may fail in any way; the row says how
                message = " ".join(str(failure).split())[:100]
                row = dataclasses.replace(row, reason=f"failed: {type(failure).__name__}: {message}")
        yield row


def table(rows: list[Row]) -> str:
    """All rows, those of one operator and length together, fastest first."""
    titles = f"{'ms':>10}{'TFLOP/s':>9}{'x jit':>8}{'x peer':>8}{'error':>10}"
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
            lines.append(f"{head}{row.ms:10.4f}{row.tflops:9.1f}{x_jit}{x_peer}{error}")
    return "\n".join(lines)


def write_json(path: Path, rows: list[Row], device: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "jax": jax.__version__, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", type=int, nargs="*", default=[2048, 8192], help="query and key length")
    parser.add_argument("--operators", nargs="+", default=[case.name for case in ATTENTION])
    parser.add_argument("--targets", nargs="*", help="pallasfuse targets (default: triton; with --cpu: xla)")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the rows (default: attention.json in $OUT, if set)")
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
    targets = options.targets if options.targets is not None else ["triton" if on_gpu else "xla"]
    path = options.json or (Path(os.environ["OUT"]) / "attention.json" if os.environ.get("OUT") else None)
    memory_bytes = (device.memory_stats() or {}).get("bytes_limit", float("inf")) if on_gpu else 4e9

    started_s = time.monotonic()
    rows: list[Row] = []
    for length in options.lengths:
        for case in ATTENTION:
            if case.name not in options.operators:
                continue
            for row in measure_case(
                case,
                length,
                dtype=jnp.float16 if on_gpu else jnp.float32,
                makers=list(implementations(case, targets, with_peers=on_gpu and not options.no_peers)),
                timer=gpu_ms if on_gpu else wall_ms,
                memory_bytes=memory_bytes,
                deadline_s=started_s + options.budget_s,
            ):
                rows.append(row)
                shown = f"{row.ms:.4f} ms" if row.ms is not None else row.reason
                print(f"{row.operator} {row.length} {row.implementation}: {shown}", file=sys.stderr, flush=True)
                if path:
                    write_json(path, rows, device.device_kind)
    print(f"{device.device_kind}, jax {jax.__version__}, batch 1, {'float16' if on_gpu else 'float32'}")
    print(table(rows))


if __name__ == "__main__":
    main()
