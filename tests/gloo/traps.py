"""Two requests that accelerate silently ignores, detected by meters on its model.

1. Sharding on a CPU: with `cpu=True` an FSDP plugin is dropped, and DDP trains.
2. A wrap policy in the form that torch documents, `functools.partial(transformer_auto_wrap_policy,
   transformer_layer_cls={Block})`: the function is kept and its argument is not, so that the root
   alone becomes a unit and the whole model is gathered at once.

The control names the class by accelerate's own setting, and holds. Nothing warns in any of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # here and in the ranks

from _by_hand import adamw, built
from _peers import BY_BLOCK, environment, forget_accelerate, prepared, sharding_accelerator
from _steps import RANKS, own_samples

if TYPE_CHECKING:
    from torch import nn

    from ptrain.report.record import Check
    from ptrain.spec.spec import Spec

OVERRIDES = (
    f"mesh.dp_shard={RANKS}",
    "batch.global=4",
    "batch.micro=2",
    "batch.sequence=64",
    "optimizer.clip=null",
)
STEPS = 3  # the third is steady


@dataclass(frozen=True)
class TrapReport:
    """One rank's report: the wrapper that ran, and the checks of the third step."""

    ran: str
    checks: tuple[Check, ...]

    @property
    def failing(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


def _dropped_plugin() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    forget_accelerate()
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False),
    )


def _partial_policy() -> Any:
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from ptrain.models.transformer import Block

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return sharding_accelerator(reshard=False, auto_wrap_policy=policy)


def _own_setting() -> Any:
    return sharding_accelerator(reshard=False, **BY_BLOCK)


ACCELERATORS: dict[str, Callable[[], Any]] = {
    "cpu": _dropped_plugin,
    "policy": _partial_policy,
    "control": _own_setting,
}


def requested_spec() -> Spec:
    """Return the spec that all three scripts request: FSDP2 per block, with units kept unsharded
    until backward."""
    from ptrain.algebra.legality import require_runnable
    from ptrain.spec.load import load

    return require_runnable(load("zero3-keep", OVERRIDES))


def train_with_accelerate(which: str) -> TrapReport:
    """Train the model wrapped by accelerate for three steps on this rank and measure the last."""
    import torch.distributed as dist
    import torch.nn.functional as F

    from ptrain import measure
    from ptrain.train.comparison import compare

    environment(dist.get_rank())
    accelerator, spec = ACCELERATORS[which](), requested_spec()
    plain = built(spec)
    model, optimizer = prepared(accelerator, plain, adamw(spec, plain))
    rows_of = own_samples(spec)

    def step(number: int) -> None:
        rows = rows_of(number)
        logits = model(rows[:, :-1])
        accelerator.backward(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
        optimizer.step()

    for number in range(STEPS - 1):
        step(number)
        optimizer.zero_grad()
    with measure(model, optimizer=optimizer) as measurement:
        step(STEPS - 1)
    return TrapReport(_executed_wrapper(model), compare(spec, measurement).checks)


def _executed_wrapper(model: nn.Module) -> str:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel: nothing is sharded"
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return f"fully_shard in {units} unit{'' if units == 1 else 's'}"
