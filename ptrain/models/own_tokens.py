"""Which parameters of a model are used on a rank's slice of the tokens, where it has that alone
between the sub-blocks: their gradients are sums over the ranks.

The first block is given the slice and the last one gives all tokens, so that whatever a model makes
of the number of tokens in front of its blocks (positions, masks, tables) is of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ptrain.spec.role import COLUMNS, ROWS, Role

Named = Mapping[str, Role]


class TokenSlices:
    """Says of the storages that live which are a slice of the tokens on a rank; what is in a
    sub-block is not, nor what is in front of the `blocks` and behind them; where there are none,
    nothing is. A sample has `count` tokens."""

    def __init__(self, named: Named, blocks: Sequence[str], count: int) -> None:
        self.blocks, self.count = blocks, count
        self.modules: set[str] = set()  # whose parameters are used on slices
        self._named = named
        self.first = blocks[0] if blocks else None
        self.last = blocks[-1] if blocks else None
        self._on_all: set[str] = set()  # whose parameters are used on all tokens
        self._slices: set[int] = set()

    @property
    def on_both(self) -> set[str]:
        """The modules whose parameters are used on slices and on all tokens: whose gradient is then
        whole on a rank in part."""
        return self.modules & self._on_all

    def __contains__(self, key: int) -> bool:
        return key in self._slices

    def enter(self, name: str, first: int) -> None:
        """A module is given a tensor."""
        if name == self.first:
            self._slices.add(first)

    def leave(self, name: str, outputs: Iterable[int]) -> None:
        """A module has run."""
        role = self._named.get(name)
        if name == self.last or role in COLUMNS:
            self._slices.difference_update(outputs)
        elif role in ROWS and self._slices:
            self._slices.update(outputs)

    def died(self, key: int) -> None:
        """A storage is gone."""
        self._slices.discard(key)

    def see(self, owners: Iterable[str], results: Iterable[int], *, is_slice: bool) -> None:
        """An operator read parameters of `owners`, and a slice or all of the tokens."""
        (self.modules if is_slice else self._on_all).update(owners)
        if is_slice:
            self._slices.update(results)
