"""Records of what a search has found. A plan that was kept is read with these, and imports no search."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pallasfuse.ir.expr import Apply, Expr, rebuild, with_args
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.price.terms import Price

CONDITION = "sums and products are computed in another order, with roundings in other places"
EXCEPTION = (
    "what is multiplied and added in another order is finite, and so is what it is made of, and what is computed in between, in "
    "either order: else a result may be NaN, infinite or finite where the program's is not"
)


@dataclass
class Searched:
    """What a search has visited: equal terms found by each rule, and whether it came to its end."""

    terms: int = 0
    classes: int = 0
    tried: int = 0
    rounds: int = 0
    seconds: float = 0.0
    complete: bool = False
    found: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Another way to compute one tensor of a program.

    nests: compute it from tensors of the program; the last one has its name and its axes.
    before, after: the predicted time of the part that changes, by XLA.
    """

    nests: tuple[Nest, ...]
    before: Price
    after: Price
    old: tuple[Nest, ...]
    """The nests that computed it, and that nothing else needs."""
    searched: Searched
    leaves: tuple[Tensor, ...] = ()
    """The tensors that both are computed from."""

    @property
    def name(self) -> str:
        """The tensor that is computed in another way."""
        return self.nests[-1].name

    def __str__(self) -> str:
        made = "; ".join(map(shown, self.nests))
        return f"{self.nests[-1].source}: {made}; {self.after.us:.3g} us predicted, as written {self.before.us:.3g} us"

    def lines(self) -> Iterator[str]:
        """What the program says, what is computed instead, both with their prices, and what was searched."""
        yield f"{self.nests[-1].source}:"
        yield f"  as written, {self.before}"
        yield from (f"    {shown(n)}" for n in self.old)
        yield f"  computed as, {self.after}"
        yield from (f"    {shown(n)}" for n in self.nests)
        found = ", ".join(f"{rule} {count}" for rule, count in self.searched.found.items())
        end = "all of them" if self.searched.complete else "until a limit was reached"
        yield f"  searched {self.searched.terms} terms in {self.searched.classes} classes, {end}; found by {found}"


def shown(nest: Nest) -> str:
    """Returns a nest as one line of text, without casts."""
    over = f"sum[{', '.join(a.name for a in nest.reduced)}] " if nest.reduced else ""
    return f"{nest.name}[{', '.join(a.name for a in nest.axes)}] = {over}{_uncast(nest.body)}"


def _uncast(body: Expr) -> Expr:
    """An expression without its conversions, which a reader need not see."""
    return rebuild(
        body, lambda node, args: args[0] if isinstance(node, Apply) and node.op == "convert" else with_args(node, args)
    )
