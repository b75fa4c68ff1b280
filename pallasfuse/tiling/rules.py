"""The rules that make a schedule tree legal: their numbers and names, and how a pass says that one of them is broken."""

from typing import NoReturn

RULES = {
    1: "windows", 2: "levels", 3: "nests", 4: "states", 5: "finished", 6: "unfinished reads", 7: "merges", 8: "memory",
    9: "loads", 10: "bounds", 11: "slots", 12: "space", 13: "cover", 14: "target",
}  # fmt: skip
"""The subject of every rule, by its number."""


class BrokenRuleError(Exception):
    """Ends a walk over a tree at the first rule that is broken; the function that began it returns the message as a refusal."""

    def __init__(self, rule: int, why: str) -> None:
        super().__init__(f"rule {rule} ({RULES[rule]}): {why}")
        self.rule = rule


def broken(rule: int, why: str) -> NoReturn:
    """Ends the walk: a rule is broken.

    Raises:
      BrokenRuleError: always.
    """
    raise BrokenRuleError(rule, why)
