"""Loops after the quick starts of libraries that configure the placement themselves.

Usage: _xray_quick_starts.py LIBRARY OPTION.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH, WIDTH = 8, 4, 32


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build_model() -> nn.Module:
    """Return a small model, equal on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))


def build_data(ranks: int) -> TensorDataset:
    """Return samples for all ranks, with classes as targets."""
    number = STEPS * BATCH * ranks
    return TensorDataset(torch.randn(number, WIDTH), torch.randint(0, 8, (number,)))


def train_deepspeed(stage: str) -> None:
    """Train with a ZeRO stage of DeepSpeed: deepspeed.ai/getting-started."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": int(stage),
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 2048,  # elements; the default is larger than the model
        },
    }
    model = build_model()
    deepspeed.init_distributed("gloo")
    data = build_data(int(os.environ["WORLD_SIZE"]))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config
    )
    for x, y in loader:
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()


def train_accelerate(option: str) -> None:
    """Train with accelerate, after its quicktour; `accumulate` has two micro-batches."""
    from accelerate import Accelerator

    steps = 2 if option == "accumulate" else 1
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    data = build_data(steps * int(os.environ["WORLD_SIZE"]))
    loader = DataLoader(data, BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def train_fabric(option: str) -> None:
    """Train with Lightning Fabric: lightning.ai/docs/fabric, "Convert PyTorch code to Fabric"."""
    from lightning_fabric import Fabric

    ranks = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=option)
    fabric.launch()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(build_data(ranks), BATCH, shuffle=True))
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def train_transformers(option: str) -> None:
    """Train a small Llama with the Trainer of Transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=4, **sizes)
    torch.manual_seed(0)
    rows = torch.randint(0, 64, (STEPS * BATCH * 4, 16))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=option == "checkpointing",
        optim="adamw_torch",
    )
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data).train()


def train_torch(option: str) -> None:
    """Train with parts of torch, after their documentation: ZeroRedundancyOptimizer, FSDP1."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model: nn.Module = build_model()
    torch.manual_seed(dist.get_rank())
    if option == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.parallel.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        strategy = ShardingStrategy[option.upper()]
        model = FullyShardedDataParallel(
            model, sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, option = sys.argv[1:]
    globals()[f"train_{name}"](option)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
