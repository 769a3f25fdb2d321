"""Start a script that is written for GPUs on CPUs: replace the device, nothing else.

Usage: _xray_driver.py SCRIPT [ARGUMENT ...]. Every device becomes the CPU, NCCL becomes gloo, and
pinned memory is plain memory. Packages of CUDA kernels and of logging are empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_EMPTY = (
    "flash_attn.flash_attn_interface.flash_attn_func",
    "flash_attn.layers.rotary.apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm.layer_norm_fn",
    "wandb.log",
)


class Length:
    """The type of a column of lists, as `datasets.Sequence` is."""

    def __init__(self, feature: object, length: int) -> None:
        self.length = length


class RandomRows:
    """A dataset of seeded tokens instead of a downloaded text."""

    column_names = ("text",)

    def __init__(self, *args: object, **named: object) -> None:
        pass

    def map(self, function: object, *, features: dict[str, Length], **named: object) -> list[Any]:
        """Return rows of the length that the columns have."""
        draw = random.Random(0)
        length = features["input_ids"].length
        return [{"input_ids": [draw.randrange(100) for _ in range(length)]} for _ in range(256)]


def _on_cpu(value: Any) -> Any:
    """Return the CPU for a GPU, and other values as they are."""
    if type(value) is int or (isinstance(value, str) and value.startswith("cuda")):
        return CPU
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


class _OnCpu(TorchFunctionMode):
    """Call torch's functions with the CPU instead of a GPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if "device" in named:
            named["device"] = _on_cpu(named["device"])
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        return function(*args, **named)


def replace_devices(ranks: int) -> None:
    """Replace GPUs by the CPU in this process.

    Args:
        ranks: Number of devices that the script sees.
    """
    _OnCpu().__enter__()
    move = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *args, **named: move(
        module,
        *map(_on_cpu, args),
        **{name: _on_cpu(value) if name == "device" else value for name, value in named.items()},
    )
    torch.nn.Module.cuda = lambda module, device=None: module
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *args, **named: None)
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: ranks
    torch.accelerator.current_accelerator = lambda check_available=False: CPU
    torch.accelerator.device_index = torch.accelerator.set_device_index = lambda index: None
    start, wrap = dist.init_process_group, DistributedDataParallel.__init__

    def init_process_group(backend: str | None = None, **named: Any) -> None:
        named.pop("device_id", None)
        start("gloo" if backend == "nccl" else backend, **named)

    def init_ddp(self: Any, module: Any, device_ids: Any = None, *args: Any, **named: Any) -> None:
        named.pop("output_device", None)
        wrap(self, module, None, *args, **named)

    dist.init_process_group = init_process_group
    torch.distributed.distributed_c10d.init_process_group = init_process_group
    DistributedDataParallel.__init__ = init_ddp


def add_empty_modules() -> None:
    """Add an empty module for each package that is missing."""
    for path in _EMPTY:
        *packages, name = path.split(".")
        if packages[0] not in sys.modules and importlib.util.find_spec(packages[0]):
            continue
        for end in range(1, len(packages) + 1):
            full = ".".join(packages[:end])
            module = sys.modules.setdefault(full, types.ModuleType(full))
            if end > 1:
                setattr(sys.modules[".".join(packages[: end - 1])], packages[end - 1], module)
        setattr(sys.modules[".".join(packages)], name, None)
    rows = types.ModuleType("datasets")
    rows.load_dataset, rows.Sequence = RandomRows, Length  # type: ignore[attr-defined]
    rows.Features, rows.Value = dict, lambda **named: None  # type: ignore[attr-defined]
    sys.modules["datasets"] = rows


def main() -> None:
    """Run the script with its arguments."""
    torch.set_num_threads(1)
    replace_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    sys.argv = sys.argv[1:]
    folder = Path(sys.argv[0]).resolve().parent
    sys.path[0] = str(folder)
    if (folder / "picotron").is_dir():
        # Transformers looks for these packages, so it is loaded first.
        importlib.import_module("transformers.models.llama.modeling_llama")
        add_empty_modules()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
