"""The programs on which mutants are noticed: those of `tests.programs_by_name`, and small ones that need one thing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasfuse as pf
from tests.programs_by_name import PROGRAMS, above_the_mean
from tests.property.programs import AXIS_NAMES

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Subject:
    """A function, its argument shapes, and how its kernels are tiled."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    offset: float = 0.0
    tile: int = 4
    tiles: Mapping[str, int] = field(default_factory=dict)
    parts: int | None = None
    """Into how many the rolled axis is split."""
    data: Callable[[], list[Array]] | None = None
    """Arguments; random ones without it."""
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f
    """What the caller does with the fused function."""

    def arguments(self) -> list[Array]:
        if self.data is not None:
            return self.data()
        random = np.random.default_rng(1)
        return [random.normal(self.offset, 1.0, s).astype(self.dtype) for s in self.shapes]

    @property
    def fuse_options(self) -> pf.FuseOptions:
        return pf.FuseOptions(tiles=self.options, parts=self.parts)

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        return tuple((n, self.tiles.get(n, self.tile)) for n in AXIS_NAMES)


def permuted(x, w):
    return jnp.sum(jnp.transpose(x, (1, 2, 0)) * w, -1)


def biased(x, b):
    return jnp.sum(jnp.tanh(x) * lax.broadcast_in_dim(b, x.shape, (1,)), -1)


def weighted_by_position(x):
    return jnp.sum(x * lax.broadcasted_iota(jnp.float32, x.shape, 1), -1)


def weighted_by_number(x):
    return jnp.sum(x * jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), -1)


def by_length(x, n, m):
    seen = jnp.where(jnp.arange(x.shape[1]) < n[:, None], x, -jnp.inf)
    return jnp.sum(jnp.exp(seen - jnp.max(seen, -1, keepdims=True)), -1) * m


def up_to(x, n):
    seen = jnp.where(jnp.arange(x.shape[1]) <= n[:, None], x, -jnp.inf)
    return jnp.sum(jnp.exp(seen - jnp.max(seen, -1, keepdims=True)), -1)


def masked_by_array(x, m):
    seen = jnp.where(m, x, -jnp.inf)
    return jnp.sum(jnp.exp(seen - jnp.max(seen, -1, keepdims=True)), -1)


def filled_by_array(q, k, v, m):
    return jax.nn.softmax(jnp.where(m, q @ k.T, -1e9), -1) @ v


def filled_twice(q, k, v, m, x, y):
    """The second mask adds numbers that are not whole, which no pass before the kernel may do."""
    seen = jnp.where(x[:, None] + y > 0.0, jnp.where(m, q @ k.T, -1e9), -1e9)
    return jax.nn.softmax(seen, -1) @ v


def _band() -> Array:
    """Rows that see a few columns, one that sees nothing, and one that sees its ends only."""
    rows, columns = np.arange(5)[:, None], np.arange(13)
    mask = (columns > 2 * rows) & (columns <= 2 * rows + 3)
    mask[2], mask[4] = False, (columns == 0) | (columns == 12)
    return mask


def _masked() -> list[Array]:
    return [np.random.default_rng(1).normal(size=(5, 13)).astype(np.float32), _band()]


def _filled() -> list[Array]:
    random = np.random.default_rng(1)
    return [*(random.normal(size=s).astype(np.float32) for s in ((5, 3), (13, 3), (13, 2))), _band()]


def _filled_twice() -> list[Array]:
    """The second mask hides all that the first one leaves of row 1."""
    x, y = np.ones(5, np.float32), np.zeros(13, np.float32)
    x[1] = -1.0
    return [*_filled(), x, y]


def _last_ones() -> list[Array]:
    return [_lengths()[0], np.asarray([12, 2**31 - 1, 0, 3, 8], np.int32)]


