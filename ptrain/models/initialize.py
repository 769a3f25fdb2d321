"""Initial weights that depend on the seed and on a parameter's name, and on nothing else.

Every tensor is drawn whole, in fp32 on the CPU, from a generator of its own, and cast afterwards:
whatever the placement, the dtype or the rank, the model starts from the same numbers. A model
built on the meta device is made real by

    module.to_empty(device=...)     # no values yet, neither parameters nor buffers
    initialize(module, seed)        # fills both

or, where a rank keeps only a part, part by part by `InitialValues` and then `reset_buffers`.
A module with buffers says how to refill them in a method `reset_buffers(self) -> None`.

A built-in model whose spec names a published one's folder begins with the weights in it.

A model that is not ptrain's keeps what its constructor gave (`keeps_its_weights`): `build` seeds
torch's generator before it constructs, so every rank has the same weights. `models.drawn` gives
these tensor by tensor; a rank builds only a model whole that this cannot represent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.drawn import DrawnWeights
from ptrain.models.module_weights import ModuleWeights
from ptrain.models.pretrained import weights_of
from ptrain.models.transformer import Transformer
from ptrain.models.window import Window, narrowed, whole
from ptrain.spec.block import Norm

STD = 0.02
_RESIDUAL = ("attention.output.weight", ".down.weight")  # what adds to the residual stream


def keeps_its_weights(module: nn.Module) -> bool:
    """True for a model whose constructor gave its weights: it must be built off the meta device."""
    return not isinstance(module, Transformer)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """The initial parameters of `module`, whose own are not read unless the model keeps its
    weights; rounded to `dtype`, whichever they are then stored in. `weights`: those of a module
    that is not built in and has no values."""

    module: nn.Module
    seed: int
    dtype: torch.dtype = torch.float32
    weights: ModuleWeights | DrawnWeights | None = None

    @torch.no_grad()
    def write(self, name: str, shape: Sequence[int], window: Window, part: Tensor) -> None:
        """Fill `part`, on any device, with this window of a parameter. What is drawn is drawn
        whole; of a published model's files nothing else is read."""
        if self.weights is not None:
            self.weights.read_window(name, shape, window, part, self.dtype)
        elif self._is_read:
            weights = weights_of(self.module.shape)
            weights.read(name, shape, window, part, self.dtype)
        else:
            drawn = initial(name, shape, self.seed, self.module)
            part.copy_(narrowed(drawn, window).to(self.dtype))

    @property
    def _is_read(self) -> bool:
        module = self.module
        has_folder = isinstance(module, Transformer) and module.shape.pretrained is not None
        return has_folder and detect_fake_mode() is None  # fakes have no values


def initial(name: str, shape: Sequence[int], seed: int, module: nn.Module) -> Tensor:
    """One parameter of a model that begins with no files, whole, in fp32 on the CPU."""
    if keeps_its_weights(module):
        return module.get_parameter(name).detach().to("cpu", torch.float32, copy=True)
    assert isinstance(module, Transformer), "it keeps none"
    if name.endswith("norm.weight"):
        return torch.full(shape, _weight_of_norm(module), device="cpu")
    if name.endswith("bias"):
        return torch.zeros(*shape, device="cpu")
    drawn = torch.empty(*shape, device="cpu", dtype=torch.float32)
    return drawn.normal_(0.0, _std(name, module), generator=_generator(seed, name))


def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter and every buffer of a model none of whose tensors are cut."""
    if keeps_its_weights(module):
        return
    values = InitialValues(module=module, seed=seed)
    for name, parameter in module.named_parameters():
        values.write(name, parameter.shape, whole(parameter.shape), parameter)
    reset_buffers(module)


@torch.no_grad()
def reset_buffers(module: nn.Module) -> None:
    """Refill the buffers of every submodule that knows how to."""
    for child in module.modules():
        reset = getattr(child, "reset_buffers", None)
        if callable(reset):
            reset()


@torch.no_grad()
def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to `dtype`; buffers that hold reals stay wide: fp32, or fp64 with fp64."""
    wide = torch.promote_types(dtype, torch.float32)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(child, name, buffer.to(wide))
    if wide is torch.float64:  # tables computed in fp64 and stored in fp32 have lost their tail
        reset_buffers(module)


def _weight_of_norm(module: nn.Module) -> float:
    """With which a norm does nothing but norm."""
    assert isinstance(module, Transformer), "only built-in models are drawn"
    return 0.0 if module.shape.norm is Norm.RMS_PLUS_ONE else 1.0


def _std(name: str, module: nn.Module) -> float:
    assert isinstance(module, Transformer), "only built-in models are drawn"
    num_residual = 2 * module.shape.layers  # every block adds twice to the residual stream
    return STD / math.sqrt(num_residual) if name.endswith(_RESIDUAL) else STD


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
