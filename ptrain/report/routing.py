"""Where the tokens of a step went: the figures of a layer's router, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ptrain.spec.model import ModelShape
from ptrain.spec.placement import EXPERT_AXES
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """One layer in one step of the global batch. `tokens`: choices that fell on each expert, of
    which `dropped` found no place; `entropy` of a token's scores over the experts, in nats, the
    mean of all tokens; None where the scores are not seen, as of a model that is not built in."""

    layer: str
    tokens: tuple[int, ...]
    dropped: int
    entropy: float | None

    @property
    def load(self) -> float:
        """λ, the choices of the busiest expert over the mean: 1 where all have as many."""
        return self.load_of(len(self.tokens))

    def load_of(self, ranks: int) -> float:
        """Return λ of so many ranks, which have as many neighbouring experts: what the busiest one
        receives over the mean."""
        own = len(self.tokens) // ranks
        starts = range(0, len(self.tokens), own)
        received = [sum(self.tokens[first : first + own]) for first in starts]
        return max(received) * ranks / sum(self.tokens)


def routes(spec: Spec) -> bool:
    """Return whether it is watched where tokens go: in a built-in model with experts, and in any
    other whose ranks have experts of their own."""
    if isinstance(spec.model, ModelShape):
        return spec.model.experts is not None
    return spec.is_cut_over(EXPERT_AXES)


def figures(layers: Sequence[LayerRouting]) -> dict[str, float]:
    """Return the figures of a step: λ of the layer where it is largest, the share of choices that
    found no place, and the mean entropy, where scores are seen."""
    chosen = sum(sum(layer.tokens) for layer in layers)
    entropies = [layer.entropy for layer in layers if layer.entropy is not None]
    return {
        "expert_load": max(layer.load for layer in layers),
        "dropped_share": sum(layer.dropped for layer in layers) / chosen,
        **({"router_entropy": mean(entropies)} if entropies else {}),
    }


def words(of_step: Mapping[str, float]) -> str:
    """Return what a line says of these figures."""
    dropped = of_step["dropped_share"]
    return f"λ {of_step['expert_load']:.2f}" + (f"  {dropped:.1%} dropped" if dropped else "")


def rows(layers: Sequence[LayerRouting], ranks: int) -> list[dict[str, object]]:
    """Return the layers as plain data; `ranks` have experts of their own."""
    return [
        {
            "layer": layer.layer,
            "tokens": list(layer.tokens),
            "load": layer.load,
            "load_of_ranks": layer.load_of(ranks),
            "dropped": layer.dropped,
            "entropy": layer.entropy,
        }
        for layer in layers
    ]
