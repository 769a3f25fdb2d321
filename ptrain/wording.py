"""How values print that stand above the tables which show them.

A cost, a derivation and a plan know nothing of tables: those are made in `report/`, which reads
them. So `str()` asks here, and `report/printed.py` says what it gets. `import ptrain` brings it
along; where nobody has, a value prints as any object.
"""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def worded(value: object) -> str:
    """Return the text that `print(value)` shows."""
    return object.__repr__(value)


class Worded:
    """A value that prints as `worded` has it; its `repr`, if it has none of its own, is the first
    line of that."""

    __slots__ = ()

    def __repr__(self) -> str:
        return worded(self).partition("\n")[0]

    def __str__(self) -> str:
        return worded(self)
