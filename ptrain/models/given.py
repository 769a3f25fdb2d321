"""A module that the user built, in the place of the spec's model.

It may be anything that `forward(tokens) -> logits` describes, on the CPU or the rank's device, with
the weights that it has. A causal language model of transformers gives its logits inside of an
object: from here on it gives them alone, unless the spec's loss is a function of the user's.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ptrain.errors import refused
from ptrain.models.huggingface import gives_objects, to_logits
from ptrain.models.initialize import cast, keeps_its_weights
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.transformer import Transformer
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.spec import Spec

_PLACE = "model"
_WRAPPERS = (DistributedDataParallel, FSDPModule, FSDP1)


def accept(module: nn.Module, spec: Spec) -> Spec:
    """Return the spec with `module` for its model. The module is changed in place: it is in
    training mode, its parameters are in the spec's dtype, and one of transformers gives logits.
    Raises SpecError for what is no module, is wrapped already or has no values."""
    require_fresh(module)
    if gives_objects(module) and spec.loss.user_function is None:
        to_logits(module)
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    module.train()
    return with_model(spec, module)


def with_model(spec: Spec, module: nn.Module) -> Spec:
    """Return the spec with what is known of a module for its model: the shape of one of ours; the
    module's class, in the place of a shape that is none of its own."""
    if not isinstance(spec.model, ModelShape):
        return spec
    if isinstance(module, Transformer):
        shape = module.shape
        return spec if shape == spec.model else replace(spec, model=shape)
    kind = type(module)
    return replace(spec, model=ExternalModel(target=f"{kind.__module__}:{kind.__qualname__}"))


def require_fresh(module: nn.Module) -> None:
    """Raises SpecError for what is no module, is wrapped already or has no values."""
    if not isinstance(module, nn.Module):
        finding = f"{type(module).__name__} is no torch.nn.Module"
        raise refused(_PLACE, finding, "give the module itself, before anything wraps it")
    name = type(module).__name__
    for path, inner in module.named_modules():
        if wrapper := next((kind for kind in _WRAPPERS if isinstance(inner, kind)), None):
            finding = f"{path or name} is wrapped already: {wrapper.__name__}"
            remedy = "give it as it was before, and it is wrapped as the spec says; one that you "
            remedy += "wrap is measured: ptrain.measure(model, optimizer=optimizer)"
            raise refused(_PLACE, finding, remedy)
    for path, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            finding = f"{path} of {name} is a DTensor, cut already"
            raise refused(_PLACE, finding, "give the module with whole tensors, ptrain cuts them")
    if keeps_its_weights(module):
        _require_values(module)


def _require_values(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [path for path, tensor in tensors if tensor.is_meta]
    if on_meta:
        finding = f"{on_meta[0]} of {type(module).__name__} is on meta, and has no values"
        remedy = (
            "build it on the CPU, after torch.manual_seed with one number on every rank, or "
            "load its weights first (to_empty and load_state_dict)"
        )
        raise refused(_PLACE, finding, remedy)
