"""A plan as a page of HTML that needs no other file: what is fused, and how one kernel was derived, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from pallasfuse.explain import show, summarize

if TYPE_CHECKING:
    from pallasfuse.plan import Kernel, Plan

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { font: 13px/1.45 ui-monospace, monospace; background: #f6f6f4; padding: .8rem; overflow-x: auto; border-radius: 4px; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; }
.bar { display: inline-block; height: .7rem; background: #4a7ebb; } summary { cursor: pointer; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } pre { background: #262626; } }
"""


def page(plan: Plan, kernel: str | None = None) -> str:
    """The page; kernel: as of `Plan.html`.

    Raises:
      ValueError: there is no such kernel.
    """
    body = [f"<h1>Plan for {escape(plan.target.name)}</h1>", _pre(summarize(plan))]
    chosen = _chosen(plan, kernel)
    if chosen is not None:
        body += [
            "<h2>Kernels</h2>",
            *_table(plan),
            f"<h2>How {escape(chosen.name)} was derived</h2>",
            *_derivation(plan, chosen),
        ]
    body += ["<h2>Everything</h2>", *(_folded(stage, show(plan, stage)) for stage in ("left", "conditions"))]
    head = f'<meta charset="utf-8"><title>pallasfuse: {escape(plan.target.name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _chosen(plan: Plan, name: str | None) -> Kernel | None:
    if name is None:
        return max(plan.kernels, key=lambda k: k.price.us, default=None)
    found = next((k for k in plan.kernels if k.name == name), None)
    if found is None:
        raise ValueError(f"no kernel {name!r}: choose one of {', '.join(k.name for k in plan.kernels)}")
    return found


def _table(plan: Plan) -> Iterator[str]:
    longest = max(max(k.price.us, k.replaced.us) for k in plan.kernels) or 1.0
    yield "<table><tr><th>kernel</th><th>from</th><th>predicted</th><th>XLA's</th><th></th></tr>"
    for k in plan.kernels:
        cells = (k.name, str(k.group.source), f"{k.price.us:.3g} us", f"{k.replaced.us:.3g} us")
        bar = f'<span class="bar" style="width:{12 * k.price.us / longest:.2f}rem"></span>'
        yield f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells)}<td>{bar}</td></tr>"
    yield "</table>"


def _derivation(plan: Plan, kernel: Kernel) -> Iterator[str]:
    group = kernel.group
    yield f"<p>From {escape(str(group.source))}. Its reductions run over <code>{escape(str(group.rolled))}</code>:</p>"
    yield _pre("\n".join(str(f.nest.name) + " = " + f"{f.nest.reducer} of {f.nest.body}" for f in group.folds))
    for fold in group.folds:
        if fold.frames:
            at = ", ".join(f"{f.name} = {f.value}" for f in fold.frames)
            yield f"<p><b>{escape(fold.name)}</b> depends on values that are not finished while it runs: {escape(at)}. When they " \
                  "change, what was summed so far is moved by the repair</p>"  # fmt: skip
            yield _pre(f"M(r, r') = {fold.matrix}")
        for refusal in fold.refusals:
            yield f"<p><b>{escape(fold.name)}</b> cannot share an earlier pass: {escape(refusal)}.</p>"
    yield f"<p>So {group.passes} {'pass' if group.passes == 1 else 'passes'} over it will do:</p>"
    yield _pre(str(group))
    yield f"<p>Tiles: {escape(str(kernel.schedule))}; {100 * kernel.visited_share:.0f}% of them are visited. The kernel:</p>"
    for phase in kernel.phases:
        yield _pre(str(phase.program))
    yield f"<p>Predicted: {escape(str(kernel.price))}. XLA's kernels instead: {escape(str(kernel.replaced))}.</p>"


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{_pre(text)}</details>"
