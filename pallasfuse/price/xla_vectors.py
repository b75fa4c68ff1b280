"""Products of a vector and a matrix as XLA computes them: what it stores before them on a GPU, and what it transposes on a CPU.

A small one is a reduction (`stored_terms`). A large one is a library's kernel, which reads a matrix that is stored: one that is
computed, but by a cast, is written before. (16 large ones, compiled for an H100.)
"""

from collections.abc import Mapping, Set

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.price.xla_habits import Habits
from pallasfuse.price.xla_products import without_casts


def stored_matrix(node: Nest, body: Expr, products: Set[str], habits: Habits) -> Expr | None:
    """Returns the matrix of a large product where it is computed, and stored for that.

    products: the tensors that a library makes: what is computed from these is part of the library's call.
    """
    matrix = _matrix_of(node, body) if is_large(node, body, habits) else None
    return matrix if matrix is not None and _operations(matrix, products) else None


def is_large(node: Nest, body: Expr, habits: Habits) -> bool:
    """Is it the product of a vector and a matrix that is large enough for a library? In batches, it is a reduction."""
    return 0 < habits.smallest_product <= volume(_space_of(node)) and _matrix_of(node, body) is not None


def turned_elements(node: Nest, definitions: Mapping[str, object]) -> float:
    """The elements of a matrix of float32 or float64 that a program transposes before it multiplies a vector with it; else 0.

    Products of half types and of integers take as long in either order. definitions: of the program, by name.
    """
    matrix = _matrix_of(node, node.body)
    made = definitions.get(matrix.tensor) if isinstance(matrix, Read) else None
    if not isinstance(made, Nest) or made.dtype not in ("float32", "float64"):
        return 0.0
    own, order = made.axes, list(range(len(made.axes)))
    while isinstance(made, Nest) and not made.is_reduction and isinstance(made.body, Read):
        if frozenset(made.body.indices) != frozenset(made.axes):  # it repeats elements
            return 0.0
        order = [order[made.axes.index(a)] for a in made.body.indices]
        made = definitions.get(made.body.tensor)
    long = [n for n in order if own[n].extent > 1]
    return 0.0 if long == sorted(long) else float(volume(own))


def _matrix_of(node: Nest, body: Expr) -> Expr | None:
    """The matrix of a product of a vector and a matrix, without the casts around it. Not of what is written as a sum."""
    if node.reducer != SUM or node.precision is None or node.picks or not isinstance(body, Apply) or body.op != "mul":
        return None
    for vector, matrix in (body.args, body.args[::-1]):
        core = without_casts(matrix)
        if core.axes == _space_of(node) and vector.axes == frozenset(node.reduced):
            return core
    return None


def _space_of(node: Nest) -> frozenset[Axis]:
    return frozenset((*node.axes, *node.reduced))


def _operations(matrix: Expr, products: Set[str]) -> int:
    """The operations besides casts that make an element of a matrix, but for those at the end of a library's product."""
    if not products.isdisjoint(matrix.tensors):
        return 0
    return sum(isinstance(x, Apply) and x.op != "convert" and x.axes == matrix.axes for x in postorder(matrix))
