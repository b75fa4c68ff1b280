"""Shared memory of the sides of products on matrix units: which are staged there, and from when until when.

Three habits of Triton's compiler decide that. What is the same in every trip of a loop is computed and staged once, before the
loop. Products that have the same side share it. And a product that is only added to something takes that as the value it begins
with, so it is computed where the sum stands.
"""

from collections.abc import Iterator

from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.tile_program import Let, Load, Store, block_start, expressions
from pallasfuse.resources.block import Buffer
from pallasfuse.resources.triton_view import WARP_ROWS, Line, LoopScope, Product, View, computed


def of_product(view: View, product: Product) -> Iterator[Buffer]:
    """Lists the buffers of a product: sides that are computed, and right sides that were rounded in registers, are staged.

    Left sides of products of warpgroups are made in registers from results of products, and from what was copied ahead for them.
    """
    s = product.statement
    loads = frozenset(x.name for x in view.lines if isinstance(x.statement, Load) and x.name)
    if computed(s.rhs, loads) or (product.warpgroup and not product.half):
        yield from _of_side(view, product, s.rhs, f"right side of {s.name}")
    if _stages_left(view, product):
        yield from _of_side(view, product, s.lhs, f"left side of {s.name}")
    if _is_shared_out_anew(view, product):
        yield Buffer(
            f"{s.name}, laid out anew", view.bytes(s.axes, s.dtype), product.line.number, product.line.number, True
        )


def stages_left_before(view: View, product: Product, name: str) -> bool:
    """Is the left side of a product surely staged in shared memory before a value is read for its right side?"""
    s = product.statement
    if name not in s.rhs.tensors or name in s.lhs.tensors or not _stages_left(view, product):
        return False
    loads = _loads_of_left(view, product)
    here = [x for x in loads if x.scope.kept is product.line.scope.kept]
    # a vector is loaded again in the layout of the side, if all that is read with it is loaded in the loop as well
    again = here == loads and all(x.number in view.copied_ahead or _is_vector(view, x) for x in here)
    return not (product.warpgroup and again and any(x.number in view.copied_ahead for x in here))


def _is_vector(view: View, line: Line) -> bool:
    """Is a load of one axis, or of none?"""
    return isinstance(line.statement, Load) and sum(view.program.tile(a) > 1 for a in line.statement.indices) <= 1


def _stages_left(view: View, product: Product) -> bool:
    """May a left side that is computed pass through shared memory?"""
    loads = frozenset(x.name for x in view.lines if isinstance(x.statement, Load) and x.name)
    in_registers = product.warpgroup and _is_made_in_registers(view, product)
    return computed(product.statement.lhs, loads) and not in_registers


def _is_shared_out_anew(view: View, product: Product) -> bool:
    """May what a product is added to lie in other warps than the product? Where a loop of one trip dissolves, each product of it
    has a layout of its own, and those with more warps than rows for them have a choice."""
    scope = product.line.scope
    few = product.warpgroup and product.m < WARP_ROWS * view.program.warps
    carried = scope.loop.carries if scope.loop is not None and not scope.repeats else ()
    return few and any(frozenset(c.axes) == frozenset(product.statement.axes) for c in carried)


def needed_until(view: View, line: Line, product: Product) -> int:
    """The last statement for which what was staged by a load stays where it is, by a product that takes it."""
    scope = product.line.scope
    kept = line.scope.kept_until(scope, product.line.number)
    if kept > product.line.number or (scope is not line.scope and scope.repeats):
        return kept
    # the left side goes on to registers, where it is wide
    return computed_at(view, product) if product.half or not product.warpgroup else line.number


def computed_at(view: View, product: Product) -> int:
    """The statement at which a product is computed: its own, or that of the sum that it begins with."""
    total = _sum(view, product)
    return product.line.number if total is None else total[0].number


def laid_out_anew_at(view: View, line: Line) -> list[int]:
    """Lists where a load may take the layout of the results of products: where it stands, or at a product that begins with it."""
    begun = [total for p in view.products.values() if (total := _sum(view, p)) is not None]
    return sorted({line.number, *(at.number for at, other in begun if line.name in view.behind(other))})


