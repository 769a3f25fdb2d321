"""Which linear layers are several projections in one: a model takes apart what they give, into
pieces of the features one behind the other that make up all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ptrain.models.ledger import storage_of


class Projections:
    """Sees the views that are taken of what linear layers give. A view of each head's features (of
    the rotated ones, or of a query in layers that mix the three head by head) is no projection: its
    features do not lie side by side."""

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[str, int, int]] = {}  # name, features and elements
        self._features: dict[str, int] = {}
        self._pieces: dict[str, set[tuple[int, int]]] = {}  # first feature and number of features

    def gives(self, name: str, output: torch.Tensor) -> None:
        """Declare what a layer gives."""
        self._features[name] = features = output.shape[-1]
        self._outputs[storage_of(output)._cdata] = name, features, output.numel()

    def died(self, key: int) -> None:
        """A storage is gone."""
        self._outputs.pop(key, None)

    def see(self, read: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """An operator made `results` of what it read."""
        whole = {storage_of(tensor)._cdata for tensor in read if self.is_whole(tensor)}
        for tensor in results:
            key = storage_of(tensor)._cdata
            if key in whole and not self.is_whole(tensor):
                name, features, elements = self._outputs[key]
                number, rest = divmod(tensor.numel() * features, elements)
                if not rest:
                    piece = tensor.storage_offset() % features, number
                    self._pieces.setdefault(name, set()).add(piece)

    def lengths(self, name: str) -> tuple[int, ...]:
        """Return the features of each projection of a layer; none where it is one alone."""
        pieces = sorted(self._pieces.get(name, ()))
        ends = [first + number for first, number in pieces]
        is_tiled = [0, *ends] == [*(first for first, _ in pieces), self._features.get(name)]
        return tuple(number for _, number in pieces) if is_tiled and len(pieces) > 1 else ()

    def owner(self, tensor: torch.Tensor) -> str:
        """Return the layer that gives a tensor, or what it is a view of; empty where none does."""
        return self._outputs.get(storage_of(tensor)._cdata, ("", 0, -1))[0]

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view of all that a layer gives."""
        _, _, elements = self._outputs.get(storage_of(tensor)._cdata, ("", 0, -1))
        return tensor.numel() == elements
