"""The product of placements (Definition 5), as a fold over the factors of a mesh.

For each state, a factor describes how one axis shards, replicates or moves the shares of the inner
axes. Products form a monoid: an axis of degree 1 is the identity, and the product is associative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import assert_never

from ptrain.cost import PLACED, State
from ptrain.spec.placement import TIER_DISTANCE, Distribution, Factor, Mode, Tier
from ptrain.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of one state on a rank: one of `parts` shards, with `copies` replicas each.

    `parts * copies` is the number of ranks. An `is_gathered` share is all-gathered unit by unit for
    use; an `is_materialized` one stores nothing between uses.
    """

    parts: int = 1
    copies: int = 1
    is_gathered: bool = False
    is_materialized: bool = False
    tier: Tier = Tier.DEVICE

    def stored_bytes(self, size: int) -> int:
        """Return the bytes stored between uses on any tier (Theorem 1 without s_unit)."""
        # Rounded up: shards are padded to equal sizes, and Theorem 1 counts the fullest rank.
        return 0 if self.is_materialized else ceil_div(size, self.parts)

    def bytes_on_tier(self, tier: Tier, size: int) -> int:
        """Return the bytes stored between uses on `tier`."""
        return self.stored_bytes(size) if tier is self.tier else 0

    @property
    def needs_unit(self) -> bool:
        """True if Theorem 1 adds s_unit, the memory of one full unit."""
        return self.is_gathered or self.is_materialized


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A composed placement over `ranks` ranks."""

    ranks: int = 1
    parameters: Share = Share()
    optimizer: Share = Share()
    gradients: Share = Share()
    activations: Share = Share()

    def __getitem__(self, state: State) -> Share:
        share: Share = getattr(self, state.value)
        return share


IDENTITY = Product()


def compose_factors(factors: Iterable[Factor]) -> Product:
    """Compose all factors of a mesh, given outermost first as in a spec."""
    return reduce(
        compose, (factor_product(factor) for factor in reversed(tuple(factors))), IDENTITY
    )


def compose(inner: Product, outer: Product) -> Product:
    """Return the product with `inner` within each group and `outer` across the groups."""
    shares = {state.value: _compose_shares(inner[state], outer[state]) for state in PLACED}
    return Product(ranks=inner.ranks * outer.ranks, **shares)


def factor_product(factor: Factor) -> Product:
    """Return one factor as a product."""
    if factor.degree == 1:
        return IDENTITY
    shares = {state.value: _make_share(factor.placement[state], factor.degree) for state in PLACED}
    return Product(ranks=factor.degree, **shares)


def _compose_shares(inner: Share, outer: Share) -> Share:
    return Share(
        parts=inner.parts * outer.parts,
        copies=inner.copies * outer.copies,
        is_gathered=inner.is_gathered or outer.is_gathered,
        is_materialized=inner.is_materialized or outer.is_materialized,
        # A share has one tier. If one axis offloads the state, the whole share leaves the device.
        tier=max(inner.tier, outer.tier, key=TIER_DISTANCE.__getitem__),
    )


def _make_share(mode: Mode, degree: int) -> Share:
    match mode.distribution:
        case Distribution.REPLICATED:
            return Share(copies=degree, tier=mode.tier)
        case Distribution.SHARDED:
            return Share(parts=degree, tier=mode.tier)
        case Distribution.GATHERED:
            return Share(parts=degree, is_gathered=True, tier=mode.tier)
        case Distribution.MATERIALIZED:
            # M has no tier: nothing is stored between uses.
            return Share(copies=degree, is_materialized=True)
        case _:
            assert_never(mode.distribution)
