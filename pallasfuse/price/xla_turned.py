"""Products that a program only transposes: XLA multiplies their operands the other way round on CPUs, and transposes nothing.

A gradient of weights is such a product: of (x @ w), JAX writes the transposed product of the result's gradient and x.
"""

from collections import Counter
from dataclasses import replace

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Read, rename_axes, with_args
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.xla_reductions import is_product, product_operands


def _turned(program: LoopProgram) -> LoopProgram:
    """Returns the program with every product that is read once, by a transposition, as the transposed product."""
    readers = Counter(t for n in program.nests for t in (n.operands if isinstance(n, External) else n.reads))
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    found: dict[str, Nest] = {}
    gone: set[str] = set()
    for nest in nests.values():
        product = _transposed_by(nest, nests)
        if product is not None and readers[product.name] == 1 and product.name not in program.outputs:
            found[nest.name] = _the_other_way_round(product, nest)
            gone.add(product.name)
    if not found:
        return program
    return replace(program, nests=tuple(found.get(n.name, n) for n in program.nests if n.name not in gone))


with_products_turned = Recent(_turned)
"""Returns a program that costs XLA on a CPU what this one does, without the transpositions of products.

(Five sums of transposed products of 4 to 32 terms in a loop, on two cores, took 0.98 to 1.13 of what they take without a
transposition, and were priced at 2.3 to 3.9 times as much.)
"""


def _transposed_by(nest: Nest, nests: dict[str, Nest]) -> Nest | None:
    """Returns the matrix product of which a nest is the transposed one, and nothing else."""
    match nest.body:
        case Read(tensor, indices) if not nest.is_reduction and len(nest.axes) == 2 and indices == nest.axes[::-1]:
            product = nests.get(tensor)
            return product if product is not None and is_product(product) and _is_of_matrices(product) else None
    return None


def _is_of_matrices(product: Nest) -> bool:
    operands = product_operands(product.reduced, product.body)
    return operands is not None and not any(all(a in o.axes for o in operands) for a in product.axes)


def _the_other_way_round(product: Nest, transposed: Nest) -> Nest:
    assert isinstance(transposed.body, Read)
    own = dict(zip(product.axes, transposed.body.indices, strict=True))
    own |= {a: Axis(f"{a.name}.summed", a.extent) for a in product.reduced if a in transposed.axes}
    reduced = tuple(own.get(a, a) for a in product.reduced)
    body = rename_axes(product.body, own)
    assert isinstance(body, Apply)
    return replace(
        product, name=transposed.name, axes=transposed.axes, body=with_args(body, body.args[::-1]), reduced=reduced,
        source=transposed.source,
    )  # fmt: skip
