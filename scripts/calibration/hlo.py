"""The kernels of a compiled module, counted in its text: GPU launches, thunks on a CPU."""

import re

_KERNEL = re.compile(
    r"= .*? (fusion|call|reduce|dot|custom-call|copy|convolution|scatter|sort|reduce-window|cholesky)\("
)
_LOOP = re.compile(r" while\(.*?condition=%?([\w.-]+), body=%?([\w.-]+)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of every computation, and the name of the entry."""
    found: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return found, entry


def count_kernels(text: str) -> int:
    """The operations of the entry, and of one trip of its loops, that are kernels: fusions and what is not fused."""
    found, entry = computations(text)
    return _count(found, entry)


def _count(found: dict[str, list[str]], name: str) -> int:
    number = 0
    for line in found.get(name, ()):
        loop = _LOOP.search(line)
        if loop:
            number += _count(found, loop[2])
        elif _KERNEL.search(line):
            number += 1
    return number
