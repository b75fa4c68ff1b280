"""Mistakes in what runs: the emitters, the execution of a plan, and the rules of the primitive."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse.emission.interpreter import Tile
from tests.mutation.planting import Mutant, Plant, instead_of, result_of, value_at

_TABLE = "pallasfuse.emission.elementwise:TABLE"
_INTERPRETER = "pallasfuse.emission.interpreter:Interpreter"
_LOOKUPS = "pallasfuse.emission.lookups"
_XLA = "pallasfuse.xla_backend.loops:_XlaMachine"
_PALLAS = "pallasfuse.emission.pallas_kernel:_PallasMachine"


def _is_square(array: Any) -> bool:
    return array.ndim == 2 and array.shape[0] == array.shape[1]


def _transposed(tile: Tile) -> Tile:
    return Tile(tile.array.T, tile.axes) if _is_square(tile.array) else tile


def _not_moved_back(real: Any, self: Any, starts: Any) -> None:
    tiles = dict(self.program.grid)
    real(self, {a: -(-s // jnp.int32(tiles[a])) * jnp.int32(tiles[a]) for a, s in starts.items()})


def _decoded_in_another_order(real: Any, self: Any, starts: Any) -> None:
    tiles = dict(self.program.grid)
    axes = list(starts)
    blocks = [starts[a] // jnp.int32(tiles[a]) for a in axes][::-1]
    counts = [-(-a.extent // tiles[a]) for a in axes]
    real(self, {a: jnp.minimum(b, n - 1) * jnp.int32(tiles[a]) for a, b, n in zip(axes, blocks, counts, strict=True)})


def _loop(change_start: int = 0, change_stop: int = 0, *, reverse: bool = False) -> Any:
    def instead(real: Any, self: Any, start: Any, stop: Any, body: Any, init: Any) -> Any:
        def step(trip: Any, state: Any) -> Any:
            return body(trip, state)[::-1]

        return real(self, start + change_start, stop + change_stop, step if reverse else body, init)

    return instead


def _first_row_only(windows: Any) -> Any:
    return {a: replace(w, start=0) for a, w in windows.items()}


def _other_values(results: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(results, list(results.values())[::-1], strict=True))


def _shim(module: Any, **changed: Any) -> SimpleNamespace:
    """A module with some functions replaced."""
    return SimpleNamespace(**vars(module) | changed)


def _vmap(change_in: Any, out: int = 0) -> Plant:
    """The batching rule maps other dimensions."""

    def vmap(function: Any, in_axes: Any, out_axes: Any) -> Any:
        return jax.vmap(function, in_axes=[change_in(a) for a in in_axes], out_axes=out)

    return value_at("pallasfuse.primitive:jax", _shim(jax, vmap=vmap))


def _jvp(function: Any, primals: Any, tangents: Any) -> Any:
    return jax.jvp(function, primals, tangents[::-1])


def _mutant(name: str, room: str, plant: Plant, subject: str, check: str = "xla") -> Mutant:
    return Mutant(name, room, plant, subject, check)


def _taken_from_the_next_tile(real: Any, self: Any, value: Any, over: Any, scope: Any) -> Any:
    windows = {a: replace(w, start=w.start + 1) if a in over else w for a, w in scope.windows.items()}
    return real(self, value, over, replace(scope, windows=windows))


MUTANTS = (
    _mutant(
        "first_pages_of_the_table",
        "emission/lookups",
        instead_of(
            f"{_LOOKUPS}:_entries",
            lambda real, x, table, windows, **how: real(x, table, _first_row_only(windows), **how),
        ),
        "whole pages",
    ),
    _mutant(
        "first_rows_of_each_page",
        "emission/lookups",
        instead_of(f"{_LOOKUPS}:_positions", lambda real, window: real(replace(window, start=0))),
        "pages",
    ),
    _mutant(
        "pages_of_any_place",
        "emission/lookups",
        instead_of(f"{_LOOKUPS}:in_whole_blocks", lambda real, program, lookup: frozenset(program.order)),
        "pages",
    ),
    _mutant(
        "first_pages_in_kernels",
        "emission/pallas_kernel",
        instead_of(f"{_PALLAS}._looked_up", lambda real, self, x, i, w, a: real(self, x, i, _first_row_only(w), a)),
        "pages",
        "interpret",
    ),
    _mutant(
        "filled_where_in_range",
        "emission/lookups",
        result_of(f"{_LOOKUPS}:is_inside", lambda inside, *_: ~inside),
        "whole pages",
    ),
    _mutant(
        "taken_one_place_late",
        "xla_backend/loops",
        instead_of("pallasfuse.xla_backend.loops:_XlaInterpreter._picked", _taken_from_the_next_tile),
        "taken",
    ),
    _mutant("exponential_of_base_two", "emission/elementwise", value_at(f"{_TABLE}[exp]", lax.exp2), "softmax"),
    _mutant("maximum_is_minimum", "emission/elementwise", value_at(f"{_TABLE}[max]", jnp.minimum), "softmax"),
    _mutant(
        "subtraction_swapped_in_kernels",
        "emission/elementwise",
        value_at(f"{_TABLE}[sub]", lambda a, b: b - a),
        "softmax",
    ),
    _mutant(
        "division_is_multiplication", "emission/elementwise", value_at(f"{_TABLE}[div]", lambda a, b: a * b), "norm_dot"
    ),
    _mutant("at_most_is_less", "emission/elementwise", value_at(f"{_TABLE}[le]", lambda a, b: a < b), "lower_triangle"),
    _mutant(
        "choice_swapped",
        "emission/elementwise",
        instead_of("pallasfuse.emission.elementwise:select", lambda real, p, a, b: real(p, b, a)),
        "lower_triangle",
    ),
    _mutant(
        "maximum_of_a_tile_is_minimum",
        "emission/elementwise",
        value_at("pallasfuse.emission.elementwise:REDUCTIONS[max]", lambda x, axes: jnp.min(x, axis=axes)),
        "total_and_largest",
    ),
    _mutant(
        "folds_the_other_axis",
        "emission/interpreter",
        instead_of(f"{_INTERPRETER}._fold", lambda real, self, tile, r, over: real(self, _transposed(tile), r, over)),
        "softmax",
    ),
    _mutant(
        "position_without_start",
        "emission/interpreter",
        instead_of(
            f"{_INTERPRETER}._position",
            lambda real, self, axis, dtype, scope: Tile(lax.iota(jnp.dtype(dtype), scope.windows[axis].size), (axis,)),
        ),
        "lower_triangle",
    ),
    _mutant(
        "visits_more_than_there_is",
        "emission/interpreter",
        value_at("pallasfuse.emission.interpreter:jnp", _shim(jnp, minimum=lambda a, b: a)),
        "scaled_max",
        "interpret",
    ),
    _mutant(
        "load_off_by_one",
        "xla_backend",
        instead_of("pallasfuse.xla_backend.loops:_starts", lambda real, *a: [s + 1 for s in real(*a)]),
        "variance",
    ),
    _mutant(
        "load_transposed_in_kernels",
        "xla_backend",
        result_of(f"{_XLA}.load", lambda x, *_: x.T if _is_square(x) else x),
        "softmax",
    ),
    _mutant(
        "store_transposed",
        "xla_backend",
        instead_of(f"{_XLA}.store", lambda real, self, t, i, w, v: real(self, t, i, w, v.T if _is_square(v) else v)),
        "softmax",
    ),
    _mutant(
        "store_to_the_first_block",
        "xla_backend",
        instead_of(f"{_XLA}.store", lambda real, self, t, i, w, v: real(self, t, i, _first_row_only(w), v)),
        "softmax",
    ),
    _mutant(
        "last_block_not_moved_back",
        "xla_backend",
        instead_of(f"{_INTERPRETER}.run_block", _not_moved_back),
        "lower_triangle",
    ),
    _mutant(
        "blocks_decoded_in_another_order",
        "xla_backend",
        instead_of(f"{_INTERPRETER}.run_block", _decoded_in_another_order),
        "batched_attention",
    ),
    _mutant("last_trip_missing", "xla_backend", instead_of(f"{_XLA}.loop", _loop(0, -1)), "softmax"),
    _mutant("first_trip_missing", "xla_backend", instead_of(f"{_XLA}.loop", _loop(1, 0)), "softmax"),
    _mutant("carries_in_another_order", "xla_backend", instead_of(f"{_XLA}.loop", _loop(reverse=True)), "variance"),
    _mutant(
        "contracts_the_other_axis",
        "xla_backend",
        instead_of(f"{_XLA}.contract", lambda real, self, lhs, *rest: real(self, _transposed(lhs), *rest)),
        "square_products",
    ),
    _mutant(
        "loads_without_mask",
        "emission/pallas_kernel",
        instead_of("pallasfuse._compat:masked_load", lambda real, ref, mask: real(ref, None)),
        "attention",
        "interpret",
    ),
    _mutant(
        "stores_without_mask",
        "emission/pallas_kernel",
        instead_of("pallasfuse._compat:masked_store", lambda real, ref, value, mask: real(ref, value, None)),
        "attention",
        "stores",
    ),
    _mutant(
        "grid_decoded_in_another_order",
        "emission/pallas_kernel",
        instead_of(f"{_INTERPRETER}.run_block", _decoded_in_another_order),
        "two_grid_axes",
        "interpret",
    ),
    _mutant(
        "product_contracts_the_other_axis",
        "emission/pallas_kernel",
        instead_of(f"{_PALLAS}.contract", lambda real, self, lhs, *rest: real(self, _transposed(lhs), *rest)),
        "wide_products",
        "interpret",
    ),
    _mutant(
        "last_trip_of_a_kernel_missing",
        "emission/pallas_kernel",
        instead_of(f"{_PALLAS}.loop", _loop(0, -1)),
        "softmax",
        "interpret",
    ),
    _mutant(
        "sum_of_products_is_a_maximum",
        "emission/pallas_kernel",
        value_at("pallasfuse.emission.pallas_kernel:jnp", _shim(jnp, sum=jnp.max)),
        "two_contracted_axes",
        "interpret",
    ),
    _mutant(
        "results_reversed",
        "execution",
        result_of("pallasfuse.execution:execute", lambda r, *_: r[::-1]),
        "mean_and_variance",
    ),
    _mutant(
        "results_of_a_kernel_swapped",
        "execution",
        result_of("pallasfuse.execution:_EMITTERS[xla]", lambda r, *_: _other_values(r)),
        "mean_and_variance",
    ),
    _mutant(
        "inputs_of_a_kernel_swapped",
        "execution",
        instead_of("pallasfuse.execution:_EMITTERS[interpret]", lambda real, p, inputs: real(p, _other_values(inputs))),
        "two_arguments",
        "interpret",
    ),
    _mutant(
        "steps_reversed", "pipeline", result_of("pallasfuse.pipeline:steps_of", lambda s, *_: s[::-1]), "cross_entropy"
    ),
    _mutant(
        "constants_swapped",
        "primitive",
        result_of("pallasfuse.execution:call_consts", lambda c, *_: c[::-1]),
        "captured",
    ),
    _mutant("batched_along_another_dimension", "primitive", _vmap(lambda a: a and 0), "batched"),
    _mutant("batched_results_along_another_dimension", "primitive", _vmap(lambda a: a, out=1), "batched"),
    _mutant("shared_argument_taken_as_batched", "primitive", _vmap(lambda a: a or 0), "batched_one"),
    _mutant(
        "tangents_swapped", "primitive", value_at("pallasfuse.primitive:jax", _shim(jax, jvp=_jvp)), "differentiated"
    ),
    _mutant(
        "arguments_reversed",
        "api",
        result_of("pallasfuse.api:FusedFunction.leaves", lambda x, *_: x[::-1]),
        "two_arguments",
    ),
)
