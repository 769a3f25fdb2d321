"""The text of values that are defined in packages below `report/`.

Costs, derivations and plans must not import the tables of `report/`. So `str()` calls `to_text`,
for which `report/printed.py` registers the texts. `import ptrain` imports that module with the
first exported name; without it a value prints like any object.
"""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def to_text(value: object) -> str:
    """Return the text that `print(value)` shows."""
    return object.__repr__(value)


class Worded:
    """A mixin for values that print as `to_text` returns. `repr` is the first line of that text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return to_text(self).partition("\n")[0]

    def __str__(self) -> str:
        return to_text(self)
