"""The rules R1 to R9 of Blockbuster as a table: moves of subtrees of loop trees, and algebra on the nests of any contraction."""

from pallasfuse.schedule import linearity, merging, recompute
from pallasfuse.schedule.rule import Rule

RULES: dict[int, Rule] = {
    rule.number: rule
    for rule in (
        Rule(
            1, "merge loops in a row",
            "i:1 ( a ) i:1 ( b )", "i:1 ( a b )",
            "b reads a; nothing else that is computed from a is read by b, and b does not read a before it is finished, "
            "unless a repair of it is derived",
            merging.loops_in_a_row, merging.merge,
        ),
        Rule(
            2, "merge sibling loops",
            "i:1 ( a ) i:1 ( b )", "i:1 ( a b )",
            "a and b read the same tensor; nothing that is computed from a is read by b",
            merging.sibling_loops, merging.merge,
        ),
        Rule(
            3, "sum where the terms are computed",
            "k:1 ( t ) k:1 ( s )   with s[] = sum[k] t[k]", "k:1 ( s )   with the terms in the body of s",
            "nothing else reads the terms",
            merging.terms_and_sums, merging.reduce_where_computed,
        ),
        Rule(
            4, "move a scale past a sum",
            "p[m, k] = c[m] * a[m, k]; y[m, n] = sum[k] p[m, k] * b[k, n]",
            "u[m, n] = sum[k] a[m, k] * b[k, n]; y[m, n] = c[m] * u[m, n]",
            "c does not vary along k, and nothing else reads p",
            linearity.scaled_operands, linearity.scale_after,
        ),
        Rule(
            5, "move a shift past a sum",
            "p[m, k] = a[m, k] + c[m]; y[m, n] = sum[k] p[m, k] * b[k, n]",
            "u[m, n] = sum[k] a[m, k] * b[k, n]; v[n] = sum[k] b[k, n]; y[m, n] = u[m, n] + c[m] * v[n]",
            "c does not vary along k, nothing else reads p, and u and c * v cannot cancel: c is bounded",
            linearity.shifted_operands, linearity.shift_after,
        ),
        Rule(
            6, "extend a loop over what it reads",
            "j:1 ( a ) i:1 ( j:1 ( b ) )", "i:1 ( j:1 ( a ) j:1 ( b ) )",
            "the two loops over j merge then; a is computed again in every trip over i",
            recompute.extendable, recompute.extend,
        ),
        Rule(
            7, "peel the first trip, over what it reads",
            "j:1 ( a ) i:1 ( j:1 ( b ) )", "i:1 until 1 ( j:1 ( a ) j:1 ( b ) ) i:1 from 1 ( j:1 ( b ) )",
            "the two loops over j merge then, and nothing in the loop over i is reduced by it",
            recompute.extendable, recompute.peel,
        ),
        Rule(
            8, "duplicate a scale that several sums read",
            "p = c * a; y = sum p * b; z = sum p * d", "p = c * a; q = c * a; y = sum p * b; z = sum q * d",
            "rule 4 or rule 5 may move the copies past their sums",
            linearity.shared_operands, linearity.duplicate,
        ),
        Rule(
            9, "compose maps of one operand",
            "a[i] = f(x[i]); b[i] = g(a[i])", "b[i] = g(f(x[i]))",
            "nothing else reads a",
            merging.maps_in_a_row, merging.compose,
        ),
    )
}  # fmt: skip
"""Every rule, by its number."""

PRIORITY = (8, 4, 5, 9, 3, 1, 2)
"""The rules that compute nothing again, in the order in which they are tried (Blockbuster, section 4.1)."""
EXTENSION = 6
