"""Attention of a model that is not built in: the modules that compute it, and of what heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    """Heads of queries, heads of keys and values, and the features of a head."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendingModule:
    """A module whose own code attends, once in a forward pass; by its name in the model."""

    name: str
    heads: AttentionHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    """What slices of the tokens need of a model: its modules that attend, in the order of a forward
    pass, and the argument by which its forward takes the tokens' positions, int64 [1, T]; "" where
    it takes none. `dropping`: the modules whose own code drops out something, outside of attention.
    """

    modules: tuple[AttendingModule, ...]
    positions: str = ""
    dropping: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[AttentionHeads, ...]:
        """Of what heads each is."""
        return tuple(module.heads for module in self.modules)
