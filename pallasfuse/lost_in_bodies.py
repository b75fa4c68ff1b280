"""A form of a program may lose products and concatenations that kernels in bodies of loops and branches could have had.

A form is the same program written otherwise. This module counts such operations in the bodies before and after, and says which are
fewer: `written_out` then compares plans, and not forms alone.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.jaxpr_frontend import called, flatten
from pallasfuse.loop_calls import loops_as_kernels
from pallasfuse.unrolled_loops import loops

OF_KERNELS = ("concatenate", "dot_general")
"""Operations that kernels can take part in, of which a form must not have others: they join parts of axes, and products. The
choices and sums that may stand for these they only compute."""


def that_kernels_have(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields a text for each equation that kernels can take part in, by what it does to which shapes."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in OF_KERNELS:
            shapes = [_compat.shape_of(a) for a in eqn.invars]
            yield f"{eqn.primitive.name} {shapes} {eqn.params.get('dimension_numbers', eqn.params.get('dimension'))}"


def lost_in_bodies(before: Jaxpr, after: Jaxpr) -> set[str]:
    """Returns the texts of products and concatenations of which a form has fewer in its bodies than the program.

    Loops that are kernels in the form have lost nothing: their kernels compute the whole body.
    """
    kernels = _that_are_kernels(before, after)
    had, has = (
        Counter(t for body in _bodies(jaxpr, kernels) for t in that_kernels_have(body)) for jaxpr in (before, after)
    )
    return set(had - has)


def bodies_left(before: Jaxpr, after: Jaxpr) -> Iterator[Jaxpr]:
    """Yields the bodies of a program, flat, however deep, but for those of loops that are kernels in a form of it."""
    yield from _bodies(before, _that_are_kernels(before, after))


def _that_are_kernels(before: Jaxpr, after: Jaxpr) -> frozenset[str]:
    """Returns the names of loops that are kernels in a form of a program: of all loops with the name, if there are several.

    A loop that goes on in chunks is one, if each is a kernel.
    """
    of_unknown_length = (e for e in loops(after) if "length" not in e.params)
    chunked = (e for e in of_unknown_length if any(loops_as_kernels(b, inside=False) for b in called(e)))
    kernels = Counter(map(_name, chain((one.loop for one in loops_as_kernels(after)), chunked)))
    own = Counter(map(_name, loops(before)))
    return frozenset(name for name, count in kernels.items() if count >= own[name])


def _name(eqn: JaxprEqn) -> str:
    """Names a loop by its line and its trips, which other forms of it have, too."""
    return f"{_compat.source_summary(eqn)} {eqn.params.get('length')}"


def _bodies(jaxpr: Jaxpr, without: frozenset[str]) -> Iterator[Jaxpr]:
    """Yields the bodies of loops and branches, flat, however deep. without: the names of loops that do not count."""
    for body in (b for eqn in jaxpr.eqns if not (without and _name(eqn) in without) for b in called(eqn)):
        flat = flatten(body)
        yield flat
        yield from _bodies(flat, without)
