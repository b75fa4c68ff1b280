"""Every rule keeps the value of what it rewrites; a mistake in any of them shows."""

import random

import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.search import rules
from pallasfuse.search.egraph import EGraph, Inverse, Over, Plus, Quality, Times
from pallasfuse.search.rewriting import Limits, saturate
from pallasfuse.search.rules import DISTRIBUTE, FACTOR, FLATTEN, INVERT, MERGE, PICK, RULES, SPLIT
from tests.search.terms import I1, I2, J, K, L, disagreement, leaf


def _flatten(g):
    return g.plus(
        [
            leaf(g, "n"),
            g.times([leaf(g, "s"), g.times([leaf(g, "a"), leaf(g, "x")])]),
            g.over([J], g.over([L], leaf(g, "c"))),
        ]
    )


def _merge(g):  # k of the outer factor is not that of the sum
    return g.times([leaf(g, "x"), g.over([K], g.times([leaf(g, "a"), leaf(g, "x")]))])


def _split(g):
    return g.over([J, K], g.times([leaf(g, "a"), leaf(g, "b"), leaf(g, "c"), leaf(g, "x")]))


def _factor(g):
    products = [g.over([K], g.times([leaf(g, "a"), leaf(g, n)])) for n in ("b", "d")]
    return g.plus([*products, g.times([leaf(g, "s"), leaf(g, "y")])])


def _distribute(g):
    low_rank = g.over([I1], g.times([leaf(g, "a"), leaf(g, "e", I1, J)]))
    return g.over([K], g.times([leaf(g, "x"), g.plus([leaf(g, "b"), low_rank])]))


def _invert(g):
    return g.inverse(g.times([leaf(g, "s"), leaf(g, "y")]))


def _pick(g):
    return g.over([I1], g.times([leaf(g, "delta", I1, I2), leaf(g, "a"), leaf(g, "s")]))


EXAMPLES = {
    FLATTEN: _flatten, MERGE: _merge, SPLIT: _split, FACTOR: _factor, DISTRIBUTE: _distribute, INVERT: _invert, PICK: _pick,
}  # fmt: skip


def graph_of(example) -> EGraph:
    graph = EGraph(deltas={"delta"})
    example(graph)
    return graph


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_a_rule_finds_something_and_keeps_the_value(rule):
    graph = graph_of(EXAMPLES[rule])
    before = len(graph)
    for number in graph.classes():
        for node in graph.nodes(number):
            assert all(graph.axes(other) == graph.axes(number) for other in rule.apply(graph, node))
    searched = saturate(graph, phases=((rule,),))
    assert searched.found.get(rule.name), "the rule found nothing in its example"
    assert len(graph) > before or searched.found
    assert disagreement(graph) is None


# --- mistakes, three for each rule


def _without_first(node_type, field):
    """Forgets one operand."""

    def apply(graph, node):
        if isinstance(node, node_type) and len(getattr(node, field)) > 1:
            make = graph.times if node_type is Times else graph.plus
            yield make(getattr(node, field)[1:])

    return apply


def _flatten_other_operation(graph, node):
    if isinstance(node, Plus):
        for inner in (n for t in node.terms for n in graph.nodes(t) if isinstance(n, Times)):
            yield graph.plus([*(t for t in node.terms if inner not in graph.nodes(t)), *inner.factors])


def _flatten_one_sum(graph, node):
    if isinstance(node, Over):
        yield from (graph.over(node.axes, n.term) for n in graph.nodes(node.term) if isinstance(n, Over))


def _merge_caught(graph, node):
    """Takes a sum to the outside without giving its axes other names."""
    if isinstance(node, Times):
        for n, factor in enumerate(node.factors):
            for inner in (x for x in graph.nodes(factor) if isinstance(x, Over)):
                yield graph.over(inner.axes, graph.times([inner.term, *node.factors[:n], *node.factors[n + 1 :]]))


def _merge_without_sum(graph, node):
    if isinstance(node, Times):
        for n, factor in enumerate(node.factors):
            for inner in (x for x in graph.nodes(factor) if isinstance(x, Over)):
                free = {a: Axis(f"{a.name}~9", a.extent) for a in inner.axes}
                yield graph.over((), graph.times([graph.over(list(free.values())[1:], graph.renamed(inner.term, free)),
                                                  *node.factors[:n], *node.factors[n + 1 :]]))  # fmt: skip


def _split_with(sides):
    def apply(graph, node):
        if isinstance(node, Over):
            for product in (n for n in graph.nodes(node.term) if isinstance(n, Times)):
                for left, right in rules._halves(product.factors):
                    yield sides(graph, node.axes, left, right)

    return apply


