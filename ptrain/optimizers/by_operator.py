"""torch's optimizers that have no fused kernel: what a fused one does beside its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ptrain.internals.fakes import FakeTensor, detect_fake_mode
from ptrain.models.ledger import OperatorMode, is_tagged, storage_of, tag
from ptrain.spec.placement import Tier

_READ = torch.ops.aten._local_scalar_dense.default
_ANY_NUMBER = 0.5  # neither a count nor a product of momenta of which a correction would be 0


class ByOperator(torch.optim.Optimizer):
    """A mixin before one of torch's classes, whose `step` works an operator at a time.

    `grad_scale` and `found_inf`, where set, mean what they mean to torch's fused optimizers: what
    gradients are multiplied by (they are left without it), and 1 where the step is to be skipped.
    The host waits for the latter, as it does for the numbers that the class reads.
    """

    param_groups: list[dict[str, Any]]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every tensor that has a gradient."""
        assert closure is None, "closures are not supported"
        is_fake = detect_fake_mode() is not None
        if self.found_inf is not None and not is_fake and self.found_inf.item():
            return
        groups = self.param_groups
        try:
            for group in groups:
                for leaf in group["params"]:
                    if leaf.grad is None:
                        continue
                    if self.grad_scale is not None:
                        leaf.grad.div_(self.grad_scale)
                    # alone: a loop over all would keep a tensor's temporaries beside the next one's
                    self.param_groups = [{**group, "params": [leaf]}]
                    with _Temporaries(on_host=is_tagged(storage_of(leaf))):
                        super().step()
        finally:
            self.param_groups = groups


class _Temporaries(OperatorMode):
    """Results that are no parameters: of an update on the host they are there too. Fake tensors
    have no values: any number stands for one that is read."""

    def __init__(self, *, on_host: bool) -> None:
        super().__init__()
        self.on_host = on_host

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is _READ and isinstance(args[0], FakeTensor):
            return _ANY_NUMBER
        result = function(*args, **kwargs)
        if self.on_host and isinstance(result, torch.Tensor) and not is_tagged(storage_of(result)):
            tag(result, Tier.HOST)
        return result


class NAdam(ByOperator, torch.optim.NAdam):
    """torch's with decoupled weight decay, without `foreach`, which has temporaries of all tensors
    at once."""

    def __init__(self, leaves: Any, **settings: Any) -> None:
        super().__init__(leaves, **settings, decoupled_weight_decay=True, foreach=False)
