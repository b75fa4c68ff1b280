"""Products that a program only transposes: XLA multiplies their operands the other way round on CPUs, and transposes nothing.

A gradient of weights is such a product: of (x @ w), JAX writes the transposed product of the result's gradient and x.

(Five sums of transposed products of 4 to 32 terms in a loop, on two cores, took 0.98 to 1.13 of what they take without a
transposition, and were priced at 2.3 to 3.9 times as much.)
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Read, rename_axes, with_args
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.xla_reductions import is_product


def with_products_turned(program: LoopProgram, kept: Collection[str] = ()) -> LoopProgram:
    """Returns a program that costs XLA on a CPU what this one does, where products that are only transposed are transposed ones.

    kept: what kernels of ours make and read, which is there as the program has it.
    """
    transposed = _transposed(program)
    return program if not transposed else _turned(program, frozenset(transposed).difference(kept))


def _found_transposed(program: LoopProgram) -> dict[str, str]:
    """Returns the matrix products that a transposition reads and nothing else does, with the name of what that makes."""
    readers = Counter(t for n in program.nests for t in (n.operands if isinstance(n, External) else n.reads))
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    found: dict[str, str] = {}
    for nest in nests.values():
        match nest.body:
            case Read(tensor, indices) if not nest.is_reduction and len(nest.axes) == 2 and indices == nest.axes[::-1]:
                alone = readers[tensor] == 1 and tensor not in program.outputs
                if alone and tensor in nests and is_product(nests[tensor]):
                    found[tensor] = nest.name
    return found


_transposed = Recent(_found_transposed)


def _found_turned(program: LoopProgram, products: frozenset[str]) -> LoopProgram:
    if not products:
        return program
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    instead = {
        name: _the_other_way_round(nests[p], nests[name]) for p, name in _transposed(program).items() if p in products
    }
    return replace(program, nests=tuple(instead.get(n.name, n) for n in program.nests if n.name not in products))


_turned = Recent(_found_turned)


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
