"""The text of values that are defined in packages below `report/`, and their HTML in notebooks.

Costs, derivations and plans must not import the tables of `report/`. So `str()` calls `to_text`,
for which `report/printed.py` registers the texts. `import ptrain` imports that module with the
first exported name; without it a value prints like any object. Notebooks show `to_html`, for which
`charts/notebook.py` registers pictures.
"""

from __future__ import annotations

from functools import singledispatch
from html import escape
from importlib import import_module
from typing import Any

from ptrain.errors import library


@singledispatch
def to_text(value: object) -> str:
    """Return the text that `print(value)` shows."""
    return object.__repr__(value)


@singledispatch
def to_html(value: object) -> str:
    """Return the HTML that a notebook shows: the text of the value."""
    return answer_html("", str(value))


def answer_html(answer: str, text: str, *, pictures: str = "") -> str:
    """Return HTML with an answer, pictures and a text.

    Args:
        answer: The line that is shown first, in bold; "" for none.
        text: The printed text of the value.
        pictures: HTML that is not escaped.
    """
    first = f"<p><b>{escape(answer)}</b></p>" if answer else ""
    return f'{first}{pictures}<pre style="overflow-x:auto">{escape(text)}</pre>'


class NotebookOutput:
    """A mixin for values that a notebook shows as `to_html` returns."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the HTML of the value, for notebooks."""
        import_module("ptrain.charts.notebook")  # registers pictures, which only notebooks need
        return to_html(self)


class Worded(NotebookOutput):
    """A mixin for values that print as `to_text` returns. `repr` is the first line of that text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return to_text(self).partition("\n")[0]

    def __str__(self) -> str:
        return to_text(self)


def data_frame(rows: list[dict[str, Any]], place: str) -> Any:
    """Return rows as a pandas DataFrame.

    Args:
        rows: The rows.
        place: The method that the error names.

    Raises:
        SpecError: pandas is not installed.
    """
    return library("pandas", place, "a DataFrame needs pandas").DataFrame(rows)
