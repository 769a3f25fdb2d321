"""In which order the weights' half of a backward pass takes its gradients.

torch keeps the nodes and parameters of a group in sets, whose order is that of addresses: what
lives at once would be anybody's. Here it is the model's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc


def in_model_order(groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor]) -> None:
    """Sorts what `stage_backward_input` gave, in place, for `stage_backward_weight`."""
    places = {_get_grad_fn_or_grad_acc(each): place for place, each in enumerate(parameters)}
    for group in groups:
        group["params"] = sorted(group["params"], key=places.__getitem__)
        group["intermediates"] = nodes = list(group["intermediates"])
        order = sorted(range(len(nodes)), key=lambda place: nodes[place]._sequence_nr())
        for key in ("intermediates", "grads"):
            group[key] = [group[key][place] for place in order]
