"""XLA's kernels of whole programs, compiled for an H100 without one, beside those that the price takes XLA to make.

python benchmarks/xla_kernels.py NAMES [--show 8]

A row for each program: kernels and megabytes that they read and write, by the price and by XLA, and the time of both at the
memory's rate and a launch each; the ratio of these says whether the structure is right, before any rate of a device. `--show`
prints the largest kernels of both. Libraries' kernels are those that XLA chooses without a GPU to time them on.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import h100  # sets what JAX looks at when it is imported

_LAUNCH_US, _BYTES_PER_US = 1.5, 2.4e6
_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8,
    "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_LINE = re.compile(r"^(ROOT )?%?([\w.\-]+) = (\(.*?\)(?= [a-z])|\S+) ([\w\-]+)\((.*)$")
_IN_PLACE = frozenset({"bitcast", "get-tuple-element", "reshape", "transpose", "copy"})
_TAKES = frozenset({"slice", "dynamic-slice", "gather"})
_CHANGES = frozenset({"dynamic-update-slice", "scatter"})
_NO_KERNELS = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota", "async-done",
    "async-update", "fusion-done", "copy-done",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, as often as it runs."""

    name: str
    runs: int
    read_bytes: float
    written_bytes: float

    @property
    def us(self) -> float:
        """The time at the memory's rate, with a launch."""
        return self.runs * (_LAUNCH_US + (self.read_bytes + self.written_bytes) / _BYTES_PER_US)


@dataclass(slots=True)
class _Line:
    """One instruction of HLO."""

    name: str
    result: str
    operation: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool


@dataclass(slots=True)
class Module:
    """The computations of a module's text, by their names."""

    entry: str = ""
    computations: dict[str, list[_Line]] = field(default_factory=dict)


def size_of(shape: str) -> float:
    """Returns the bytes of an array or a tuple of arrays, as HLO writes its type."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return float(sum(_BYTES.get(kind, 0) * prod(int(d) for d in dims.split(",") if d) for kind, dims in found))


def parsed(text: str) -> Module:
    """Returns the computations of the text of a compiled module."""
    module, lines = Module(), list[_Line]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = module.computations[head[2]] = []
            if head[1]:
                module.entry = head[2]
        elif found := _LINE.match(line.strip()):
            root, name, result, operation, rest = found.groups()
            end = _closing(rest)
            operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
            lines.append(_Line(name, result, operation, operands, rest[:end], rest[end:], bool(root)))
    return module


def _closing(text: str) -> int:
    """The position of the parenthesis that closes one that is open at the start."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return at
    return len(text)


def kernels(module: Module, name: str = "", runs: int = 1) -> Iterator[Kernel]:
    """Yields the kernels of a computation, of the entry by default, with those of loops as often as these run."""
    lines = module.computations[name or module.entry]
    sizes = {line.name: size_of(line.result) for line in lines}
    for line in lines:
        if line.operation in _NO_KERNELS:
            continue
        called = re.search(r"(?:to_apply|calls|body)=%?([\w.\-]+)", line.attributes)
        if line.operation == "while" and called:
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', line.attributes)
            yield from kernels(module, called[1], runs * (int(known[1]) if known else 1))
        elif line.operation == "conditional":
            branches = re.findall(r"(?:branch_computations=\{|true_computation=)%?([\w.\-]+)", line.attributes)
            yield from kernels(module, branches[0], runs)
        elif line.operation == "call" and called:
            yield from kernels(module, called[1], runs)
        elif line.operation.startswith("fusion") and called:
            fused = module.computations[called[1]]
            inner = [x for x in fused if x.operation == "fusion"]
            if line.operation == "fusion-start" and inner:
                fused = module.computations[re.search(r"calls=%?([\w.\-]+)", inner[0].attributes)[1]]  # type: ignore[index]
            read = _read(fused)
            moved = sum(min(read.get(n, 0.0), sizes.get(o, 0.0)) for n, o in enumerate(line.operands))
            yield Kernel(line.name, runs, moved, _written(fused))
        else:
            yield Kernel(line.name, runs, sum(sizes.get(o, 0.0) for o in line.operands), sizes[line.name])


