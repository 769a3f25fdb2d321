"""The patches of torch on fake ranks: each is needed, has its effect, and restores torch."""

import re
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import _functional_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import DTensor

from ptrain.cost import Estimate, Phase
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.installed import torch_minor
from ptrain.runtime import patches
from ptrain.runtime.patches import PATCHES, Chunks, patch_torch
from ptrain.runtime.world import create_fake_mode, fake_tensors
from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.execute import SimulatedRank, simulate
from ptrain.spec.load import load
from tests.unit.test_simulation import SMALL, small


def without_patch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    left = tuple(patch for patch in patches.PATCHES if patch.name != name)
    assert len(left) < len(patches.PATCHES)
    monkeypatch.setattr(patches, "PATCHES", left)


@pytest.mark.nightly
def test_without_its_patch_dtensors_results_of_global_shape_are_counted(monkeypatch) -> None:
    """Seen at every call where fake ranks are taken for tracing, and nothing is remembered."""
    spec = small("tp")
    without_patch(monkeypatch, "tracing")
    right = simulate(spec).estimate.peak
    without_patch(monkeypatch, "shapes of DTensor's results")
    wrong = simulate(spec).estimate.peak
    assert sum(row.device_bytes for row in wrong) > sum(row.device_bytes for row in right)


def test_without_its_patch_functional_collectives_are_awaited_at_once(monkeypatch) -> None:
    seen: list[bool] = []
    tracing = _functional_collectives._are_we_tracing

    def watching() -> bool:
        seen.append(tracing())
        return seen[-1]

    without_patch(monkeypatch, "tracing")
    for module in patches.TRACERS:
        monkeypatch.setattr(module, "_are_we_tracing", watching)
    simulate(small("tp"))
    assert True in seen, "torch takes fake tensors for tracing"


@pytest.mark.nightly
def test_without_its_patch_the_result_of_a_collective_is_there_twice(monkeypatch) -> None:
    """On the first stage the highest moment of forward is a sum over tp."""
    both = ("mesh={pp: 2, tp: 2}", "placement={pp: [S, S, S, R], tp: tp}")
    spec = resolve_auto(load("tp", (*SMALL, *both, "batch.global=2")))
    right = in_forward(simulate(spec).estimate)
    assert right == in_forward(derive(spec).exact.of_rank(0))
    without_patch(monkeypatch, "results of functional collectives")
    assert in_forward(simulate(spec).estimate) > right


def in_forward(found: Estimate) -> int:
    (peak,) = (row.device_bytes for row in found.peak if row.phase is Phase.FORWARD)
    return peak


@pytest.mark.nightly
def test_without_its_patch_a_copied_buffer_and_its_views_are_two(monkeypatch) -> None:
    spec = small("pp-1f1b", "batch.global=2")
    right = peak(simulate(spec))
    without_patch(monkeypatch, "copies of fake tensors")
    assert peak(simulate(spec)) > right


def peak(found: SimulatedRank) -> int:
    return max(row.device_bytes for row in found.estimate.peak)


@pytest.mark.nightly
def test_fsdp2_requests_only_two_parts_of_a_parameter(monkeypatch) -> None:
    asked: list[set[int]] = []

    class Counting(Chunks):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            asked.append(set())
            self.asked = asked[-1]

        def __getitem__(self, index):
            self.asked.add(index)
            return super().__getitem__(index)

    monkeypatch.setattr(patches, "Chunks", Counting)
    simulate(small("zero3", "mesh.dp_shard=4"), 2)
    assert len(asked) >= 3, "one for each parameter"
    assert all(each <= {0, 2} for each in asked)


