"""Tiles have one order, in which few elements are read in strides; batches of products stand first."""

from pallasfuse.ir import tile_orders
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import read
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, Load, Store, TileProgram, verify

F = "float32"
BATCH, ROW, SUM, COLUMN = (Axis(name, size) for name, size in (("b", 3), ("i", 8), ("k", 64), ("j", 96)))


def of_product(lhs, rhs, out, *, order=(COLUMN, ROW, SUM, BATCH)):
    """A kernel of one block that multiplies two tensors, whose tiles are in some order."""
    axes = tuple(dict.fromkeys((*lhs, *rhs)))
    over = tuple(a for a in axes if a not in out)
    tensors = Tensor("x", lhs, F), Tensor("w", rhs, F)
    body = (
        Load("x.t", "x", lhs, F), Load("w.t", "w", rhs, F),
        Contract("y.t", tuple(a for a in order if a in out), read("x.t", lhs, F), read("w.t", rhs, F), over, F),
        Store("y", out, read("y.t", out, F)),
    )  # fmt: skip
    tiles = tuple((a, a.extent) for a in order if a in axes)
    return verify(TileProgram("product", tensors, (Tensor("y", out, F),), (), tiles, body))


def order_of(program):
    ranks = tile_orders.ranks(program)
    return "".join(a.name for a in sorted(ranks, key=ranks.__getitem__))


def test_what_lies_in_one_order_keeps_it():
    assert order_of(of_product((ROW, SUM), (SUM, COLUMN), (ROW, COLUMN))) == "ikj"


def test_batches_stand_first():
    """The results of heads that lie between positions and features are turned otherwise, and these are many."""
    assert order_of(of_product((ROW, BATCH, SUM), (COLUMN, BATCH, SUM), (BATCH, ROW, COLUMN))).startswith("b")


def test_wishes_that_contradict_each_other():
    """Three tensors of which each lies against the other two: the largest has its way."""
    short, wide, long = Axis("s", 4), Axis("w", 16), Axis("l", 256)
    tensors = [Tensor(n, axes, F) for n, axes in (("a", (short, wide)), ("b", (wide, long)), ("c", (long, short)))]
    loads = tuple(Load(f"{t.name}.t", t.name, t.axes, F) for t in tensors)
    stores = tuple(Store(f"{t.name}.out", t.axes, read(f"{t.name}.t", t.axes, F)) for t in tensors)
    outputs = tuple(Tensor(f"{t.name}.out", t.axes, F) for t in tensors)
    tiles = tuple((a, a.extent) for a in (long, short, wide))
    program = verify(TileProgram("turns", tuple(tensors), outputs, (), tiles, (*loads, *stores)))
    assert order_of(program) == "wls"
