"""A whole model on one screen, one stage of a plan, and a plan as a page."""

from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.options import FuseOptions
from pallasfuse.overview import LINES, overview
from tests.test_repetition import arguments, model

ROWS = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
LAYERS = 24


@pytest.fixture(scope="module")
def plan():
    return pf.fuse(model, options=FuseOptions(target="xla", price=True)).explain(*arguments(LAYERS, length=2048))


def softmax(x):
    return jax.nn.softmax(x * 2.0, -1)


def small():
    return pf.fuse(softmax, options=FuseOptions(target="xla", price=False)).explain(ROWS)


def test_a_model_is_one_screen(plan):
    lines = plan.summary.splitlines()
    assert len(lines) <= LINES == 40
    assert all(len(line) <= 160 for line in lines)
    assert lines[0].startswith(f"{len(plan.kernels)} kernels for xla")
    assert len(plan.kernels) > LINES


def test_kernels_are_listed_by_their_line(plan):
    (line,) = (text for text in plan.summary.splitlines() if f"{LAYERS} x " in text and "rolling_update" in text)
    kernels = [k for k in plan.kernels if k.strategy == "rolling_update"]
    assert str(kernels[0].group.source).split(":")[0].endswith(line.split(f"{LAYERS} x ")[1].split(":")[0])
    us = sum(k.price.us for k in kernels)
    assert f": {us / 1e3:.3g} ms, XLA's " in line


def test_the_share_that_is_fused_is_that_of_the_prices(plan):
    """Nothing is fused of a plan without kernels, and nothing else in the program counts."""
    share = int(plan.summary.splitlines()[1].removeprefix("fused: ").partition("%")[0])
    assert 0 < share < 100
    none = pf.fuse(jnp.sin, options=FuseOptions(target="xla")).explain(ROWS)
    assert overview(none).splitlines()[1].startswith("fused: 0% ")
    assert "kernels: none" in overview(none)


def test_what_is_left_has_a_reason_and_what_to_change():
    def function(x):
        for _ in range(30):
            x = jax.nn.softmax(lax.cummax(x, axis=x.ndim - 1), -1) + 1.0
        return x

    text = pf.fuse(function, options=FuseOptions(target="xla", price=True)).explain(ROWS).summary
    lines = text.splitlines()
    assert len(lines) <= LINES
    (at,) = (n for n, line in enumerate(lines) if line.startswith("  30 x ") and "why: cummax" in lines[n + 1])
    assert lines[at + 2].startswith("    to change it: ")
    shares = [int(line.split(": ")[1].partition("%")[0]) for line in lines if line.startswith("  ") and "%" in line]
    assert shares == sorted(shares, reverse=True) and len(shares) <= 3  # the worst is first


def test_a_small_plan_says_everything():
    text = small().summary
    assert "repair" in text and "left to XLA" in text
    assert "more: plan.kernels" not in text


def test_stages_are_shown_one_by_one():
    plan = small()
    (name,) = (k.name for k in plan.kernels)
    assert "\n".join(
        filter(
            None, (plan.show(s) for s in ("program", "rewritten", "kernels", "checked", "bodies", "left", "conditions"))
        )
    ) == str(plan)
    assert plan.show("kernels", name) == plan.show("kernels")
    with pytest.raises(ValueError, match="no stage 'nothing': choose one of program, rewritten, kernels"):
        plan.show("nothing")
    with pytest.raises(ValueError, match="no kernel 'nothing'"):
        plan.show("kernels", "nothing")


class Tags(HTMLParser):
    """The text of a page, and whether its tags match."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open += [] if tag == "meta" else [tag]
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_plan_is_a_page(tmp_path):
    plan = small()
    path = tmp_path / "plan.html"
    text = plan.html(path)
    assert path.read_text() == text and len(text) < 100_000
    tags = Tags()
    tags.feed(text)
    (kernel,) = plan.kernels
    shown = "".join(tags.text)
    assert not tags.open and not tags.links
    assert str(kernel.phases[0].program) in shown and str(kernel.group) in shown
    assert any(f"M(r, r') = {fold.matrix}" in shown for fold in kernel.group.folds if fold.frames)
    assert plan.html(kernel=kernel.name) == text
    with pytest.raises(ValueError, match="no kernel 'nothing'"):
        plan.html(kernel="nothing")
    assert "<h1>" in pf.fuse(jnp.sin).explain(ROWS).html()
