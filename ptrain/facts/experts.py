"""What is known of a model's layers with experts, of which ranks may have some each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """All layers with experts of a model, which are alike: `modules` hold those of a layer, first
    to last, a `number` of them; of these a token chooses so many (`chosen`), each of which gets a
    row of `features` elements."""

    modules: tuple[str, ...]
    number: int
    chosen: int
    features: int
