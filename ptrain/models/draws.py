"""Whether what drops out draws the masks that ranks of tp need: one mask for what all of them have
whole, a mask of its own for each slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ptrain.models.ledger import storage_of
from ptrain.spec.role import COLUMNS, ROWS, Role

_LIKE = "empty_like"
_WITH_MASKS = ("aten::bernoulli", "aten::bernoulli_", "aten::native_dropout", "aten::uniform_")


class Draws:
    """Follows where ranks draw for themselves: within a row's module, from what the first column
    gives to what the row takes; or within `blocks`, if a rank has its own tokens there."""

    def __init__(self, named: Mapping[str, Role], blocks: Sequence[str]) -> None:
        self._owners = {name.rpartition(".")[0] for name, role in named.items() if role in ROWS}
        self._blocks = frozenset(blocks)
        self._named = named
        self._inside: set[str] = set()
        self._like_own: dict[int, bool] = {}

    def enter(self, name: str) -> None:
        """A module is about to run."""
        if name in self._blocks:
            self._inside.add(name)
        if self._named.get(name) in ROWS:
            self._inside.discard(name.rpartition(".")[0])

    def leave(self, name: str) -> None:
        """A module has run."""
        self._inside.discard(name)
        if self._named.get(name) in COLUMNS and not self._blocks:
            self._inside.update(o for o in self._owners if o and name.startswith(f"{o}."))

    def died(self, key: int) -> None:
        """A storage is gone."""
        self._like_own.pop(key, None)

    def see(self, function: Any, results: Iterable[torch.Tensor], *, is_own: bool) -> bool:
        """Return whether an operator that read what only its rank has, or did not, drew a mask as
        no rank may."""
        name = function._schema.name
        keys = [storage_of(tensor)._cdata for tensor in results]
        if name.endswith(_LIKE):
            self._like_own.update(dict.fromkeys(keys, is_own))
        if name not in _WITH_MASKS:
            return False
        is_own = is_own or any(self._like_own.get(key, False) for key in keys)
        return is_own is not bool(self._inside)
