"""Random expressions over the finite fields: equal forms agree, different functions differ where float64 tells them apart."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import Apply, Const, Expr, Read, add, const, div, mul, postorder, sub, substitute
from tests.verification.values import ONE, TWO, X, Y, Z, differ, evaluated, finite_fields, inputs, op

pytestmark = pytest.mark.any_jax

NAMES = ("x", "y", "z")
LEAVES = st.sampled_from([X, Y, Z, ONE, TWO, const(0.25, "float32"), const(-3.0, "float32")])


def trees(depth: int):
    if depth == 0:
        return LEAVES
    below = trees(depth - 1)
    return st.one_of(
        LEAVES,
        st.builds(op, st.sampled_from(["add", "sub", "mul", "div"]), below, below),
        st.builds(op, st.sampled_from(["neg", "square", "exp", "exp2", "sqrt", "sin", "expm1"]), below),
    )


NO_ANGLE = ("exp", "exp2", "expm1", "sqrt", "rsqrt", "sin", "cos")


def has_an_angle(root: Expr) -> bool:
    """Exponentials and roots have none: a sine of them is an uninterpreted function."""
    return not any(isinstance(n, Apply) and n.op in NO_ANGLE for n in postorder(root))


def rewritten(node: Expr, choose) -> Expr:
    """An algebraically equal form: at every node one of a few laws, as `choose(n)` says."""
    args = [rewritten(a, choose) for a in node.args]
    if not isinstance(node, Apply):
        form = choose(4)
        return mul(node, ONE) if form == 1 else sub(add(node, Y), Y) if form == 2 else node
    a, b = (*args, None)[:2]
    forms = {
        "add": lambda: [add(b, a), sub(a, op("neg", b)), op("neg", sub(op("neg", a), b))],
        "sub": lambda: [add(a, op("neg", b)), op("neg", sub(b, a)), add(sub(a, mul(TWO, b)), b)],
        "mul": lambda: [mul(b, a), op("neg", mul(a, op("neg", b))), sub(mul(a, add(b, ONE)), a)],
        "div": lambda: [mul(a, div(ONE, b)), div(mul(TWO, a), add(b, b)), op("neg", div(a, op("neg", b)))],
        "neg": lambda: [sub(const(0.0, "float32"), a), mul(const(-1.0, "float32"), a), op("neg", a)],
        "square": lambda: [mul(a, a), op("square", op("neg", a)), add(mul(a, sub(a, ONE)), a)],
        "exp": lambda: [
            div(ONE, op("exp", op("neg", a))),
            mul(op("exp", sub(a, Z)), op("exp", Z)),
            add(op("expm1", a), ONE),
        ],
        "exp2": lambda: [
            op("exp", mul(a, const(0.6931472, "float32"))),
            mul(TWO, op("exp2", sub(a, ONE))),
            div(ONE, op("exp2", op("neg", a))),
        ],
        "expm1": lambda: [sub(op("exp", a), ONE), mul(op("expm1", op("neg", a)), op("neg", op("exp", a)))],
        "sqrt": lambda: [op("sqrt", op("neg", op("neg", a))), div(ONE, op("rsqrt", a))],
        "sin": lambda: (
            [
                op("neg", op("sin", op("neg", a))),
                add(mul(op("sin", sub(a, X)), op("cos", X)), mul(op("cos", sub(a, X)), op("sin", X))),
            ]
            if has_an_angle(a)
            else [op("sin", op("neg", op("neg", a)))]
        ),
    }[node.op]()
    return forms[choose(len(forms))]


def exponentials(root: Expr) -> int:
    depth: dict[Expr, int] = {}
    for node in postorder(root):
        own = isinstance(node, Apply) and node.op in ("exp", "exp2", "expm1")
        depth[node] = own + max((depth[a] for a in node.args), default=0)
    return depth[root]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(trees(3), st.randoms(use_true_random=False))
def test_equal_forms_agree(tree, random):
    assume(exponentials(tree) <= 2)
    assume(all(n.tensors for n in postorder(tree) if isinstance(n, Apply)))  # a known number has its own sign: 1 - e
    fields = finite_fields(4, 32, seed=random.randrange(1000))
    given_values = inputs(fields)
    left = evaluated(fields, tree, **given_values)
    right = evaluated(fields, rewritten(tree, random.randrange), **given_values)
    assert not differ(left, right, 32)


def changed(root: Expr, random) -> Expr:
    """The expression with one of its nodes replaced."""
    nodes = [n for n in postorder(root)]
    victim = random.choice(nodes)
    match victim:
        case Read():
            other = random.choice([r for r in (X, Y, Z) if r is not victim])
        case Const(value, dtype):
            other = const(value + random.choice([-1.0, 0.5]), dtype)
        case Apply(name, (_, _)):
            other = op(random.choice([n for n in ("add", "sub", "mul", "div") if n != name]), *victim.args)
        case Apply(name, (a,)):
            other = op(random.choice([n for n in ("neg", "square", "exp", "sqrt", "sin") if n != name]), a)
    return substitute(root, {victim: other})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(trees(3), st.randoms(use_true_random=False))
def test_different_functions_differ_as_they_do_in_float64(tree, random):
    """`changed` may still be the same function: floating point decides."""
    other = changed(tree, random)
    assume(max(exponentials(tree), exponentials(other)) <= 2)
    points = np.random.default_rng(0).uniform(-1.5, 1.5, (200, 3))
    with np.errstate(all="ignore"):
        pairs = np.array([
            [evaluate_expr(e, (), dict(zip(NAMES, point, strict=True))).item() for e in (tree, other)]
            for point in points[:40]
        ])  # fmt: skip
    finite = np.isfinite(pairs).all(1)
    assume(finite.sum() > 10)
    far = np.abs(pairs[finite, 0] - pairs[finite, 1]) > 1e-6 * (1 + np.abs(pairs[finite]).max(1))
    fields = finite_fields(4, 64, seed=1)
    given_values = inputs(fields)
    values = [evaluated(fields, e, **given_values) for e in (tree, other)]
    if far.any():
        tainted = (values[0].taint | values[1].taint) != 0
        taints = np.broadcast_to(tainted | values[0].bad | values[1].bad, (64,))
        assume((~taints).sum() >= 8)
        assume(all(v.lowest == 0 or v.real is not None for v in values))
        assert differ(*values, 64)
    else:
        assert not differ(*values, 64)
