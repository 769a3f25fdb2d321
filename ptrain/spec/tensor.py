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
            "Parallel plan of built-in models, or a mapping from module names to roles for your"
            " own model.",
            "paired or naive, or a mapping of module names to roles",
            (
                Choice(
                    "",
                    {
                        PAIRED: "column- and row-parallel layers in pairs (Megatron): two all-"
                        "reduces per block in forward, two in backward",
                        NAIVE: "every column-parallel layer reduces its input gradient separately",
                    },
                ),
                Free("", values=Choice("", {str(role): about for role, about in GIVEN.items()})),
            ),
            read=_plan,
            write=_written,
        ),
    ] = PAIRED
    loss_parallel: Annotated[
        bool, Truth("Keep logits sharded over the vocabulary until the loss is computed.")
    ] = True
    experts: Annotated[
        str,
        Choice(
            "How tensor-parallel ranks share the experts of an ep rank.",
            {
                CUT: "each rank holds a shard of every expert",
                FOLDED: "each rank of ep × tp holds some experts in full and routes its shard "
                "of the tokens",
            },
        ),
    ] = CUT
    asynchronous: Annotated[
        bool,
        Truth(
            "Split collectives into pieces that overlap with matrix products (async TP).",
            executed=(False,),
            why="; torch supports it only on CUDA, where it is not tested",
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
