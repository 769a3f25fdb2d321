"""A rank of `convert.py`: one config of DeepSpeed or accelerate, run by its tool and measured.

    torchrun --nproc-per-node 2 benchmarks/_converted.py CONFIG OUT

The tool reads the config; the prediction is of the spec that `ptrain` converts the config to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from _by_hand import adamw, built
from _peers import BY_BLOCK, environment, forget_accelerate, prepared, sharding_accelerator

import ptrain

JOB = ["model={preset: llama-tiny}", "batch.sequence=64", "optimizer.clip=1.0", "devices=2"]
_STEADY = 2  # steps before the measured one


def deepspeed_step(config: dict[str, Any], spec: Any) -> tuple[Any, Any, Any]:
    """Return the engine, its optimizer and a step."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    model = built(spec)
    options = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=adamw(spec, model), config=config | options, dist_init_required=False
    )

    def step(loss: Any) -> None:
        engine.backward(loss)
        engine.step()

    return engine, optimizer, step


def accelerate_step(config: dict[str, Any], spec: Any) -> tuple[Any, Any, Any]:
    """Return the wrapped model, its optimizer and a step."""
    from accelerate import Accelerator

    sharding, cast = config.get("fsdp_config"), str(config["mixed_precision"])
    if sharding:
        accelerator = sharding_accelerator(
            reshard=sharding["fsdp_reshard_after_forward"], **BY_BLOCK
        )
        if cast != "no":
            from accelerate.state import AcceleratorState

            state = AcceleratorState._shared_state
            state["_mixed_precision"] = cast
            state["fsdp_plugin"].set_mixed_precision(cast)
    else:
        forget_accelerate()
        accelerator = Accelerator(cpu=True, mixed_precision=cast)
    plain = built(spec)
    model, optimizer = prepared(accelerator, plain, adamw(spec, plain))

    def step(loss: Any) -> None:
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def main(path: str, out: str) -> None:
    """Run three steps, and write the comparison of the third with the prediction."""
    config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    spec = ptrain.load(path, JOB).spec
    dist.init_process_group("gloo")
    environment(dist.get_rank())
    torch.manual_seed(0)
    make = deepspeed_step if "zero_optimization" in config else accelerate_step
    facts = ptrain.read_facts(spec)
    model, optimizer, update = make(config, spec)

    def step() -> None:
        tokens = torch.randint(0, 256, (spec.batch.micro, 65))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        update(loss)

    for _ in range(_STEADY):
        step()
    with ptrain.measure(model, optimizer=optimizer) as measurement:
        step()
    if dist.get_rank() == 0:
        comparison = ptrain.compare(spec, measurement, facts)
        Path(out).write_text(
            json.dumps(
                {
                    "spec": str(spec.factors[0].placement) + f", {spec.precision.layout.name}",
                    "verdict": str(comparison.verdict),
                    "cause": str(comparison.cause or ""),
                    "checks": str(comparison),
                }
            ),
            encoding="utf-8",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
