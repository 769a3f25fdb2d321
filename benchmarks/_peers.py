"""The contenders of `peers.py`: one step each of the same model on the same samples.

Each maker wraps the spec's model with what its library documents, options as equal as it lets them
be, and gives a function that makes one step and returns this rank's share of the loss. A peer is
imported by its maker, in the ranks. What is written by hand on torch's own parts is in
`_by_hand.py` and `_by_hand_axes.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from _by_hand import (
    adamw,
    built,
    by_hand,
    compiled,
    loop,
    pipelined,
    tensor_parallel,
    zero_redundancy,
)
from _by_hand_axes import experts, ring
from _steps import RANKS, bucket_cap_mb

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ptrain.spec.spec import Spec

Step = Callable[[], float]
Maker = Callable[["Spec"], Step]


def environment(rank: int, ranks: int = RANKS) -> None:
    """Return the launcher variables for libraries that read the environment; the process group
    exists already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
        "DS_ACCELERATOR": "cpu",
    }


def accelerate_ddp(spec: Spec) -> Step:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(
        bucket_cap_mb=bucket_cap_mb(spec),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    forget_accelerate()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    return _accelerated(spec, accelerator)


def accelerate_fsdp2(spec: Spec) -> Step:
    return _accelerated(spec, sharding_accelerator(reshard=True, **BY_BLOCK))


BY_BLOCK = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Block"],
}


def sharding_accelerator(*, reshard: bool, **policy: Any) -> Any:
    """Return an accelerator that shards on a CPU. accelerate ignores that request and trains DDP
    (tests/gloo/traps.py), so its state is corrected afterwards."""
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
    """Reset accelerate's state, which is one per process; the process group stays."""
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


def fabric_ddp(spec: Spec) -> Step:
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(
        bucket_cap_mb=bucket_cap_mb(spec),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    fabric = _fabric(strategy)
    plain = built(spec)
    model, optimizer = fabric.setup(plain, adamw(spec, plain))
    return _in_fabric(spec, fabric, model, optimizer)


def fabric_fsdp2(spec: Spec) -> Step:
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=True)
        return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=True)

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

    def make(spec: Spec) -> Step:
        import deepspeed as ds

        ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
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


# Strategy -> contenders: what each needs besides ptrain's own packages, and how its step is made.
# The first one is what ptrain is held against.
GROUPS: dict[str, dict[str, tuple[str | None, Maker]]] = {
    "ddp": {
        "by hand": (None, by_hand),
        "accelerate DDP": ("accelerate", accelerate_ddp),
        "Fabric DDP": ("lightning-fabric", fabric_ddp),
        "DeepSpeed stage 0": ("deepspeed", deepspeed(0)),
    },
    "ddp, compiled": {
        "by hand, compiled": (None, compiled),
        "by hand, eager": (None, by_hand),
    },
    "zero1": {
        "by hand": (None, zero_redundancy),
        "DeepSpeed stage 1": ("deepspeed", deepspeed(1)),
    },
    "zero2": {
        "by hand": (None, zero_redundancy),
        "DeepSpeed stage 2": ("deepspeed", deepspeed(2)),
    },
    "zero3": {
        "by hand": (None, by_hand),
        "accelerate FSDP2": ("accelerate", accelerate_fsdp2),
        "Fabric FSDP2": ("lightning-fabric", fabric_fsdp2),
        "DeepSpeed stage 3": ("deepspeed", deepspeed(3)),
    },
    "fsdp-mixed": {"by hand": (None, by_hand)},
    "hsdp": {"by hand": (None, by_hand)},
    "tp": {"by hand": (None, tensor_parallel)},
    "pp-1f1b": {"by hand": (None, pipelined)},
    "cp-ring": {"by hand": (None, ring)},
    "cp-zigzag": {"by hand": (None, ring)},
    "ep": {"by hand": (None, experts)},
}


def installed(names: Iterable[str | None]) -> dict[str, str]:
    """Return the versions of the installed packages by name."""
    from _machine import version

    found = {name: version(name) for name in names if name}
    return {name: text for name, text in found.items() if text != "not installed"}
