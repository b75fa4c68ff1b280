"""The mixture of programs that the tests and the fuzzer draw from."""

from tests.property.chains import grow_chains
from tests.property.mixes import grow_mix
from tests.property.programs import Chooser, Program


def grow(c: Chooser) -> Program:
    return grow_chains(c) if c.chance(30) else grow_mix(c)