def _axes(graph, factors):
    return frozenset().union(*(graph.axes(f) for f in factors))


def _both_summed(graph, axes, left, right):
    return graph.times([graph.over(axes & _axes(graph, side), graph.times(side)) for side in (left, right)])


def _summed_too_early(graph, axes, left, right):
    rest = axes - _axes(graph, left)
    return graph.over(rest, graph.times([graph.over(axes & _axes(graph, left), graph.times(left)), *right]))


def _half_lost(graph, axes, left, right):
    return graph.over(axes, graph.times(left))


def _factor_wrong(keep):
    def apply(graph, node):
        if isinstance(node, Plus) and len(node.terms) > 1:
            one, other, *rest = node.terms
            for joined in rules._common(graph, one, other):
                yield graph.plus([joined, *keep(rest, one)])

    return apply


def _factor_axes(graph, node):
    """Takes the sums of two terms together though they are over different axes."""
    sums = [n for t in (node.terms if isinstance(node, Plus) else ()) for n in graph.nodes(t) if isinstance(n, Over)]
    if len(sums) > 1:
        yield graph.over(sums[0].axes, graph.plus([s.term for s in sums]))


def _distribute_first_only(graph, node):
    if isinstance(node, Times):
        for n, factor in enumerate(node.factors):
            for inner in (x for x in graph.nodes(factor) if isinstance(x, Plus)):
                others = [*node.factors[:n], *node.factors[n + 1 :]]
                yield graph.plus([graph.times([inner.terms[0], *others]), *inner.terms[1:]])


def _distribute_minus(graph, node):
    for found in rules._distributed(graph, node):
        yield graph.times([graph.literal(-1.0), found])


def _distribute_sum_of_first(graph, node):
    if isinstance(node, Over):
        for inner in (n for n in graph.nodes(node.term) if isinstance(n, Plus)):
            yield graph.plus([graph.over(node.axes, inner.terms[0]), *inner.terms[1:]])


def _distribute_both(graph, node):
    yield from _distribute_first_only(graph, node)
    yield from _distribute_sum_of_first(graph, node)


def _invert_first(graph, node):
    for inner in graph.nodes(node.term) if isinstance(node, Inverse) else ():
        if isinstance(inner, Times):
            yield graph.times([graph.inverse(inner.factors[0]), *inner.factors[1:]])


def _invert_none(graph, node):
    if isinstance(node, Inverse):
        yield node.term


def _invert_sum(graph, node):
    for inner in graph.nodes(node.term) if isinstance(node, Inverse) else ():
        if isinstance(inner, Times):
            yield graph.plus([graph.inverse(f) for f in inner.factors])


def _pick_with(change):
    def apply(graph, node):
        if isinstance(node, Over):
            for product in (n for n in graph.nodes(node.term) if isinstance(n, Times)):
                for n, factor in enumerate(product.factors):
                    if graph.delta(factor):
                        yield change(graph, node, graph.times([*product.factors[:n], *product.factors[n + 1 :]]))

    return apply


