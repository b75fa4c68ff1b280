"""FlexAttention and scaled_dot_product_attention of PyTorch, as peers of `benchmarks/attention.py`, which starts this with --torch.

Times are medians of replayed CUDA graphs. Score functions are compiled by torch.compile.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from attention import CASES, SOFT_CAP, Row, flops, is_causal, reason_of, roofline_ms, turn, variant
from torch.nn.attention import flex_attention as flex

from benchmarks.cases import AttentionCase

torch._dynamo.config.recompile_limit = 64  # one for every operator and length; else it runs eagerly, in silence
compiled_flex = torch.compile(flex.flex_attention, dynamic=False)


def score_function(case: AttentionCase, length: int) -> Callable[..., Any] | None:
    heads, (queries, keys) = case.query_heads, case.lengths(length)

    def alibi(score, batch, head, query, key):
        return score + torch.exp2(-8.0 * (head + 1) / heads) * (key - (query + keys - queries))

    def soft_cap(score, batch, head, query, key):
        return SOFT_CAP * torch.tanh(score / SOFT_CAP)

    return {"alibi": alibi, "softcap": soft_cap}.get(variant(case))


def visible(case: AttentionCase) -> Callable[..., Any] | None:
    if not is_causal(case):
        return None
    if case.window is None:
        return lambda batch, head, query, key: query >= key
    return lambda batch, head, query, key: (query >= key) & (query - key < case.window)


def implementations(case: AttentionCase, length: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    grouped = case.query_heads != case.key_heads

    def flex_call(q, k, v):
        seen = visible(case)
        mask = None if seen is None else flex.create_block_mask(seen, None, None, length, length, device="cuda")
        return lambda: compiled_flex(
            q, k, v, score_mod=score_function(case, length), block_mask=mask, enable_gqa=grouped
        )

    yield "torch FlexAttention", flex_call
    if variant(case) in ("global", "causal", "gqa", "head256"):
        yield "torch SDPA", lambda q, k, v: lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal(case), enable_gqa=grouped)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument("--operator", required=True)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--turns", nargs=2, required=True)
    options = parser.parse_args()
    jobs = []
    for length in options.lengths:
        for case in (c for c in CASES if c.name == options.operator and c.more is None):
            for name, make in implementations(case, length):
                row, call = Row(case.name, length, name), None
                try:
                    queries, keys = case.lengths(length)
                    shapes = [(case.query_heads, queries, case.head_dim), (case.key_heads, keys, case.head_dim),
                              (case.key_heads, keys, case.value_dim or case.head_dim)]  # fmt: skip
                    call = make(
                        *(
                            torch.randn(case.batch, h, n, d, device="cuda", dtype=getattr(torch, options.dtype))
                            for h, n, d in shapes
                        )
                    )
                    call()
                except Exception as failure:
                    row = dataclasses.replace(row, reason=reason_of(failure))
                jobs.append((case, row, call))
    rows = []
    with turn(Path(options.turns[0]), f"torch-{options.operator}", int(options.turns[1])):
        for case, row, call in jobs:
            if call is not None and not row.reason:
                ms = triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median")  # no time of launches
                rate, roof = flops(case, row.length) / ms / 1e9, roofline_ms(case, row.length) / ms
                rows.append(dataclasses.replace(row, ms=ms, tflops=rate, roof=roof))
            else:
                rows.append(row)
    options.json.write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