def _lengths() -> list[Array]:
    random = np.random.default_rng(1)
    return [
        random.normal(0.0, 1.0, (5, 13)).astype(np.float32),
        np.asarray([13, 1, 4, 5, 9], np.int32),
        np.asarray([2, 13, 7, 1, 3], np.int32),
    ]


def clamped(x):
    return jnp.sum(lax.clamp(-0.5, x, 0.25), -1)


def cubed(x):
    return jnp.sum(x**3, -1)


def binary_logarithm(x):
    return jnp.sum(jnp.log2(1 + x * x), -1)


def truncated(x):
    return jnp.sum((3 * x).astype(jnp.int32).astype(jnp.float32), -1)


@jax.jit
def _two_results(a, b):
    return a - b, a * b


def calls(x, y):
    difference, product = _two_results(x, y)
    return jnp.sum(difference / (1 + product * product), -1)


def largest_and_smallest(x):
    return jnp.max(x, -1), jnp.min(x, -1)


def mean_and_variance(x):
    m = jnp.mean(x, -1)
    return m, jnp.mean((x - m[:, None]) ** 2, -1)


def total_and_largest(x):
    m = jnp.max(x, -1)
    return jnp.sum(jnp.exp(x - m[:, None]), -1), m


def largest_of_scaled(x):
    """A maximum of values that are multiplied by a number of unknown sign."""
    return jnp.max(x * jnp.sum(x, -1, keepdims=True), -1)


def largest_of_shifted(x):
    return jnp.max(x - jnp.mean(x, -1, keepdims=True), -1)


def product_of_scaled(x):
    return jnp.prod(x / jnp.sum(1 + x * x, -1, keepdims=True), -1)


def masked_shifted(x):
    """A maximum in which zeros take part that a frame does not move."""
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None, :]
    return jnp.max(jnp.where(j <= i, x - jnp.mean(x, -1, keepdims=True), 0.0), -1)


def waves(x):
    return jnp.sum(jnp.cos(x - jnp.mean(x, -1, keepdims=True)), -1)


def sum_of_scaled(x):
    return jnp.sum(x * jnp.sum(x, -1, keepdims=True), -1)


def around_a_share(x):
    """Squares around a number that is no mean."""
    return jnp.sum((x - jnp.sum(x, -1, keepdims=True) / 7) ** 2, -1)


def finite_mask(x):
    """What is masked still counts."""
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None, :]
    return jax.nn.softmax(jnp.where(j <= i, x, -1.0), axis=-1)


def zero_under_maximum(x):
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None, :]
    s = jnp.where(j <= i, x, 0.0)
    return jnp.max(s, -1), jnp.sum(s, -1)


def masked_total(mask):
    """A sum of exponentials of what a mask leaves: no product, so that every tile size is possible."""

    def function(x):
        i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None, :]
        s = jnp.where(mask(i, j), x, -jnp.inf)
        return jnp.sum(jnp.exp(s - jnp.max(s, -1, keepdims=True)), -1)

    return function


def exponentials_of_visible(x, mask):
    y = jnp.where(mask, x, -jnp.inf)
    return jnp.sum(jnp.where(mask, jnp.exp(y - jnp.max(y, -1, keepdims=True)), 0), -1)


def exponentials_of_all(x):
    return jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1)


def _one_row_hidden() -> list[Array]:
    x = np.random.default_rng(1).normal(size=(5, 13)).astype(np.float32)
    return [x, np.arange(5)[:, None] != np.full((1, 13), 2)]


def first_masked(x):
    """The maximum is its identity for a while, and terms count nevertheless."""
    m = jnp.max(jnp.where(jnp.arange(x.shape[1]) >= 4, x, -jnp.inf), -1, keepdims=True)
    return jnp.sum(m * x + x * x, -1)


def weighted_copy(x, y):
    """Reads the same map at two sets of axes."""
    a = jnp.exp(x)
    return jax.nn.softmax(jnp.sum(a[:, None] - 0.5 * a[None], -1) ** 2, -1) @ y


