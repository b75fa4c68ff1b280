"""Regions to make schedule trees of: those that the benchmark has, and random ones."""

import random

from benchmarks.schedule_regions import attention, chain, norm_product, three_products, traced, two_passes  # noqa: F401
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import convert as converted
from pallasfuse.ir.expr import mul, read
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.region import Region, verify
from pallasfuse.ir.tensors import Tensor


def random_region(seed, extents=(32, 48, 64, 96, 128, 192, 256)):
    """Returns a region with two to four contractions: each multiplies an earlier result, or an input, with an input."""
    draw = random.Random(seed)
    names = iter("mabcdefgh")
    rows = Axis(next(names), draw.choice(extents))
    tensors: list[Tensor] = []
    nests: list[Nest] = []

    def value(tensor, axes):
        return converted(read(tensor, axes, "float16"), "float32")

    first = Axis(next(names), draw.choice(extents))
    tensors.append(Tensor("x", (rows, first), "float16"))
    last = tensors[0]
    for n in range(draw.randint(2, 4)):
        source = last if nests and draw.random() < 0.8 else tensors[0]
        summed = source.axes[1]
        free = Axis(next(names), draw.choice(extents))
        weight = Tensor(f"w{n}", (summed, free), "float16")
        tensors.append(weight)
        body = mul(value(source.name, source.axes), value(weight.name, weight.axes))
        nests.append(Nest(f"t{n}", (rows, free), body, "float16", (summed,), SUM))
        last = Tensor(f"t{n}", (rows, free), "float16")
    read_somewhere = {r for nest in nests for r in nest.reads}
    return verify(Region(tuple(nests), tuple(tensors), tuple(n.name for n in nests if n.name not in read_somewhere)))
