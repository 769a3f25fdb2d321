"""All faults and sound programs of the corpus, and how one of them runs on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

import ptrain
from tests.corpus import (  # noqa: F401 - each enters its own
    accelerated,
    context,
    ddp,
    experts,
    field_axes,
    field_buffers,
    field_data,
    field_gradients,
    field_losses,
    field_precision,
    field_sound_double,
    field_sound_half,
    field_sound_single,
    field_tensor,
    field_updates,
    fsdp2,
    loaders,
    optimizers,
    pipeline,
    precision,
    product,
    recomputation,
    resume,
    shared,
    sound_data,
    sound_models,
    sound_updates,
    tensor,
)
from tests.corpus.fault import FAULTS, SOUND

# Whose faults and programs were written by someone who had not read how `verify` finds causes.
BLIND = (
    field_axes,
    field_buffers,
    field_data,
    field_gradients,
    field_losses,
    field_precision,
    field_sound_double,
    field_sound_half,
    field_sound_single,
    field_tensor,
    field_updates,
)

Losses = tuple[list[float], list[float]]


def is_blind(name: str) -> bool:
    """Return whether a case belongs to those of `BLIND`."""
    case = FAULTS.get(name) or SOUND[name]
    return case.script.__module__ in {module.__name__ for module in BLIND}


def run(name: str, fault: bool) -> Any:
    """Return the result of a case's script; `fault` chooses the fault or its fix."""
    return FAULTS[name].script(fault) if name in FAULTS else SOUND[name].script()


def losses(name: str, fault: bool) -> Losses:
    """Return the losses of one device and of this rank, without a verdict."""
    judge = ptrain.verify
    ptrain.verify = _ran  # type: ignore[assignment]
    try:
        return run(name, fault)
    finally:
        ptrain.verify = judge


def _ran(
    reference: Callable[[], ptrain.Job],
    distributed: Callable[[], ptrain.Job],
    batches: Iterable[Any],
    *,
    share: Any = None,
    terms: ptrain.Terms | None = None,
) -> Losses:
    """Run both loops over the batches, with the arguments of `ptrain.verify`."""
    batches = list(batches)
    if share is None:
        own = batches
    else:
        own = [share(batch) for batch in batches] if callable(share) else list(share)
    assert len(own) == len(batches), f"{len(own)} shares of {len(batches)} batches"
    plain, wrapped = reference(), distributed()
    ran = [float(plain.step(batch)) for batch in batches], [float(wrapped.step(b)) for b in own]
    dist.barrier()
    return ran
