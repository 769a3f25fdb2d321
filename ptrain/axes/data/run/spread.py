"""An update that is spread over replicas: each rank updates whole tensors and sends them to the
others (torch's ZeroRedundancyOptimizer). Omega is S, in units of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer

from ptrain.axes.data.run.flat_target import distribute_rows
from ptrain.axes.data.run.target import Named, ParameterTarget
from ptrain.cost import State
from ptrain.internals import zero_redundancy
from ptrain.optimizers.build import build_optimizer, initial_state
from ptrain.optimizers.torch import TorchLeaf
from ptrain.optimizers.update import Scale
from ptrain.rooms.registry import Registry
from ptrain.spec.job import OptimizerSpec


class SpreadTarget(ParameterTarget):
    """A whole parameter on every rank whose optimizer state is on one, `owner`."""

    def __init__(self, name: str, parameter: nn.Parameter, owner: int, mesh: DeviceMesh) -> None:
        super().__init__(name, parameter)
        self.owner = owner
        self.mesh = mesh

    def split(self, part: torch.Tensor) -> Named:
        """The owner's tensor, cut by rows over all ranks: one is whole here at a time."""
        group = self.mesh.get_group()
        whole = torch.empty_like(part, device=self.parameter.device) if part.is_meta else part
        dist.broadcast(whole, src=dist.get_global_rank(group, self.owner), group=group)
        return {self.name: distribute_rows(whole, self.mesh)}


class ZeroRedundancyUpdate:
    """ZeroRedundancyOptimizer over the targets' parameters, which become views of a bucket per
    owner; each owner broadcasts its bucket after its update."""

    def __init__(
        self,
        targets: Sequence[ParameterTarget],
        spec: OptimizerSpec,
        mesh: DeviceMesh,
        registry: Registry,
        *,
        stands_in: bool,
    ) -> None:
        self.spec = spec
        self.frozen = [target for target in targets if target.is_frozen]
        targets = [target for target in targets if not target.is_frozen]
        self.optimizer = ZeroRedundancyOptimizer(
            [target.parameter for target in targets],
            lambda parameters: build_optimizer(spec.name, parameters, spec, stands_in=stands_in),
            process_group=mesh.get_group(),
            parameters_as_bucket_view=True,
        )
        owners = zero_redundancy.owners(self.optimizer)
        self.targets = [
            SpreadTarget(target.name, target.parameter, owners[target.parameter], mesh)
            for target in targets
        ]
        for bucket in self._buckets():
            registry.tag(bucket, State.PARAMETERS)
        for target in self.targets:  # as torch's first step would, so that it can be loaded into
            if target.owner == mesh.get_local_rank():
                self.optimizer.optim.state[target.parameter].update(self._initial(target))

    def step(self, lr: float, scaling: Scale[torch.Tensor] | None = None) -> None:
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        own = self.optimizer.optim
        scalars = scaling.beside(self.targets[0].value()) if scaling else (None, None)
        own.grad_scale, own.found_inf = scalars  # where torch.amp.GradScaler leaves them
        self.optimizer.step()

    def tensors(self) -> Iterator[tuple[ParameterTarget, dict[str, torch.Tensor]]]:
        """Every target on every rank; what another rank keeps is a tensor without data. Frozen ones
        come last, with nothing."""
        for target in self.targets:
            held = self.optimizer.optim.state.get(target.parameter)
            yield target, dict(held) if held else self._initial(target, torch.device("meta"))
        for frozen in self.frozen:
            yield frozen, {}

    def leaves(self) -> Iterator[tuple[SpreadTarget, TorchLeaf]]:
        for target in self.targets:
            yield target, TorchLeaf(target.parameter)

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """A rank that owns no tensor has a bucket of one element."""
        for bucket in self._buckets():
            yield State.PARAMETERS, bucket
        for state in self.optimizer.optim.state.values():
            for tensor in state.values():
                yield State.OPTIMIZER, tensor

    def _buckets(self) -> Iterator[torch.Tensor]:
        return zero_redundancy.buckets(self.optimizer)

    def _initial(self, target: ParameterTarget, device: torch.device | None = None) -> Named:
        return initial_state(self.spec.name, self.spec, target.parameter.detach(), device)
