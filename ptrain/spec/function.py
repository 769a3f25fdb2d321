"""User-defined functions that a spec names: `{target: package.module:function, arguments: …}`."""

from dataclasses import dataclass, field
from typing import Annotated

from ptrain.spec.leaf import FreeMapping, Text, grammar_dataclass

PATH = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
FORM = "package.module:function"
ARGUMENTS = FreeMapping("Keyword arguments of `target`.")
FOLDER = Text(
    "Folder in which `target` is searched after the installed packages. Default: the folder of "
    "the spec.",
    r"[^\x00-\x1f]{1,300}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function that a section of the spec names, with its keyword arguments.

    It is imported from the installed packages, or else from `folder`. The folder does not take part
    in comparisons, so that the same function in a moved file is equal.
    """

    section: str
    target: str
    arguments: dict[str, object] = field(default_factory=dict)
    folder: str | None = field(default=None, compare=False, repr=False)

    @property
    def target_key(self) -> str:
        """The dotted key that names the function."""
        return f"{self.section}.target"

    def __hash__(self) -> int:
        """Hash the compared fields; arguments by their repr, because they may be unhashable."""
        return hash((self.section, self.target, repr(self.arguments)))


@grammar_dataclass
class StepRaw:
    """User-defined function that runs a micro-batch through the model."""

    target: Annotated[
        str,
        Text(
            "Function (model, batch) that returns the mean loss of a micro-batch; runs only "
            "with --allow-import.",
            PATH,
            FORM,
        ),
    ]
    arguments: Annotated[dict[str, object] | None, ARGUMENTS] = None
    folder: Annotated[str | None, FOLDER] = None