def normalized_rows(x):
    return jnp.sum(x / jnp.max(jnp.abs(x), -1, keepdims=True), -1)


def weighted_shares(x, w):
    return jnp.sum(x / jnp.sum(x, -1, keepdims=True) * w, -1)


def shares_of_itself(x):
    return jnp.sum(x / jnp.sum(x, -1, keepdims=True) * x + x, -1)


def centred_exponentials(x):
    return jnp.sum(jnp.exp(x - jnp.mean(x, -1, keepdims=True)), -1)


def shifted_by_another_mean(x, w):
    return jnp.sum((x - jnp.mean(x * w, -1, keepdims=True)) ** 2, -1)


def guarded_total(x):
    m = jnp.max(x, -1, keepdims=True)
    return jnp.sum(jnp.exp(x - m), -1)


def divided_then_largest(x):
    return jnp.max(x / jnp.sum(jnp.exp(x), -1, keepdims=True), -1)


_SCALE, _SHIFT = np.linspace(1.0, 2.0, 13, dtype=np.float32), np.linspace(0.0, 3.0, 13, dtype=np.float32)


def coarse_scores(scale):
    """Products of half-precision operands, scaled in float32."""

    def function(q, k, v):
        s = scale * jnp.einsum("id,jd->ij", q, k, preferred_element_type=jnp.float32)
        return jnp.sum(jax.nn.softmax(s, axis=-1)[..., None] * v, 1), jnp.max(s, -1)

    return function


def half_log_sum(q, k, v):
    s = 0.5 * jnp.einsum("id,jd->ij", q, k, preferred_element_type=jnp.float32)
    return jax.nn.softmax(s, axis=-1).astype(v.dtype) @ v, jax.nn.logsumexp(s, axis=-1)


def captured(x):
    return jax.nn.softmax(x * jnp.asarray(_SCALE) + jnp.asarray(_SHIFT), axis=-1)


def largest_less_taken(x, n):
    """What is taken is changed by a maximum of its row, which is not finished while it is taken."""
    taken = jnp.take_along_axis(x - x.max(-1, keepdims=True), n[:, None], axis=-1)[:, 0]
    return jnp.log(jnp.exp(x - x.max(-1, keepdims=True)).sum(-1)) - taken


def total_of_pages(q, pages, table):
    """A sum over the rows of pages, with weights that are framed at their maximum."""
    rows = jnp.take(pages, table, axis=0, mode="fill").reshape(table.shape[0], -1, pages.shape[-1])
    return jnp.einsum("bj,bjd->bd", jax.nn.softmax(jnp.einsum("bd,bjd->bj", q, rows)), rows)


def _pages() -> list[Array]:
    random = np.random.default_rng(6)
    table = np.array([[4, 0, 2], [1, 1, 3], [0, 5, 1]], np.int32)
    return [random.normal(size=(3, 5)).astype(np.float32), random.normal(size=(5, 6, 5)).astype(np.float32), table]


def _labelled() -> list[Array]:
    random = np.random.default_rng(4)
    return [random.normal(size=(5, 13)).astype(np.float32), np.array([0, 12, 7, -1, 5], np.int32)]


def _rows(*rows: Any) -> Callable[[], list[Array]]:
    return lambda: [np.asarray(rows, np.float32)]


def _shifted(offset: float, spread: float) -> Callable[[], list[Array]]:
    return lambda: [(offset + spread * np.random.default_rng(3).normal(size=(5, 64))).astype(np.float32)]


def within_segments(x, segment):
    seen = jnp.where(segment[:, None] == segment[None, :], x, -1e30)
    return jax.nn.softmax(seen, axis=-1)


def _segments() -> list[Array]:
    random = np.random.default_rng(5)
    return [random.normal(size=(13, 13)).astype(np.float32), np.repeat(np.arange(5, dtype=np.int32), 3)[:13]]


