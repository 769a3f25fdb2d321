"""A model with peft's adapters as folders that others load: the adapters merged into the layers
that they stand beside, as a folder of transformers, or the adapters alone, as one of peft."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptrain.convert.saved import SavedModel
from ptrain.errors import SpecError, refused

_CONFIG = "peft_config"  # peft leaves it on the module that it puts adapters into
_ADAPTER = "default"  # its name of the adapter where nobody gives one
_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."  # as PeftModel saves them


class Adapters(StrEnum):
    MERGED = "merged"
    ALONE = "alone"


def write_adapters(
    saved: SavedModel, to: Path, how: Adapters, *, allow_import: bool
) -> tuple[str, int, int, str]:
    """Write a checkpoint's model to the folder `to`, which is there; return the class that its
    adapters were put into, how many tensors were written, and of how many bytes, and the folder or
    hub name that the class was loaded from, if any. The whole model is in memory. Raises SpecError
    for a model without adapters, and what `SavedModel.built` raises."""
    module, _ = saved.built(allow_import=allow_import)
    module.load_state_dict(saved.load(saved.parameters), strict=False)
    adapted = _adapted(module)
    write = _write_merged if how is Adapters.MERGED else _write_alone
    tensors = [*write(adapted, to)]
    size = sum(tensor.nbytes for tensor in tensors)
    base = getattr(adapted, "name_or_path", None)  # what transformers' from_pretrained was given
    return type(adapted).__name__, len(tensors), size, str(base or "")


def _adapted(module: nn.Module) -> nn.Module:
    """Return what peft put adapters into."""
    for part in module.modules():
        if isinstance(getattr(part, _CONFIG, None), dict):
            return part
    raise _refused(f"{type(module).__name__} has no adapters of peft")


@torch.no_grad()
def _write_merged(adapted: Any, to: Path) -> Iterator[torch.Tensor]:
    """Write the class, in whose layers the adapters are; yield its parameters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not hasattr(adapted, "save_pretrained"):
        raise _refused(f"{type(adapted).__name__} is no class of transformers")
    for name, layer in list(adapted.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            path, _, attribute = name.rpartition(".")
            setattr(adapted.get_submodule(path), attribute, layer.get_base_layer())
    delattr(adapted, _CONFIG)
    adapted.save_pretrained(to)
    yield from adapted.parameters()


def _write_alone(adapted: Any, to: Path) -> Iterator[torch.Tensor]:
    """Write the adapters and their config; yield their tensors."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = getattr(adapted, _CONFIG)
    if set(config) != {_ADAPTER}:
        raise _refused(f"there are the adapters {', '.join(config)}")
    tensors = {
        f"{_PREFIX}{name}": tensor.detach().contiguous()
        for name, tensor in get_peft_model_state_dict(adapted).items()
    }
    save_file(tensors, to / _WEIGHTS, metadata={"format": "pt"})
    config[_ADAPTER].save_pretrained(to)
    yield from tensors.values()


def _refused(finding: str) -> SpecError:
    return refused("--adapters", finding, "leave it out: all parameters are written then")
