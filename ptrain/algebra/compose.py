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

    `parts * copies` is the number of ranks. A `gathered` share is all-gathered unit by unit for
    use; a `materialized` one stores nothing between uses.
    """

    parts: int = 1
    copies: int = 1
    gathered: bool = False
    materialized: bool = False
    tier: Tier = Tier.DEVICE

    def at_rest(self, size: int) -> int:
        """Return the bytes stored between uses on any tier (Theorem 1 without s_unit)."""
        return 0 if self.materialized else ceil_div(size, self.parts)

    def on(self, tier: Tier, size: int) -> int:
        """Return the bytes stored between uses on `tier`."""
        return self.at_rest(size) if tier is self.tier else 0

    @property
    def needs_unit(self) -> bool:
        """True if Theorem 1 adds s_unit, the memory of one full unit."""
        return self.gathered or self.materialized


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


def product(factors: Iterable[Factor]) -> Product:
    """Compose all factors of a mesh, given outermost first as in a spec."""
    return reduce(compose, (lift(factor) for factor in reversed(tuple(factors))), IDENTITY)


def compose(inner: Product, outer: Product) -> Product:
    """Return the product with `inner` within each group and `outer` across the groups."""
    shares = {state.value: _compose_shares(inner[state], outer[state]) for state in PLACED}
    return Product(ranks=inner.ranks * outer.ranks, **shares)


def lift(factor: Factor) -> Product:
    """Return one factor as a product."""
    if factor.degree == 1:
        return IDENTITY
    shares = {state.value: _make_share(factor.placement[state], factor.degree) for state in PLACED}
    return Product(ranks=factor.degree, **shares)


def _compose_shares(inner: Share, outer: Share) -> Share:
    return Share(
        parts=inner.parts * outer.parts,
        copies=inner.copies * outer.copies,
        gathered=inner.gathered or outer.gathered,
        materialized=inner.materialized or outer.materialized,
        tier=max(inner.tier, outer.tier, key=TIER_DISTANCE.__getitem__),
    )


def _make_share(mode: Mode, degree: int) -> Share:
    match mode.distribution:
        case Distribution.REPLICATED:
            return Share(copies=degree, tier=mode.tier)
        case Distribution.SHARDED:
            return Share(parts=degree, tier=mode.tier)
        case Distribution.GATHERED:
            return Share(parts=degree, gathered=True, tier=mode.tier)
        case Distribution.MATERIALIZED:
            return Share(copies=degree, materialized=True)
        case _:
            assert_never(mode.distribution)
