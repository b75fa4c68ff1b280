"""Operations that have no nest (convolutions, sorts, transforms, loops): records of the numbers that their time depends on.

A library or a loop of XLA's own does the work of such operations. The frontend notes what each is (`External.work`), for the price
only: nothing that decides what is computed looks at it.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from pallasfuse.first_time import Later
from pallasfuse.ir.boundary import NamedBoundary


@dataclass(frozen=True, slots=True)
class Convolution:
    """Sums of products over windows that move along some dimensions: for each group of channels, a product of matrices.

    Its rows are the positions of the windows, in all images; its columns the group's own results at each position; and it sums over
    the elements of a window in all channels of the group.
    """

    groups: int
    rows: int
    columns: int
    summed: int
    operand_dtype: str
    moved_bytes: float
    """The bytes of both operands and the result."""
    window: tuple[int, ...] = ()
    """The lengths of a window, one for each dimension along which it moves."""
    images: int = 1
    """The images of the result, each of which has the same share of the rows."""
    channels: int = 1
    """The channels of a group, all of which are summed at each position of a window."""
    apart: int = 1
    """Each result looks at one in so many positions of a window, since the others meet zeros between the elements of an image."""
    holes: float = 1.0
    """The elements of a window, holes counted where a library takes them for elements, over those that it has."""
    of_weights: bool = False
    """Its windows have more elements than it has results in an image: the gradient of weights, whose images stand for channels."""
    padded_bytes: float = 0.0
    """The bytes of images that are written anew, with zeros at one end, before a library reads them."""
    turned: tuple[bool, bool, bool] = (False, False, False)
    """For both operands and the result: do their dimensions lie in another order than a library has them? Not for weights, which
    are small."""
    lies_otherwise: bool = False
    """Does XLA's CPU backend have a library for it that wants its dimensions in another order?"""
    met: int = 0
    """The elements that are summed as far as a window can lie in an image, and not in its padding; 0 where nobody knows."""
    images_are_groups: bool = False
    """Its groups are of images, each of which has results of its own."""
    of_examples: bool = False
    """Its groups are of features, and have windows with more elements than results: each has a gradient of weights of its own."""

    @property
    def positions(self) -> int:
        """The elements of one channel that are looked at for one result."""
        return max(1, self.summed // max(1, self.channels))

    def without_padding(self) -> "Convolution":
        """Returns the convolution without the products with padding, which a library leaves out where a window is mostly that."""
        return replace(self, summed=min(self.summed, self.met)) if self.met else self

    @property
    def square(self) -> bool:
        """Is a window as long along one dimension as along another?"""
        return len(self.window) > 1 and len(set(self.window)) == 1

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.columns * self.summed


@dataclass(frozen=True, slots=True)
class Ordering:
    """Rows that are brought into order, each with the operands that move along."""

    rows: int
    length: int
    element_bytes: float
    """The bytes of one position, in all operands together."""
    strided: bool = False
    """Neighbours of a row lie apart in memory."""
    kept: int | None = None
    """Only the first so many of each row are wanted; None: all of them."""
    by_integers: bool = False
    """Rows are ordered by integers."""
    tells_equals_apart: bool = False
    """Equal keys keep their order, and no operand has their positions, by which a network of comparisons tells them apart."""


@dataclass(frozen=True, slots=True)
class Running:
    """Running sums, products or extremes of rows: a result at each position, of all positions until there."""

    rows: int
    length: int
    element_bytes: float
    of_logarithms: bool = False
    """Numbers are added of which there are logarithms: each step takes an exponential and a logarithm."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A reduction over a window around each result."""

    results: int
    window: int
    element_bytes: float
    read_bytes: float


@dataclass(frozen=True, slots=True)
class Fourier:
    """Transforms of so many arrays, along some dimensions, from and to frequencies."""

    arrays: int
    lengths: tuple[int, ...]
    moved_bytes: float


type EliminationKind = Literal["factored", "pivoted", "reflected", "solved"]
"""Without a choice of rows, with one, by reflections, or the solution of a triangular system."""


@dataclass(frozen=True, slots=True)
class Elimination:
    """A factorisation of matrices, or the solution of triangular systems: one column after the other."""

    size: int
    """The columns that are eliminated, of each matrix."""
    operations: float
    """Multiplications and additions, of all matrices together."""
    moved_bytes: float
    kind: EliminationKind = "pivoted"
    matrices: int = 1
    """The matrices of a batch, which are eliminated together."""
    right_sides: int = 0
    """The right sides of each triangular system that is solved; 0 for factorisations."""
    rows: int = 0
    """The rows of each matrix."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random words of 32 bits, each from a counter, by rounds of integer operations."""

    words: int


@dataclass(frozen=True, slots=True)
class Special:
    """A special function of each element, such as the logarithm of Gamma: a series, or as many steps as the values need."""

    name: str
    elements: int


@dataclass(frozen=True, slots=True)
class Trips[Program]:
    """A loop with a known number of trips, one after the other."""

    trips: int
    body: Later[Program]
    constants: int
    """The first inputs of the body that are the same in every trip."""
    boundary: Later[NamedBoundary]
    """The tensors of the body that the loop slices, carries and stacks."""


@dataclass(frozen=True, slots=True)
class Branches[Program]:
    """One of several programs, whichever the data choose."""

    branches: tuple[Later[Program], ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    """Another type or name of the same bits: nothing is computed."""


@dataclass(frozen=True, slots=True)
class Priced:
    """Work that somebody else has priced: a loop that is one kernel."""

    us: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """Work that only the data, or the user's own code, decide: a loop until something holds, a call back to Python."""

    what: str


PlainWork = (
    Convolution
    | Ordering
    | Running
    | Windows
    | Fourier
    | Elimination
    | Drawn
    | Special
    | Trips[Any]
    | Branches[Any]
    | Nothing
    | Priced
    | Unknown
)
