"""Faults over two axes of data parallelism, on four ranks: shards within replicas."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import ptrain
from tests.corpus.fault import DATA, NOT_REDUCED, planted
from tests.corpus.parts import looped, my_rows, regressor, row_batches


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@planted(
    source="https://github.com/NVIDIA/cosmos-framework/issues/161",
    wrong=("gradients",), axis="dp", place="*", step=0, ranks=4,
    sentence="gradients never reach the parameters: the all-reduce over replicate is left off",
    right=(NOT_REDUCED + "|no gradient|never|all-reduce|not move",),
    wrong_if=("learning rate", "counted twice", "frozen"),
)  # fmt: skip
def replicas_not_reduced(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        mesh = grid()
        fully_shard(model, mesh=mesh)
        assert isinstance(model, FSDPModule)
        model.set_requires_all_reduce(not fault)
        return looped(model)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/modelscope/ms-swift/pull/9380",
    wrong=("gradients",), axis="dp", place="*", step=0, ranks=4,
    sentence="gradients are not reduced over replicate: the inner group is taken twice",
    right=(NOT_REDUCED, DATA),
    wrong_if=("over shard", "learning rate"),
)  # fmt: skip
def inner_group_taken_twice(fault: bool) -> Any:
    mesh = grid()

    def reduce(model: nn.Module) -> None:
        for axis in ("shard", "shard" if fault else "replicate"):
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=mesh.get_group(axis))
                parameter.grad /= 2

    def job() -> ptrain.Job:
        model = regressor()
        return looped(model, before_update=lambda: reduce(model))

    return ptrain.verify(
        lambda: looped(regressor()),
        job,
        row_batches(),
        share=my_rows,
        terms=ptrain.Terms(mesh=mesh),
    )