@pytest.mark.nightly
def test_without_its_patch_fsdp2_makes_a_view_for_every_rank(monkeypatch) -> None:
    made: list[int] = []

    def counting(tensor: torch.Tensor, number: int, dim: int) -> list[torch.Tensor]:
        made.append(number)
        return _chunk_with_empty(tensor, number, dim)

    without_patch(monkeypatch, "chunks of FSDP2")
    monkeypatch.setattr(_fsdp_param, "_chunk_with_empty", counting)
    simulate(small("zero3", "mesh.dp_shard=4"))
    assert made and set(made) == {4}


@given(
    rows=st.integers(0, 40), columns=st.integers(1, 3), number=st.integers(1, 24), data=st.data()
)
def test_lazy_chunks_are_those_of_torch(rows, columns, number, data) -> None:
    dim = data.draw(st.integers(0, 1))
    tensor = torch.arange(rows * columns).view(rows, columns)
    expected = _chunk_with_empty(tensor, number, dim)
    found = Chunks(tensor, number, dim)
    assert len(found) == len(expected) == number
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape or one.numel() == other.numel() == 0
        assert torch.equal(one.flatten(), other.flatten())
    assert len(found[1:]) == number - 1
    with pytest.raises(IndexError):
        found[number]


@pytest.mark.skipif(
    torch_minor() in ("2.14", "2.15"), reason="2.15 has the shapes of all dtypes; 2.14 is not asked"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_its_patch_a_grouped_product_has_shapes_in_bf16_alone(dtype) -> None:
    """Of the others torch has the shapes that it gives on real tensors."""
    rows, widths = torch.ones(6, 16, dtype=dtype), torch.ones(2, 24, 16, dtype=dtype)
    ends = torch.tensor([2, 6], dtype=torch.int32)

    def product(*tensors: torch.Tensor) -> torch.Tensor:
        rows, widths, ends = tensors
        return torch.nn.functional.grouped_mm(rows, widths.transpose(1, 2), offs=ends)

    real = product(rows, widths, ends)
    with create_fake_mode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (rows, widths, ends)]
        if dtype is not torch.bfloat16:
            with pytest.raises(RuntimeError, match="Expected inputs of BF16"):
                product(*fakes)
        with patch_torch(small("zero3").model):
            fake = product(*fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.nightly
def test_local_shapes_of_one_rank_are_forgotten_before_the_next(monkeypatch) -> None:
    spec = small("tp")
    monkeypatch.setattr(patches, "clear_shape_caches", lambda: None)
    simulate(spec, 0)
    with pytest.raises(RuntimeError, match="shape"):
        simulate(spec, 1)
    monkeypatch.undo()
    sizes = [simulate(spec, rank).estimate.memory[0].device_bytes for rank in (1, 0)]
    assert sizes[0] < sizes[1], "261 rows of the vocabulary are 131 and 130"


def test_torch_is_restored_after_a_failure() -> None:
    before = [getattr(patch.owner, patch.attribute) for patch in PATCHES]
    with pytest.raises(ZeroDivisionError), patch_torch(small("zero3").model):
        assert _fsdp_param._chunk_with_empty is not _chunk_with_empty
        _ = 1 // 0
    cache = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache
    assert cache.cache_info().currsize == 0
    assert [getattr(patch.owner, patch.attribute) for patch in PATCHES] == before


@pytest.mark.parametrize("version", ["2.10.2", "2.16.0+cpu", "3.0"])
def test_a_torch_for_which_nothing_is_written_is_rejected(monkeypatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(PtrainError, match=f"torch {re.escape(version)} is installed") as refusal:
        simulate(small("zero3"))
    assert "remedy" in str(refusal.value)


def test_without_its_patch_a_fake_module_cannot_be_moved_to_its_device(monkeypatch) -> None:
    def moved() -> None:
        with patch_torch(small("ddp").model), fake_tensors():
            layer = torch.nn.Linear(2, 2)
            seen = weakref.ref(layer.weight)  # as a mode sees it
            assert layer.to(layer.weight.device) is layer and seen() is layer.weight

    moved()
    without_patch(monkeypatch, "modules that are moved to where they are")
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        moved()
