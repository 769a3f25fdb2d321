"""Ranks that begin with a published model's weights have, wherever these are placed, what its files
have: their checkpoint is exported as it was."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ptrain.convert.export import export
from ptrain.costs import State
from ptrain.derivation.estimate import derive
from ptrain.interpreter.program import interpret
from ptrain.models.pretrained import PretrainedFolder, weights_of
from ptrain.models.published_names import StoredPiece
from ptrain.rooms.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.train import checkpoint
from ptrain.train.exchange import Exchange
from ptrain.train.schedule import learning_rate
from ptrain.verification.reference import one_device
from tests.published_folders import saved, tensors
from tests.ranks import Ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.gloo

# How often all ranks of a class read the files together; elsewhere each of them does. Of flat units
# rows are cut, and so are experts, which are one row when they are stacked.
COPIES = {"zero3": 1, "zero-offload": 1, "hsdp": 2}
PLACEMENTS = ("zero3", "zero1", "tp", "tp-sp", "pp-1f1b", "zero-offload")


def begun(spec: Spec, folder: str) -> float:
    """Save what a rank begins with; return how many elements it has read for one that it keeps."""
    program = interpret(spec, world=World.join(spec.timeout))
    checkpoint.save(program, Path(folder), 1, Exchange(program.world))
    rows = derive(spec).exact.of_rank(program.world.rank).memory
    held = [row.device_bytes + row.host_bytes for row in rows if row.state is State.PARAMETERS]
    kept = sum(held) / spec.precision.effective.parameters.itemsize
    return weights_of(spec.model).bytes_read / 4 / kept  # files of fp32


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        ("gemma2", "zero3"),
        ("mixtral", "ep-zero3"),
        ("gpt2", "tp"),
        *(
            pytest.param(case, placement, marks=pytest.mark.nightly)
            for case, placement in (
                *(("llama, tied, as 3.2", placement) for placement in PLACEMENTS),
                ("gpt2", "pp-1f1b"),
                ("phi3", "tp"),
                ("phi3", "zero1"),
                ("gemma3, scaled", "tp"),
                ("starcoder2", "pp-1f1b"),
                ("gpt2", "zero3"),
                ("qwen2", "tp-sp"),
                ("qwen3", "tp"),
                ("gemma", "pp-1f1b"),
                ("qwen3_moe", "ep"),
                ("qwen3_moe", "tp"),
                ("mixtral", "zero3"),
            )
        ),
    ],
)
def test_ranks_begin_with_what_the_files_have(
    ranks: Ranks, case: str, placement: str, tmp_path: Path
) -> None:
    folder = saved(case, tmp_path / "in")
    words = (f"model={{pretrained: {folder}}}", "batch={global: 8, micro: 1, sequence: 16}")
    spec = load(placement, words).spec
    read = ranks.run(spec.world_size, begun, spec, str(tmp_path / "run" / "checkpoints"))
    assert min(read) > 0.9 and max(read) < 1.01, "whole rows: of flat units some are cut"
    (tmp_path / "run" / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
    export(tmp_path / "run", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name][: len(tensor)]), name


def begun_class(spec: Spec, folder: str) -> int:
    """Save what a rank begins with; return how many bytes of weights it has read."""
    read: list[int] = []
    whole = PretrainedFolder.read

    def counted(self: PretrainedFolder, piece: StoredPiece, dtype: torch.dtype) -> None:
        before = self.bytes_read
        whole(self, piece, dtype)
        read.append(self.bytes_read - before)

    with mock.patch.object(PretrainedFolder, "read", counted):
        program = interpret(spec, world=World.join(spec.timeout))
    checkpoint.save(program, Path(folder), 1, Exchange(program.world))
    return sum(read)


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        ("starcoder2", "zero3"),
        ("gemma3_text", "tp"),
        *(
            pytest.param(case, placement, marks=pytest.mark.nightly)
            for case, placement in (
                *(("gemma3_text", placement) for placement in ("ddp", "zero3", "pp-1f1b")),
                ("olmo2", "zero1"),
                ("granite", "zero-offload"),
                ("starcoder2", "pp-1f1b"),
                ("deepseek_v3", "zero3"),
                ("qwen2_moe", "ep"),
                ("qwen2_moe", "ep-zero3"),
                ("phimoe", "zero3"),
                ("phimoe", "zero1"),
                ("phimoe", "hsdp"),
                ("gpt_oss", "zero2"),
            )
        ),
    ],
)
def test_ranks_with_a_class_of_transformers_begin_with_what_the_files_have(
    ranks: Ranks, case: str, placement: str, tmp_path: Path
) -> None:
    folder = saved(case, tmp_path / "in")
    model = f"model={{pretrained: {folder}, hf: {case}}}"
    spec = load(placement, (model, "batch={global: 8, micro: 1, sequence: 16}")).spec
    read = ranks.run(spec.world_size, begun_class, spec, str(tmp_path / "run" / "checkpoints"))
    size = sum(tensor.nbytes for tensor in tensors(folder).values())
    assert sum(read) / size == pytest.approx(COPIES.get(placement, spec.world_size), rel=0.25)
    assert sum(read) >= size
    (tmp_path / "run" / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
    export(tmp_path / "run", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def trained(spec: Spec) -> list[float]:
    """Return the losses of three steps."""
    program = interpret(spec, world=World.join(spec.timeout))
    losses = []
    for step in range(3):
        lr = learning_rate(spec.optimizer, step)
        share = program.forward_backward(program.samples(step), lr).clone()
        program.step(lr)
        dist.all_reduce(share)
        losses.append(share.item())
    return losses


@pytest.mark.parametrize(
    "placement",
    [
        "zero3",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("zero1", "ddp", "zero2")),
    ],
)
def test_a_tied_class_trains_as_on_one_device(ranks: Ranks, placement: str, tmp_path: Path) -> None:
    folder = saved("gemma3_text", tmp_path / "in")
    model = f"model={{pretrained: {folder}, hf: gemma3_text}}"
    words = (model, "batch={global: 4, micro: 1, sequence: 16}", "optimizer={name: sgd, lr: 0.05}")
    spec = load(placement, words).spec
    expected = one_device(spec, 3).losses
    for losses in ranks.run(spec.world_size, trained, spec):
        assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[0] - expected[2] > 0.01
