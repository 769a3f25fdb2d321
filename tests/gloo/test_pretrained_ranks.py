"""Ranks that begin with a published model's weights have, wherever these are placed, what its files
have: their checkpoint is exported as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptrain.convert.export import export
from ptrain.costs import State
from ptrain.derivation.estimate import derive
from ptrain.interpreter.program import interpret
from ptrain.models.pretrained import weights_of
from ptrain.rooms.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.train import checkpoint
from ptrain.train.exchange import Exchange
from tests.published_folders import saved, tensors
from tests.ranks import Ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.gloo

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
