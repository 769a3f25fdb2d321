"""Kernel workspaces are among the events of a simulated step."""

import pytest
import torch

from ptrain.derivation.kernels import attention_backward, sum_of_rows
from ptrain.simulation.execute import simulate
from ptrain.simulation.living import kernel_allocations
from ptrain.simulation.replay import Change
from ptrain.spec.load import load

SMALL = (
    "model={layers: 1, hidden: 128, heads: 2, kv_heads: 2, ffn: 48, vocab: 261}",
    "batch={global: 4, micro: 2, sequence: 1024}",
    "mesh.dp_shard=2",
    "cluster.preset=h100-8",
)


def within_kernels(*words: str) -> set[int]:
    """Sizes that kernels take within themselves in a simulated step."""
    spec = load("zero3", (*SMALL, *words)).spec
    events = simulate(spec).run.stream.events
    changes = (event for event in events if isinstance(event, Change))
    return {change.size for change in changes if change.kind.is_within and change.size > 0}


@pytest.mark.parametrize(
    ("layout", "kernel", "itemsize"), [("bf16", "cudnn", 2), ("fp32", "efficient", 4)]
)
def test_workspaces_of_attention_and_sums_are_events(
    layout: str, kernel: str, itemsize: int
) -> None:
    sizes = within_kernels(f"precision.layout={layout}")
    attention = attention_backward(kernel, itemsize, batch=2, heads=2, sequence=1024, head_dim=64)
    assert sizes == {*attention, sum_of_rows(2048, 128)}


def test_where_sums_are_deterministic_attentions_are_not_known() -> None:
    assert within_kernels("deterministic=true") == {sum_of_rows(2048, 128)}


@pytest.mark.parametrize(
    ("shape", "dimensions", "dtype"),
    [
        ((), [0], torch.float32),
        ((0, 4), [0], torch.float32),
        ((5,), [-1], torch.float32),
        ((2048, 64), [1], torch.float32),
        ((2048, 64), None, torch.float32),
        ((2048, 64), [0], torch.int64),
    ],
)
def test_sums_of_other_kinds_take_nothing_that_is_known(
    shape: tuple[int, ...], dimensions: list[int] | None, dtype: torch.dtype
) -> None:
    of_operator = kernel_allocations(load("zero3", ("cluster.preset=h100-8",)).spec)
    assert of_operator("aten::sum", (torch.zeros(shape, dtype=dtype), dimensions)) == ()
