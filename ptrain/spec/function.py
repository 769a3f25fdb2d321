"""Functions of the user's that a spec names: `{target: package.module:function, arguments: …}`."""

from dataclasses import dataclass, field
from typing import Annotated

from ptrain.spec.leaf import Free, Text, declared

PATH = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
FORM = "package.module:function"
ARGUMENTS = Free("Keyword arguments of `target`.")
FOLDER = Text(
    "Folder in which `target` is searched after the installed packages. Default: the folder of "
    "the spec.",
    r"[^\x00-\x1f]{1,300}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function that the section `section` of a spec names, with its keyword arguments. It is
    looked for among what is installed, then in `folder`: the function is the same one wherever its
    file lies."""

    section: str
    target: str
    arguments: dict[str, object] = field(default_factory=dict)
    folder: str | None = field(default=None, compare=False, repr=False)

    @property
    def place(self) -> str:
        """Where the spec names it."""
        return f"{self.section}.target"

    def __hash__(self) -> int:
        """Of what is compared; arguments may be of any kind."""
        return hash((self.section, self.target, repr(self.arguments)))


@declared
class StepRaw:
    """A function of the user's that runs a micro-batch through the model."""

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