MUTANTS = {
    "flatten: an operand is lost": (FLATTEN, _without_first(Plus, "terms")),
    "flatten: a product in a sum": (FLATTEN, _flatten_other_operation),
    "flatten: the inner sum's axes are lost": (FLATTEN, _flatten_one_sum),
    "merge: an axis is caught": (MERGE, _merge_caught),
    "merge: a factor is lost": (MERGE, _without_first(Times, "factors")),
    "merge: the sum is lost": (MERGE, _merge_without_sum),
    "split: both sides are summed over what they share": (SPLIT, _split_with(_both_summed)),
    "split: one side is summed over what they share": (SPLIT, _split_with(_summed_too_early)),
    "split: one side is lost": (SPLIT, _split_with(_half_lost)),
    "factor: the other terms are lost": (FACTOR, _factor_wrong(lambda rest, one: [])),
    "factor: a term stays as well": (FACTOR, _factor_wrong(lambda rest, one: [*rest, one])),
    "factor: sums over different axes": (FACTOR, _factor_axes),
    "distribute: only the first term is multiplied": (DISTRIBUTE, _distribute_first_only),
    "distribute: a sign": (DISTRIBUTE, _distribute_minus),
    "distribute: only the first term is summed": (DISTRIBUTE, _distribute_both),
    "invert: only the first factor": (INVERT, _invert_first),
    "invert: no inverse": (INVERT, _invert_none),
    "invert: a sum": (INVERT, _invert_sum),
    "pick: the axis stays": (PICK, _pick_with(lambda g, node, rest: g.over(node.axes, rest))),
    "pick: the sum is lost and nothing is renamed": (PICK, _pick_with(lambda g, node, rest: g.over(node.axes - {I1}, rest))),
    "pick: the delta stays in the sum of the others": (PICK, _pick_with(lambda g, node, rest: g.times([rest, g.literal(2.0)]))),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_a_rule_is_noticed(name):
    rule, apply = MUTANTS[name]
    graph = graph_of(_different_sums if apply is _factor_axes else EXAMPLES[rule])
    given = [(number, node) for number in graph.classes() for node in graph.nodes(number)]
    found = [(number, other) for number, node in given for other in apply(graph, node)]
    assert found, "the mistake changes nothing in the example"
    other_axes = any(graph.axes(number) != graph.axes(other) for number, other in found)
    for number, other in found:
        graph.union(number, other)
    graph.rebuild()
    assert other_axes or disagreement(graph) is not None


def _different_sums(g):
    return g.plus([g.over([K], leaf(g, "a")), g.over([J], leaf(g, "e", I1, J))])


def test_every_rule_has_three_mistakes():
    assert all(sum(rule is r for r, _ in MUTANTS.values()) == 3 for rule in RULES)


def test_new_names_of_axes_leave_those_alone_that_a_sum_binds():
    graph = EGraph()
    total = graph.over([K], graph.times([leaf(graph, "a"), leaf(graph, "x")]))
    k, i = Axis("k~1", K.extent), Axis("i~1", I1.extent)
    found = graph.renamed(graph.times([leaf(graph, "a"), total]), {K: k, I1: i})
    expected = graph.over([K], graph.times([leaf(graph, "a", i, K), leaf(graph, "x")]))
    assert graph.find(found) == graph.times([leaf(graph, "a", i, k), expected])


def test_a_square_of_a_difference_is_not_multiplied_out():
    """A difference of two sums has an error in the order of these. Its square has a much smaller one than theirs."""
    graph = EGraph()
    sums = [
        graph.over([K], graph.times([leaf(graph, n, *axes), leaf(graph, "x")]))
        for n, axes in (("a", (I1, K)), ("b", (K, J)))
    ]
    difference = graph.plus([sums[0], graph.times([graph.literal(-1.0), sums[1]])])
    square = graph.times([difference, difference])
    saturate(graph)
    assert graph.quality(square) is Quality.CANCELLED
    products = [n for n in graph.nodes(square) if isinstance(n, Plus)]
    assert not products or all(len(n.terms) < 3 for n in products)


# --- grown terms


def grown(graph: EGraph, draw: random.Random, depth: int) -> int:
    """A random term over the tensors of the tests."""
    if depth == 0 or draw.random() < 0.15:
        name = draw.choice(["a", "b", "c", "d", "x", "s", "y", "n", "delta", "number"])
        if name == "number":
            return graph.literal(draw.choice([-1.0, 0.5, 2.0]))
        return leaf(graph, "delta", I1, I2) if name == "delta" else leaf(graph, name)
    match draw.choice(["times", "times", "plus", "over", "over", "inverse"]):
        case "times":
            return graph.times([grown(graph, draw, depth - 1) for _ in range(draw.choice([2, 2, 3]))])
        case "plus":
            return graph.plus([grown(graph, draw, depth - 1) for _ in range(2)])
        case "over":
            inside = grown(graph, draw, depth - 1)
            axes = sorted(graph.axes(inside))
            return graph.over([a for a in axes if draw.random() < 0.6], inside)
        case _:
            return graph.inverse(leaf(graph, draw.choice(["s", "y", "n"])))


@pytest.mark.sampled(10, cover=())
@pytest.mark.parametrize("seed", range(90))
def test_all_terms_of_a_class_are_equal(seed):
    """Also where a sum occurs twice in a product: its axes are the same then, and get other names when it is merged."""
    draw = random.Random(seed)
    graph = EGraph(600, {"delta"})
    summed = graph.over([I1, K], grown(graph, draw, 4))
    root = graph.times([summed, summed]) if seed % 3 == 0 else graph.plus([grown(graph, draw, 3), summed])
    if seed % 6 == 0:
        root = graph.times([root, root, grown(graph, draw, 2)])
    assert graph.axes(root) is not None
    saturate(graph, Limits(terms=600, rounds=4, seconds=5.0))
    assert disagreement(graph, seed) is None
