"""A rehearsal of one rank on one GPU: the allocator's peak compared with live memory."""

from collections.abc import Callable

import pytest
import torch

from ptrain.cost import Phase
from ptrain.derivation.estimate import derive
from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.execute import SimulatedRank, simulate
from ptrain.spec.load import load

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a rehearsal on a GPU needs one"),
]

SHAPE = ("model.preset=llama-10m", "batch={global: 16, micro: 2, sequence: 256}", "device=cuda")
MESHES = {"zero3": "mesh.dp_shard=8", "tp": "mesh.tp=2"}
ROUNDING = 0.05  # 512 bytes a tensor, and what operators take within themselves
WORKSPACES = 65 * 2**20  # of matrix products, made once: on an H100 32 MiB a thread, and cuBLASLt's


def peaks(found: SimulatedRank) -> dict[Phase, tuple[int, int]]:
    return {row.phase: (row.device_bytes, row.allocator_bytes) for row in found.estimate.peak}


@pytest.mark.parametrize("strategy", MESHES)
def test_the_allocators_peak_equals_live_memory_except_for_rounding(
    strategy: str, record_property: Callable[[str, object], None]
) -> None:
    spec = resolve_auto(load(strategy, (*SHAPE, MESHES[strategy])))
    for phase, (lives, held) in peaks(simulate(spec, rehearse=True)).items():
        record_property(f"{strategy} {phase}", f"{held - lives:+d} of {lives}")
        assert lives <= held <= lives * (1 + ROUNDING) + WORKSPACES, phase


def test_a_rank_leaves_no_memory_to_the_next() -> None:
    spec = resolve_auto(load("zero3", (*SHAPE, MESHES["zero3"])))
    simulate(spec, 0, rehearse=True)
    assert torch.cuda.memory_allocated() <= WORKSPACES


@pytest.mark.parametrize("layout", ["bf16", "fp32"])
@pytest.mark.parametrize("strategy", MESHES)
def test_live_memory_equals_the_prediction_to_the_byte(strategy: str, layout: str) -> None:
    major, minor = torch.cuda.get_device_capability()
    cluster = f"cluster={{preset: h100-8, sm: {10 * major + minor}}}"
    words = (*SHAPE, MESHES[strategy], cluster, f"precision.layout={layout}")
    spec = resolve_auto(load(strategy, words))
    derived = {row.phase: row.device_bytes for row in derive(spec).exact.of_rank(0).peak}
    rehearsed = peaks(simulate(spec, rehearse=True))
    assert {phase: lives for phase, (lives, _) in rehearsed.items()} == derived