def _read(fused: Sequence[_Line]) -> dict[int, float]:
    """The bytes that a fused computation reads of each parameter: less than all where it only takes a part."""
    lines = {line.name: line for line in fused}
    number = {line.name: int(line.arguments) for line in fused if line.operation == "parameter"}
    same = {name: name for name in number}
    found = dict.fromkeys(number.values(), 0.0)
    for line in fused:
        for at, operand in enumerate(line.operands):
            source = same.get(operand)
            if source is None:
                continue
            if line.operation in _IN_PLACE:
                same[line.name] = source
                continue
            moved = size_of(lines[operand].result)
            if at == 0 and line.operation in _TAKES:
                moved = min(moved, size_of(line.result))
            elif at == 0 and line.operation in _CHANGES:
                moved = 0.0
            found[number[source]] = max(found[number[source]], moved)
    return found


def _written(fused: Sequence[_Line]) -> float:
    """The bytes that a fused computation writes: of an update in place, those that change."""
    lines = {line.name: line for line in fused}
    (root,) = (line for line in fused if line.is_root)

    def of(line: _Line) -> float:
        while line.operation == "bitcast" and line.operands[0] in lines:
            line = lines[line.operands[0]]
        if line.operation == "dynamic-update-slice" and line.operands[1] in lines:
            line = lines[line.operands[1]]
        return size_of(line.result)

    return sum(of(lines[o]) for o in root.operands if o in lines) if root.operation == "tuple" else of(root)


def moved_bytes(found: Sequence[Kernel]) -> float:
    """Returns the bytes that kernels read and write."""
    return sum(k.runs * (k.read_bytes + k.written_bytes) for k in found)


def priced(program, made=frozenset(), runs: int = 1) -> Iterator[Kernel]:
    """Yields the kernels that the price takes XLA to make of a `LoopProgram`."""
    from pallasfuse.device import assumed
    from pallasfuse.ir.plain_work import Branches, Trips
    from pallasfuse.price.xla import kernels_on, unchanging
    from pallasfuse.price.xla_forms import Opaque

    for kernel in kernels_on(assumed("gpu"), program, made):
        work = kernel.work if isinstance(kernel, Opaque) else None
        if isinstance(kernel, Opaque) and kernel.computed_with:
            continue
        if isinstance(work, Trips):
            yield from priced(work.body.value, unchanging(work.body.value, work.constants), runs * work.trips)
        elif isinstance(work, Branches):
            for branch in work.branches[:1]:
                yield from priced(branch.value, frozenset(), runs)
        else:
            yield Kernel(",".join(kernel.makes), runs, kernel.read_bytes, kernel.written_bytes)


def both(function, arguments) -> tuple[list[Kernel], list[Kernel]]:
    """Returns the kernels of a function by its price, and those that XLA compiles for an H100. arguments: shapes and types."""
    import jax

    from pallasfuse import FuseOptions, fuse
    from pallasfuse.jaxpr_frontend.conversion import convert

    traced = fuse(function, options=FuseOptions(check=False, target="mosaic_gpu")).trace(*arguments)
    ours = list(priced(convert(traced.call.jaxpr).program))
    leaves, tree = jax.tree.flatten(arguments)
    compiled = h100.compile_for_h100(lambda *flat: function(*jax.tree.unflatten(tree, flat)), leaves)
    return ours, list(kernels(parsed(compiled.text)))


def main() -> None:
    from benchmarks import workloads
    from benchmarks.program_variants import step

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="programs of `benchmarks/workloads`")
    parser.add_argument("--show", type=int, default=0, help="print so many kernels of each program, the largest first")
    arguments = parser.parse_args()
    for entry in workloads.programs(tuple(arguments.names)):
        ours, xla = both(*step(workloads.build(entry, "gpu")))
        ratio = sum(k.us for k in ours) / sum(k.us for k in xla)
        counts = " / ".join(str(sum(k.runs for k in side)) for side in (ours, xla))
        moved = " / ".join(f"{moved_bytes(side) / 1e6:.1f}" for side in (ours, xla))
        print(f"{ratio:5.2f} {entry.name:42} kernels {counts}   MB {moved}", flush=True)
        for side, found in (("price", ours), ("XLA", xla)):
            for k in sorted(found, key=lambda k: -k.us)[: arguments.show]:
                print(
                    f"      {side:6} {k.runs:4} x {k.read_bytes / 1e6:9.2f} > {k.written_bytes / 1e6:9.2f} MB  {k.name[:60]}"
                )


if __name__ == "__main__":
    main()