def scaled_by_folded_functions(x):
    return jax.nn.softmax(x * (jnp.tanh(0.5) * jnp.exp(1.5) / jnp.log(10.0)), axis=-1)


def divided_by_the_root_of_its_count(x):
    return jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1) / jnp.sqrt(13.0)


def odd_multiples(x):
    return jax.nn.softmax(jnp.maximum(x, 17.0 * x - 23.0) / jnp.sqrt(19.0), axis=-1)


_LATE = [-np.inf] * 6 + list(np.linspace(-1, 1, 7))
_NEVER = [-np.inf] * 13
_LOW = [-np.inf] * 5 + [-200.0] * 8

OWN: dict[str, Subject] = {
    "permuted": Subject(permuted, ((4, 4, 4), (4, 4, 4))),
    "biased": Subject(biased, ((4, 4), (4,))),
    "weighted_by_position": Subject(weighted_by_position, ((5, 5),)),
    "weighted_by_number": Subject(weighted_by_number, ((5, 5),)),
    "clamped": Subject(clamped, ((5, 13),)),
    "cubed": Subject(cubed, ((5, 13),)),
    "binary_logarithm": Subject(binary_logarithm, ((5, 13),)),
    "truncated": Subject(truncated, ((5, 13),)),
    "calls": Subject(calls, ((5, 13), (5, 13))),
    "square_sum": Subject(lambda x: jnp.sum(x * x, -1), ((5, 5),)),
    "square_dot": Subject(lambda x, w: x @ w, ((5, 5), (5, 5))),
    "square_softmax": Subject(lambda x: jax.nn.softmax(x, axis=-1), ((8, 8),)),
    "divided_by_a_root": Subject(lambda x: jax.nn.softmax(x / jnp.sqrt(32.0), axis=-1), ((5, 13),)),
    "divided_by_an_odd_root": Subject(lambda x: jax.nn.softmax(x / jnp.sqrt(17.0), axis=-1), ((5, 13),)),
    "scaled_by_the_root_of_its_count": Subject(divided_by_the_root_of_its_count, ((5, 13),)),
    "scaled_by_a_logarithm": Subject(lambda x: jax.nn.softmax(x * jnp.log(0.1), axis=-1), ((5, 13),)),
    "scaled_by_folded_functions": Subject(scaled_by_folded_functions, ((5, 13),)),
    "corrected_mean": Subject(
        lambda x: jnp.sum((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1) / (jnp.float32(13) - 1), ((5, 13),)
    ),
    "cubic": Subject(lambda x: jax.nn.softmax(0.7978846 * (x + 0.044715 * x**3), axis=-1), ((5, 13),)),
    "largest_of_seventeen": Subject(
        lambda x: jnp.sum(jnp.exp(17.0 * x - jnp.max(17.0 * x, -1, keepdims=True)), -1), ((5, 13),)
    ),
    "odd_multiples": Subject(odd_multiples, ((5, 13),)),
    "within_segments": Subject(within_segments, (), data=_segments),
    "largest_and_smallest": Subject(largest_and_smallest, ((5, 13),)),
    "mean_and_variance": Subject(mean_and_variance, ((5, 13),), offset=2.0),
    "total_and_largest": Subject(total_and_largest, ((5, 13),)),
    "largest_of_scaled": Subject(largest_of_scaled, ((5, 13),), offset=-0.2),
    "largest_of_shifted": Subject(largest_of_shifted, ((5, 13),)),
    "product_of_scaled": Subject(product_of_scaled, ((5, 13),)),
    "waves": Subject(waves, ((5, 13),)),
    "masked_shifted": Subject(masked_shifted, ((5, 13),)),
    "sum_of_scaled": Subject(sum_of_scaled, ((5, 13),)),
    "around_a_share": Subject(around_a_share, ((5, 13),)),
    "finite_mask": Subject(finite_mask, ((5, 13),)),
    "zero_under_maximum": Subject(zero_under_maximum, ((5, 13),)),
    "exponentials_of_visible": Subject(exponentials_of_visible, (), data=_one_row_hidden),
    "exponentials_of_all": Subject(exponentials_of_all, (), data=_rows([-np.inf] * 13)),
    "first_masked": Subject(first_masked, ((5, 13),)),
    "weighted_copy": Subject(weighted_copy, ((13, 3), (13, 2))),
    "lower_triangle": Subject(masked_total(lambda i, j: j <= i), ((13, 13),)),
    "upper_triangle": Subject(masked_total(lambda i, j: j >= i - 1), ((13, 13),)),
    "narrow_window": Subject(masked_total(lambda i, j: (j <= i) & (i - j < 7)), ((29, 29),)),
    "by_distance": Subject(masked_total(lambda i, j: jnp.abs(i - j) < 7), ((29, 29),)),
    "neither": Subject(masked_total(lambda i, j: ~((j > i + 9) | (i.astype("float32") < -1.0))), ((29, 29),)),
    "stretched": Subject(masked_total(lambda i, j: 2 * j <= i + 9), ((29, 29),)),
    "stretched_by_ones": Subject(masked_total(lambda i, j: 2 * j <= i - 9), ((15, 15),), tile=1),
    "variance_at_once": Subject(lambda x: jnp.var(x, axis=-1), ((5, 13),), tile=16),
    "two_trips": Subject(lambda x: jax.nn.softmax(x, axis=-1), ((5, 13),), tile=7),
    "coarse_scores": Subject(coarse_scores(0.5), ((5, 3), (13, 3), (13, 2)), "float16"),
    "half_log_sum": Subject(half_log_sum, ((5, 3), (13, 3), (13, 2)), "float16"),
    "negative_scores": Subject(coarse_scores(-0.5), ((5, 3), (13, 3), (13, 2)), "float16"),
    "divided_scores": Subject(
        lambda q, k, v: jax.nn.softmax((q @ k.T) / 4, axis=-1) @ v, ((5, 3), (13, 3), (13, 2)), "float16"
    ),
    "square_products": Subject(
        lambda q, k, v: jax.nn.softmax(q @ k.T, axis=-1) @ v, ((8, 8), (16, 8), (16, 8)), tile=8
    ),
    "wide_products": Subject(
        lambda q, k, v: jax.nn.softmax(q @ k.T, axis=-1) @ v, ((16, 16), (32, 16), (32, 16)), tile=16
    ),
    "sinks": Subject(masked_total(lambda i, j: (j < 6) | ((j <= i) & (j > i - 6))), ((29, 29),)),
    "normalized_large": Subject(normalized_rows, (), data=_rows([2e38] * 13)),
    "zero_sum_first": Subject(shares_of_itself, (), data=_rows([1.0, -1.0, 1.0, -1.0] + [0.5] * 9)),
    "large_shares": Subject(
        weighted_shares, (), data=lambda: [np.full((5, 13), 1e30, np.float32), np.full((5, 13), 1e10, np.float32)]
    ),
    "centred_steep": Subject(centred_exponentials, (), data=_rows([0.0] * 3 + [-400.0] + [0.0] * 9)),
    "another_mean": Subject(
        shifted_by_another_mean,
        (),
        data=lambda: [
            np.ones((5, 13), np.float32),
            np.tile(np.asarray([3e4] * 4 + [0.0] * 5 + [-3e4] * 4, np.float32), (5, 1)),
        ],
    ),
    "late_rows": Subject(guarded_total, (), data=_rows(_LATE, _NEVER, _LOW, _LATE[::-1], list(np.linspace(0, 1, 13)))),
    "late_logarithms": Subject(lambda x: jax.nn.logsumexp(x, axis=-1), (), data=_rows(_LATE, _NEVER, _LATE[::-1])),
    "ties": Subject(above_the_mean, (), data=_rows([0.0, 2.0] + [1.0] * 11, [0.0, 0.0, 3.0] + [1.0] * 10)),
    "half_products": Subject(
        lambda x, w: jnp.exp(x - jnp.max(x, -1, keepdims=True)) @ w,
        ((5, 4096), (4096, 3)),
        "float16",
        offset=1.0,
        tile=4,
    ),
    "late_divisor": Subject(
        divided_then_largest, (), data=_rows([-200.0] * 4 + list(np.linspace(-1, 1, 9)), [0.5] * 13)
    ),
    "factor_that_grows": Subject(
        lambda x: jnp.max(x * 1e-6 * jnp.exp(-jnp.abs(jnp.mean(x, -1, keepdims=True))), -1),
        (),
        data=_rows([87.0] * 4 + [-28.0] * 9, [0.5] * 13),
    ),
    "small_after_zeros": Subject(
        lambda x: jnp.var(jnp.exp(x), -1), (), data=_rows([-200.0] * 4 + list(np.linspace(-15, -13, 9)), [0.5] * 13)
    ),
    "far_from_zero": Subject(lambda x: jnp.var(x, -1), (), data=_shifted(1000.0, 1e-2)),
    "two_grid_axes": Subject(lambda x: jax.nn.softmax(x, axis=-1), ((3, 5, 7),), tiles={"i": 1}),
    "two_contracted_axes": Subject(
        lambda q, k: jnp.sum(jax.nn.softmax(jnp.einsum("ide,jed->ij", q, k), axis=-1) ** 2, -1), ((5, 6, 5), (13, 5, 6))
    ),
    "captured": Subject(captured, ((5, 13),)),
    "pages": Subject(total_of_pages, (), data=_pages),
    "whole pages": Subject(total_of_pages, (), data=_pages, tile=6),
    "taken": Subject(largest_less_taken, (), data=_labelled),
    "two_arguments": Subject(lambda x, y: jax.nn.softmax(x, axis=-1) - y, ((5, 13), (5, 13))),
    "batched": Subject(
        lambda x: jax.nn.softmax(x, axis=-1), ((4, 4, 4),), transform=lambda f: jax.vmap(f, in_axes=1, out_axes=2)
    ),
    "batched_one": Subject(
        lambda x, y: jax.nn.softmax(x * y, axis=-1), ((4, 4), (4,)), transform=lambda f: jax.vmap(f, in_axes=(1, None))
    ),
    "split_softmax": Subject(lambda x: jax.nn.softmax(x, axis=-1), ((5, 13),), parts=2),
    "split_log_sum": Subject(half_log_sum, ((5, 3), (13, 3), (13, 2)), "float16", parts=2),
    "split_largest": Subject(total_and_largest, ((5, 13),), parts=2),
    "split_variance": Subject(lambda x: jnp.var(x, -1), ((5, 14),), parts=3),
    "split_triangle": Subject(PROGRAMS["causal"].function, PROGRAMS["causal"].shapes, parts=2),
    "up_to": Subject(up_to, (), data=_last_ones, tiles={"i": 1}),
    "by_length": Subject(by_length, (), data=_lengths, tiles={"i": 1}),
    "masked_by_array": Subject(masked_by_array, (), data=_masked, tile=2),
    "filled_by_array": Subject(filled_by_array, (), data=_filled, tile=2),
    "filled_twice": Subject(filled_twice, (), data=_filled_twice, tile=2),
    "differentiated": Subject(
        lambda x, y: jnp.sum(jax.nn.softmax(x, axis=-1) * y * y),
        ((5, 13), (5, 13)),
        transform=lambda f: jax.grad(f, argnums=(0, 1)),
    ),
}

SUBJECTS: dict[str, Subject] = {n: Subject(c.function, c.shapes, c.dtype, c.offset) for n, c in PROGRAMS.items()} | OWN
