"""One name for one parameter, whatever was wrapped around the module that has it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

# What DistributedDataParallel, torch.compile, FSDP1 and checkpoint_wrapper put into a path.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """The path without what wrappers put into it: `module.block._orig_mod.weight` is
    `block.weight`. Nothing is left of the root module's own path."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def canonical_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by canonical name; one that is tied has the first of its names."""
    return {canonical_name(name): tensor for name, tensor in module.named_parameters()}


def canonical_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by canonical path, the root is ""; of a wrapper and what it wraps, the
    innermost."""
    modules: dict[str, nn.Module] = {}
    for path, submodule in module.named_modules():
        modules[canonical_name(path)] = submodule
    yield from modules.items()
