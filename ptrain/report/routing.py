"""Token routing of a step: the figures of each layer's router, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ptrain.spec.model import ModelShape
from ptrain.spec.placement import EXPERT_AXES
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """The routing of one layer in one step of the global batch.

    Attributes:
        tokens: The number of choices of each expert.
        dropped: The choices that exceeded an expert's capacity.
        entropy: The entropy of a token's scores over the experts in nats, averaged over all tokens;
            None if the scores are not recorded, as for a model that is not built in.
    """

    layer: str
    tokens: tuple[int, ...]
    dropped: int
    entropy: float | None

    @property
    def load(self) -> float:
        """λ: the choices of the busiest expert over the mean of all experts; 1 if the load is
        balanced.
        """
        return self.rank_load(len(self.tokens))

    def rank_load(self, ranks: int) -> float:
        """Return λ over ranks: the choices that the busiest rank receives, over the mean of all
        ranks.

        Args:
            ranks: The number of ranks, each of which has the same number of consecutive experts.
        """
        # Experts are sharded over ranks in contiguous groups of equal size.
        experts_per_rank = len(self.tokens) // ranks
        starts = range(0, len(self.tokens), experts_per_rank)
        received = [sum(self.tokens[first : first + experts_per_rank]) for first in starts]
        return max(received) * ranks / sum(self.tokens)


def is_routing_recorded(spec: Spec) -> bool:
    """Return True if the routing of tokens is recorded for this spec.

    It is recorded for a built-in model with experts, and for any other model whose experts are
    sharded over ranks.
    """
    if isinstance(spec.model, ModelShape):
        return spec.model.experts is not None
    return spec.is_cut_over(EXPERT_AXES)


def routing_figures(layers: Sequence[LayerRouting]) -> dict[str, float]:
    """Return the routing figures of a step.

    Returns:
        `expert_load`, the largest λ of a layer; `dropped_share`, the share of dropped choices; and
        `router_entropy`, the mean over layers, if any layer has scores.
    """
    chosen = sum(sum(layer.tokens) for layer in layers)
    entropies = [layer.entropy for layer in layers if layer.entropy is not None]
    return {
        "expert_load": max(layer.load for layer in layers),
        "dropped_share": sum(layer.dropped for layer in layers) / chosen,
        **({"router_entropy": mean(entropies)} if entropies else {}),
    }


def routing_text(of_step: Mapping[str, float]) -> str:
    """Return the routing figures as they appear on the line of a step: `λ 1.32  0.4% dropped`."""
    dropped = of_step["dropped_share"]
    return f"λ {of_step['expert_load']:.2f}" + (f"  {dropped:.1%} dropped" if dropped else "")


def routing_rows(layers: Sequence[LayerRouting], ranks: int) -> list[dict[str, object]]:
    """Return the layers as plain data, for the result record.

    Args:
        layers: The routing of each layer.
        ranks: The number of ranks over which the experts are sharded, for `load_of_ranks`.
    """
    return [
        {
            "layer": layer.layer,
            "tokens": list(layer.tokens),
            "load": layer.load,
            "load_of_ranks": layer.rank_load(ranks),
            "dropped": layer.dropped,
            "entropy": layer.entropy,
        }
        for layer in layers
    ]
