"""The contenders of `peers.py`: one step each of the same model on the same samples.

Each maker wraps llama-10m with what its library documents, options as equal as it lets them be,
and gives a function that makes one step and returns this rank's share of the loss. A peer is
imported by its maker, in the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from step_time import RANKS, _ptrain, _samples, _spec, _wrapped_by_hand

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ptrain.spec.spec import Spec

Step = Callable[[], float]
Maker = Callable[[], Step]


def environment(rank: int) -> None:
    """What a launcher tells the ranks, for libraries that ask the environment; the process group is
    there already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
        "DS_ACCELERATOR": "cpu",
    }


def ptrain(strategy: str) -> Maker:
    return lambda: _ptrain(strategy)


def by_hand(strategy: str) -> Maker:
    """Raw wrapper, torch's clipping, fused AdamW."""

    def make() -> Step:
        spec = _spec(strategy)
        model = _wrapped_by_hand(strategy, spec)
        return loop(spec, model, adamw(spec, model))

    return make


def by_hand_zero1() -> Step:
    """DistributedDataParallel and torch's ZeroRedundancyOptimizer."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    spec = _spec("ddp")
    model = _wrapped_by_hand("ddp", spec)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **_adamw(spec)
    )
    return loop(spec, model, optimizer)


def accelerate_ddp() -> Step:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    spec = _spec("ddp")
    options = DistributedDataParallelKwargs(
        bucket_cap_mb=spec.bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    forget_accelerate()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    return _accelerated(spec, accelerator)


def accelerate_fsdp2() -> Step:
    return _accelerated(_spec("zero3"), sharding_accelerator(reshard=True, **BY_BLOCK))


BY_BLOCK = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Block"],
}


def sharding_accelerator(*, reshard: bool, **policy: Any) -> Any:
    """An accelerator that shards on a CPU. Asked for that, it trains DDP (see the traps), so its
    state is told afterwards what it was asked for."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=reshard, cpu_ram_efficient_loading=False, **policy
    )
    forget_accelerate()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    state = AcceleratorState._shared_state
    state["distributed_type"], state["fsdp_plugin"] = DistributedType.FSDP, plugin
    return accelerator