def _of_side(view: View, product: Product, side: Expr, name: str) -> Iterator[Buffer]:
    """Lists the buffer of a side of a product. Products that have the same side share what was staged for the first of them."""
    size = view.bytes((*side.axes, *product.statement.over), side.dtype)
    alike = _alike(view, product, side)
    loops = [_unchanged_in(view, p.line.scope, side) for p in alike]
    if not any(loops):
        here = [computed_at(view, p) for p in alike if p.line.scope is product.line.scope]
        yield Buffer(name, size, product.line.number, max(here))
    elif product is alike[0]:
        last = max(computed_at(view, p) if o is None else o.last for o, p in zip(loops, alike, strict=True))
        yield Buffer(name, size, _made_at(view, side), last)


def _unchanged_in(view: View, scope: LoopScope, side: Expr) -> LoopScope | None:
    """The outermost loop around a statement in which a value is the same in every trip, if Triton keeps one."""
    made, found = _made_at(view, side), None
    while scope.around is not None:
        if made >= scope.first or (scope.loop is not None and scope.loop.axis in side.axes):
            break
        found = scope if scope.repeats else found
        scope = scope.around
    return found


def _made_at(view: View, side: Expr) -> int:
    """The statement after which all is known that a value is computed from; the last one where that is not known."""
    made = {line.name: line.number for line in view.lines if line.name is not None}
    carried = {c.name: s.last for s in view.scopes if s.loop is not None for c in s.loop.carries}
    starts = {block_start(axis): 0 for axis, _ in view.program.grid}
    known = {**starts, **carried, **made}
    return max((known.get(name, len(view.lines) - 1) for name in side.tensors), default=0)


def _is_made_in_registers(view: View, product: Product) -> bool:
    """Is a left side computed, element by element, from results of products (or what a loop has added up of them), or from what was
    loaded, and copied ahead for this product alone?"""
    line, side = product.line, product.statement.lhs
    behind = view.behind(side)
    made_of = [p for p in view.products.values() if p.line.name in behind]
    if made_of:  # what a loop has added up may lie in other warps, where there are more than rows for them
        return product.m >= WARP_ROWS * view.program.warps or any(p.line.scope is line.scope for p in made_of)
    made = [x for x in view.lines if x.name in behind and isinstance(x.statement, Load | Let)]
    inside = [x for x in made if isinstance(x.statement, Load) and x.scope.kept is line.scope.kept]
    alone = len([p for p in _alike(view, product, side) if p.line.scope is line.scope]) == 1
    only_loads = behind - {x.name for x in made} <= {block_start(axis) for axis, _ in view.program.grid}
    return alone and only_loads and bool(inside) and all(x.number in view.copied_ahead for x in inside)


def _loads_of_left(view: View, product: Product) -> list[Line]:
    """Lists the loads that a left side is computed from."""
    behind = view.behind(product.statement.lhs)
    return [x for x in view.lines if x.name in behind and isinstance(x.statement, Load)]


def _alike(view: View, product: Product, side: Expr) -> list[Product]:
    """Lists the products that have the same side: the same one of the two, summed over the same axes."""
    left, over = side is product.statement.lhs, product.statement.over
    others = ((p, p.statement) for p in view.products.values())
    return [p for p, s in others if side == (s.lhs if left else s.rhs) and s.over == over]


def _sum(view: View, product: Product) -> tuple[Line, Expr] | None:
    """The line where a product is added to something, and to what, if nothing else reads it."""
    at = product.line.number
    if at not in view.sums:
        view.sums[at] = _found_sum(view, product)
    return view.sums[at]


def _found_sum(view: View, product: Product) -> tuple[Line, Expr] | None:
    readers = view.readers(product.line)
    parents: dict[Expr, None] = {}
    for reader in readers:
        for root in expressions(reader.statement):
            for node in postorder(root):
                if isinstance(node, Apply) and any(_is(a, product) for a in node.args):
                    parents[node] = None
            if _is(root, product):
                return None
    match list(parents):
        case [Apply("add", (one, other))] if readers[0].scope is product.line.scope and _in_order(
            view, product, readers
        ):
            return readers[0], other if _is(one, product) else one
    return None


def _in_order(view: View, product: Product, readers: list[Line]) -> bool:
    """Does what is computed from a product leave in the product's order of axes? Otherwise it is transposed first."""
    axes = [a for a in product.statement.axes if view.program.tile(a) > 1]
    stores = (r.statement.indices for r in readers if isinstance(r.statement, Store))
    return all([a for a in indices if a in axes] == axes for indices in stores)


def _is(node: Expr, product: Product) -> bool:
    return isinstance(node, Read) and node.tensor == product.line.name
