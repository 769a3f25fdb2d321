"""What the forward pass of a block leaves for its backward pass: the fourth state, A, of one rank.

M and O of activations belong to the rank, not to an axis. R keeps what autograd saves; M keeps the
block's input, and the results of some operators where a policy says so, and computes the rest
again; on the tiers host and file it is kept there and brought back for use.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ptrain.spec.placement import Distribution, Mode, Tier


class Operators(StrEnum):
    """Classes of operators whose results a policy may keep."""

    MATMUL = "matmul"  # of activations with weights, and of scores where attention is eager
    ATTENTION = "attention"  # fused kernels
    SOFTMAX = "softmax"
    NORM = "norm"
    COLLECTIVE = "collective"  # what arrived from other ranks


class Scope(StrEnum):
    """What is computed again."""

    BLOCK = "block"
    ATTENTION = "attention"  # scores, softmax and their product with the values: no projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a block whose activations are M comes again; with `keep` the results of these operators
    are not computed twice."""

    scope: Scope = Scope.BLOCK
    keep: tuple[Operators, ...] = ()


FULL = Policy()
SELECTIVE = Policy(keep=(Operators.MATMUL, Operators.ATTENTION))
ATTENTION_ONLY = Policy(scope=Scope.ATTENTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One block's mode. `policy` None: R, or O where `tier` is not the device. With a policy, M;
    `tier` is then that of the block's input."""

    policy: Policy | None = None
    tier: Tier = Tier.DEVICE

    @property
    def is_plain(self) -> bool:
        """Whether autograd saves what it likes, where it stands."""
        return self == PLAIN


PLAIN = Kept()


def belongs_to_rank(mode: Mode) -> bool:
    """Whether a mode of A says how the rank keeps it: M, or whole off the device (which is O, since
    each rank has its own). S and S* are slices over an axis."""
    return mode.distribution is Distribution.MATERIALIZED or (
        mode.tier is not Tier.DEVICE and mode.distribution is not Distribution.GATHERED
    )