def forget_accelerate() -> None:
    """Its state is one per process; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def _accelerated(spec: Spec, accelerator: Any) -> Step:
    model = built(spec)
    model, optimizer = prepared(accelerator, model, adamw(spec, model))
    return loop(
        spec,
        model,
        optimizer,
        backward=accelerator.backward,
        clip=lambda limit: accelerator.clip_grad_norm_(model.parameters(), limit),
    )


def prepared(accelerator: Any, model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
    """Wrapped by accelerate, which makes a unit of its own of a last norm beside the blocks. Told
    that the blocks are all there is, it leaves the norm to the root, as the others do."""
    model.base_model_prefix = "blocks"
    wrapped, its_optimizer = accelerator.prepare(model, optimizer)
    return wrapped, its_optimizer


def fabric_ddp() -> Step:
    from lightning_fabric.strategies import DDPStrategy

    spec = _spec("ddp")
    strategy = DDPStrategy(
        bucket_cap_mb=spec.bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    fabric = _fabric(strategy)
    plain = built(spec)
    model, optimizer = fabric.setup(plain, adamw(spec, plain))
    return _in_fabric(spec, fabric, model, optimizer)


def fabric_fsdp2() -> Step:
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=True)
        return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=True)

    spec = _spec("zero3")
    fabric = _fabric(ModelParallelStrategy(shard, data_parallel_size=RANKS, tensor_parallel_size=1))
    model = fabric.setup_module(built(spec))
    return _in_fabric(spec, fabric, model, fabric.setup_optimizers(adamw(spec, model)))


def _fabric(strategy: Any) -> Any:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    return fabric


def _in_fabric(spec: Spec, fabric: Any, model: nn.Module, optimizer: Optimizer) -> Step:
    return loop(
        spec,
        model,
        optimizer,
        backward=fabric.backward,
        clip=lambda limit: fabric.clip_gradients(
            model, optimizer, max_norm=limit, error_if_nonfinite=False
        ),
    )


def deepspeed(stage: int) -> Maker:
    """DeepSpeed's engine around torch's AdamW, in single precision, over gloo like the others: its
    all-reduce through shared memory would be compiled first and is left out."""

    def make() -> Step:
        import deepspeed as ds

        ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        spec = _spec("ddp")
        model = built(spec)
        config = {
            "train_micro_batch_size_per_gpu": spec.batch.micro,
            "gradient_clipping": spec.optimizer.clip,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, optimizer, _, _ = ds.initialize(
            model=model, optimizer=adamw(spec, model), config=config, dist_init_required=False
        )
        return loop(
            spec,
            engine,
            optimizer,
            backward=engine.backward,
            clip=lambda _: None,  # the engine's step does it
            step=engine.step,
        )

    return make


def built(spec: Spec) -> nn.Module:
    """llama-10m, the same on every rank."""
    from ptrain.models.build import build
    from ptrain.models.initialize import initialize

    model = build(spec.model, sequence=spec.batch.sequence)
    initialize(model, spec.train.seed)
    return model


def adamw(spec: Spec, model: nn.Module) -> Optimizer:
    import torch

    return torch.optim.AdamW(model.parameters(), **_adamw(spec))


def _adamw(spec: Spec) -> dict[str, Any]:
    settings = spec.optimizer
    return {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "fused": True,
    }


def _backward(loss: Tensor) -> None:
    loss.backward()


def loop(
    spec: Spec,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    backward: Callable[[Any], Any] = _backward,
    clip: Callable[[float], Any] | None = None,
    step: Callable[[], Any] | None = None,
    rows_of: Callable[[int], Tensor] | None = None,
) -> Step:
    """The loop that one would write, with the library's own backward, clipping and step; on
    ptrain's samples of two gloo ranks, or on these rows."""
    import torch
    import torch.nn.functional as F

    rows_of = rows_of or _samples(spec)
    numbers, settings = iter(range(10**9)), spec.optimizer
    assert settings.clip is not None

    def once() -> float:
        number = next(numbers)
        rows = rows_of(number)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        backward(loss)
        if clip:
            clip(settings.clip)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (number + 1) / max(1, settings.schedule.warmup))
        if step:
            step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item() / RANKS

    return once


# What each needs besides ptrain's own packages, and how its step is made
GROUPS: dict[str, dict[str, tuple[str | None, Maker]]] = {
    "gradients all-reduced (DDP)": {
        "by hand": (None, by_hand("ddp")),
        "ptrain ddp": (None, ptrain("ddp")),
        "accelerate DDP": ("accelerate", accelerate_ddp),
        "Fabric DDP": ("lightning-fabric", fabric_ddp),
        "DeepSpeed stage 0": ("deepspeed", deepspeed(0)),
    },
    "optimizer sharded (ZeRO-1)": {
        "by hand": (None, by_hand_zero1),
        "ptrain zero1": (None, ptrain("zero1")),
        "DeepSpeed stage 1": ("deepspeed", deepspeed(1)),
    },
    "everything sharded (FSDP2, ZeRO-3)": {
        "by hand": (None, by_hand("zero3")),
        "ptrain zero3": (None, ptrain("zero3")),
        "accelerate FSDP2": ("accelerate", accelerate_fsdp2),
        "Fabric FSDP2": ("lightning-fabric", fabric_fsdp2),
        "DeepSpeed stage 3": ("deepspeed", deepspeed(3)),
    },
}


def installed(names: Iterable[str | None]) -> dict[str, str]:
    """Package -> version of those that are there."""
    from _machine import version

    found = {name: version(name) for name in names if name}
    return {name: text for name, text in found.items() if text != "not installed"}
