"""How operators are cut over tp."""

from collections.abc import Mapping
from typing import Annotated

from ptrain.spec.leaf import Choice, Either, Free, Truth
from ptrain.spec.role import GIVEN, Role, Roles
from ptrain.spec.section import section

PAIRED, NAIVE = "paired", "naive"
CUT, FOLDED = "cut", "folded"


def _plan(written: str | Mapping[str, str]) -> str | Roles:
    """A plan's name, or the roles of a model's modules."""
    if isinstance(written, str):
        return written
    return tuple((name, Role(role)) for name, role in written.items()) or PAIRED


def _written(plan: str | Roles) -> object:
    return plan if isinstance(plan, str) else {name: role.value for name, role in plan}


@section
class TensorSpec:
    """How operators are cut over tp."""

    plan: Annotated[
        str | Roles,
        Either(
            "which sums there are; or, for a model that is not built in, each module's role",
            "paired or naive, or a mapping of module names to roles",
            (
                Choice(
                    "",
                    {
                        PAIRED: "column and row operators in pairs: two sums forward, two backward",
                        NAIVE: "each column operator sums its input's gradient by itself",
                    },
                ),
                Free("", values=Choice("", {str(role): about for role, about in GIVEN.items()})),
            ),
            read=_plan,
            write=_written,
        ),
    ] = PAIRED
    loss_parallel: Annotated[
        bool, Truth("logits stay cut over the vocabulary until the loss is computed")
    ] = True
    experts: Annotated[
        str,
        Choice(
            "what ranks of tp have of experts that ranks of ep have",
            {
                CUT: "a slice of the features of each",
                FOLDED: "experts of their own, whole: ranks of ep × tp have some each, and route "
                "their slice of the tokens",
            },
        ),
    ] = CUT
    asynchronous: Annotated[
        bool,
        Truth(
            "collectives in pieces, each beside the product that it feeds (async TP)",
            executed=(False,),
            why=" (torch offers it on CUDA alone, and nothing here has been run there)",
        ),
    ] = False

    @property
    def is_naive(self) -> bool:
        """Whether every column operator sums its input's gradient by itself."""
        return self.plan == NAIVE

    @property
    def is_folded(self) -> bool:
        """Whether ranks of tp have experts of their own, beside those of ep."""
        return self.experts == FOLDED

    @property
    def roles(self) -> Roles:
        """What the spec says of a model that is not built in, by patterns of module names."""
        return () if isinstance(self.plan, str) else self.plan
