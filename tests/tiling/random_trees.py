"""Random schedule trees of a region: the plain one, changed step by step; a step that breaks a rule is taken back."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import Do, Keep, Level, Merge, Node, RangeLoop, Tree, TreeKernel, show, walk
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree

type Path = tuple[int, ...]


@cache
def _derive(region: Region) -> FoldsOnDemand:
    return FoldsOnDemand(region)


@dataclass
class Walker:
    """One random walk over the trees of a region."""

    region: Region
    tiles: Tiles
    random: random.Random
    refused: list[str] = field(default_factory=list)
    """Trees that broke a rule, each with the reason."""

    def __post_init__(self) -> None:
        self.derive = _derive(self.region)
        self.tree: Tree = (TreeKernel("k", tuple(Do(n.name) for n in self.region.nests)),)

    def walk(self, steps: int) -> Tree:
        moves = (
            [self.enclose] * 6
            + [self.blocks] * 2
            + [self.split, self.cluster, self.again, self.again, self.apart, self.keep, self.pass_over]
        )
        moves += [self.slots]
        if self.random.random() < 0.3:
            self.attempt(self.split())
            for step in (self.pass_over, self.apart, self.around_parts):
                if self.random.random() < 0.3:
                    self.attempt(step())
        for _ in range(steps):
            self.attempt(self.random.choice(moves)())
        return self.tree

    def attempt(self, tree: Tree | None) -> None:
        if tree is None or tree == self.tree:
            return
        found = self.lowered(tree)
        if isinstance(found, Refusal):
            self.refused.append(f"{found.reason} <- {show(tree)}")
        else:
            self.tree = tree

    def lowered(self, tree: Tree):
        try:
            return lower_tree(self.region, tree, self.derive, self.tiles)
        except Exception as error:
            error.add_note(f"{show(tree)}\nof\n{self.region}")
            raise

    # --- places

    def bodies(self, kernel: TreeKernel) -> list[tuple[Path, tuple[Node, ...], tuple[RangeLoop, ...]]]:
        """Every body, with the loops around it."""

        def visit(path: Path, body: tuple[Node, ...], around: tuple[RangeLoop, ...]) -> Iterator:
            yield path, body, around
            for n, node in enumerate(body):
                if isinstance(node, RangeLoop):
                    yield from visit((*path, n), node.body, (*around, node))

        return list(visit((), kernel.body, ()))

    def kernel(self) -> int:
        return self.random.randrange(len(self.tree))

    def changed(self, number: int, path: Path, body: tuple[Node, ...]) -> Tree:
        def put(of: tuple[Node, ...], rest: Path) -> tuple[Node, ...]:
            if not rest:
                return body
            node = of[rest[0]]
            assert isinstance(node, RangeLoop)
            return (*of[: rest[0]], replace(node, body=put(node.body, rest[1:])), *of[rest[0] + 1 :])

        kernel = self.tree[number]
        return (*self.tree[:number], replace(kernel, body=put(kernel.body, path)), *self.tree[number + 1 :])

    def nests(self, body: Sequence[Node]) -> list[Nest]:
        return [self.region.by_name[n.nest] for _, n in walk(body) if isinstance(n, Do | Merge)]

    def piece(self, body: tuple[Node, ...]) -> tuple[int, int]:
        if self.random.random() < 0.5:
            return 0, len(body)
        start = self.random.randrange(len(body))
        return start, self.random.randrange(start, len(body)) + 1

    def axis_of(self, body: Sequence[Node]) -> str | None:
        axes = sorted({a.name for n in self.nests(body) for a in (*n.axes, *n.reduced)})
        return self.random.choice(axes) if axes else None

    def size(self, axis: str, around: Sequence[RangeLoop]) -> int:
        outer = next((x for x in reversed(around) if x.axis == axis and not x.shares), None)
        extent = self.region.axes[axis].extent
        if outer is not None:
            return self.random.choice([d for d in range(1, outer.size + 1) if outer.size % d == 0])
        return self.random.choice([1, 2, 3, 4, 4, 8, 8, 16, -(-extent // 2), self.random.randint(1, extent)])

    def loop(self, axis: str, body: tuple[Node, ...], around: Sequence[RangeLoop], level: Level) -> RangeLoop:
        size = self.size(axis, around)
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        if self.random.random() < 0.2:
            inner = RangeLoop(axis, self.random.choice(divisors), body)
            return RangeLoop(axis, size, (inner,), level)
        return RangeLoop(axis, size, body, level)

    # --- steps

    def enclose(self) -> Tree | None:
        """A loop around some nodes that stand one after the other."""
        number = self.kernel()
        path, body, around = self.random.choice(self.bodies(self.tree[number]))
        if not body:
            return None
        start, stop = self.piece(body)
        axis = self.axis_of(body[start:stop])
        if axis is None:
            return None
        level: Level = "group" if self.random.random() < 0.1 else "serial"
        if self.random.random() < 0.1:
            loop = RangeLoop(axis, self.random.randint(1, 4), body[start:stop], shares=True)
        else:
            loop = self.loop(axis, body[start:stop], around, level)
        return self.changed(number, path, (*body[:start], loop, *body[stop:]))

    def blocks(self) -> Tree | None:
        """A loop over blocks around a kernel."""
        number = self.kernel()
        body = self.tree[number].body
        axis = self.axis_of(body)
        inner = [n for _, n in walk(body) if isinstance(n, RangeLoop) and n.axis == axis and not n.shares]
        if axis is None:
            return None
        size = self.random.choice([1, 2, 4, 8, 16]) * (inner[0].size if inner else 1)
        level: Level = self.random.choice(["grid", "grid", "grid", "mesh", "time"])
        return self.changed(number, (), (RangeLoop(axis, size, body, level),))

    def split(self) -> Tree | None:
        """Blocks have parts of a reduced axis, and a kernel merges them."""
        if len(self.tree) > 1 or any(isinstance(n, RangeLoop) for n in self.tree[0].body):
            return None
        reduced = sorted({a.name for n in self.region.nests for a in n.reduced})
        if not reduced:
            return None
        axis = self.random.choice(reduced)
        over = [n for n in self.region.nests if axis in {a.name for a in n.reduced}]
        first = self.with_needed([n.name for n in over])
        rest = [
            n.name
            for n in self.region.nests
            if n not in over and (n.name in self.region.outputs or n.name not in first)
        ]
        last = [n for n in self.with_needed(rest) if n not in {x.name for x in over}]
        parts = self.random.randint(2, 4)
        one: tuple[Node, ...] = tuple(map(Do, first))
        if self.random.random() < 0.7:
            one = (RangeLoop(axis, self.size(axis, ()), one),)
        one = (RangeLoop(axis, parts, one, "grid", shares=True),)
        two = (*(Merge(n.name) for n in over), *map(Do, last))
        return TreeKernel("p", one), TreeKernel("q", two)

    def with_needed(self, names: Sequence[str]) -> list[str]:
        wanted = set(names)
        for nest in reversed(self.region.nests):
            if nest.name in wanted:
                wanted |= nest.reads & self.region.by_name.keys()
        return [n.name for n in self.region.nests if n.name in wanted]

    def cluster(self) -> Tree | None:
        """Blocks of a cluster have parts of a reduced axis, and merge them."""
        number = self.kernel()
        path, body, around = self.random.choice(self.bodies(self.tree[number]))
        if not body:
            return None
        start, stop = self.piece(body)
        inside = self.nests(body[start:stop])
        reduced = sorted({a.name for n in inside for a in n.reduced})
        if not reduced:
            return None
        axis = self.random.choice(reduced)
        if self.random.random() < 0.5:
            loop = RangeLoop(axis, self.random.randint(2, 3), body[start:stop], "cluster", shares=True)
        else:
            loop = self.loop(axis, body[start:stop], around, "cluster")
        over = [n for n in inside if axis in {a.name for a in n.reduced}]
        merges = (Merge(n.name) for n in over)
        return self.changed(number, path, (*body[:start], loop, *merges, *body[stop:]))

    def again(self) -> Tree | None:
        """A nest is computed once more, somewhere else, maybe with all that it reads."""
        name = self.random.choice(self.region.nests).name
        number = self.kernel()
        path, body, _ = self.random.choice(self.bodies(self.tree[number]))
        at = self.random.randint(0, len(body))
        more = self.with_needed([name]) if self.random.random() < 0.5 else [name]
        return self.changed(number, path, (*body[:at], *map(Do, more), *body[at:]))

    def apart(self) -> Tree | None:
        """A loop becomes two, the second maybe with another tile."""
        number = self.kernel()
        found = [(p, b, r, n) for p, b, r in self.bodies(self.tree[number]) for n, x in enumerate(b)
                 if isinstance(x, RangeLoop) and x.level == "serial" and len(x.body) > 1]  # fmt: skip
        if not found:
            return None
        path, body, around, at = self.random.choice(found)
        loop = body[at]
        assert isinstance(loop, RangeLoop)
        cut = self.random.randint(1, len(loop.body) - 1)
        size = loop.size if loop.shares or self.random.random() < 0.5 else self.size(loop.axis, around)
        again = [n for n in loop.body[:cut] if isinstance(n, Do) and self.random.random() < 0.5]
        two = replace(loop, body=loop.body[:cut]), replace(loop, body=(*again, *loop.body[cut:]), size=size)
        return self.changed(number, path, (*body[:at], *two, *body[at + 1 :]))

    def keep(self) -> Tree | None:
        """An input is kept."""
        number = self.kernel()
        path, body, _ = self.random.choice(self.bodies(self.tree[number]))
        tensor = self.random.choice(self.region.inputs).name
        at = self.random.randint(0, len(body))
        return self.changed(number, path, (*body[:at], Keep(tensor, "shared"), *body[at:]))

    def pass_over(self) -> Tree | None:
        """An input is kept, and read by two loops: one is taken apart, with tiles of its own."""
        tree, self.tree = self.tree, self.keep() or self.tree
        apart = self.apart()
        self.tree = tree
        return apart

    def around_parts(self) -> Tree | None:
        """In blocks that have parts of an axis: a loop over another axis around the loop over that one."""
        loop = self.tree[0].body[0]
        if len(self.tree) < 2 or not isinstance(loop, RangeLoop) or len(loop.body) != 1:
            return None
        body = loop.body
        others = sorted({a.name for n in self.nests(body) for a in (*n.axes, *n.reduced)} - {loop.axis})
        if not others:
            return None
        axis = self.random.choice(others)
        if self.random.random() < 0.5 and isinstance(body[0], RangeLoop):  # what stands first gets a loop of its own
            body = (*body[0].body[:1], replace(body[0], body=body[0].body[1:] or body[0].body))
        return self.changed(0, (0,), (RangeLoop(axis, self.size(axis, ()), body),))

    def slots(self) -> Tree | None:
        number = self.kernel()
        found = [(p, b, n) for p, b, _ in self.bodies(self.tree[number]) for n, x in enumerate(b)
                 if isinstance(x, RangeLoop) and x.level == "serial"]  # fmt: skip
        if not found:
            return None
        path, body, at = self.random.choice(found)
        loop = body[at]
        assert isinstance(loop, RangeLoop)
        return self.changed(number, path, (*body[:at], replace(loop, slots=2), *body[at + 1 :]))
