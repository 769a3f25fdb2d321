"""Ranks that start from a published model's weights have the values of its files under every
placement, and their checkpoint is exported unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ptrain.convert.export import export_checkpoint
from ptrain.cost import State
from ptrain.derivation.estimate import derive
from ptrain.interpreter import look
from ptrain.interpreter.execute import execute
from ptrain.interpreter.program import Program, interpret, prepare_construction
from ptrain.models.ledger import storage_of
from ptrain.models.meta import NeedsValuesError
from ptrain.models.pretrained import PretrainedFolder, weights_of
from ptrain.models.published_config import StoredPiece
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.train import saving
from ptrain.train.exchange import Exchange
from ptrain.train.loop_inputs import learning_rate
from tests.gloo.sessions import train_on_ranks
from tests.models_from_folder import save_decoder
from tests.published_folders import save_folder, tensors
from tests.ranks import Ranks
from tests.trajectories import one_device

pytest.importorskip("transformers")
pytestmark = pytest.mark.gloo

MOST_CUT = 1.3  # of flat units rows are cut, and so are stacked experts, which are one row
PLACEMENTS = ("zero3", "zero1", "tp", "tp-sp", "pp-1f1b", "zero-offload")


def save_initial_state(spec: Spec, folder: str) -> float:
    """Save a rank's initial state; return the elements read per element kept."""
    program = interpret(spec, world=World.join(spec.timeout))
    saving.save_checkpoint(program, Path(folder), 1, Exchange(program.world))
    rows = derive(spec).exact.of_rank(program.world.rank).memory
    held = [row.device_bytes + row.host_bytes for row in rows if row.state is State.PARAMETERS]
    kept = sum(held) / spec.precision.effective_layout.parameters.itemsize
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
def test_ranks_start_with_the_values_of_the_files(
    ranks: Ranks, case: str, placement: str, tmp_path: Path
) -> None:
    folder = save_folder(case, tmp_path / "in")
    words = (f"model={{pretrained: {folder}}}", "batch={global: 8, micro: 1, sequence: 16}")
    spec = load(placement, words).spec
    read = ranks.run(
        spec.world_size, save_initial_state, spec, str(tmp_path / "run" / "checkpoints")
    )
    assert min(read) > 0.9 and max(read) < 1.01, "whole rows: of flat units some are cut"
    (tmp_path / "run" / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name][: len(tensor)]), name


def require_parts(ranks: Sequence[ReadBytes], size: int) -> None:
    """Require that a rank has read only the bytes that it keeps; `size` is the size of all files in
    bytes."""
    for rank in ranks:
        assert 0.98 < rank.read / rank.kept < MOST_CUT, "shards may be padded"
        assert 0 < rank.looked < size / 4
    assert sum(rank.read + rank.looked for rank in ranks) >= size  # buffers are read before


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """The bytes of weights that a rank had read before sharding and after, and the bytes it
    keeps."""

    looked: int
    read: int
    kept: int


def save_initial_class(spec: Spec, folder: str) -> ReadBytes:
    """Save a rank's initial state of a transformers class; return what it has read."""
    read: list[int] = []
    whole = PretrainedFolder.read_piece

    def counted(self: PretrainedFolder, piece: StoredPiece, *dtypes: torch.dtype) -> None:
        before = self.bytes_read
        whole(self, piece, *dtypes)
        read.append(self.bytes_read - before)

    with mock.patch.object(PretrainedFolder, "read_piece", counted):
        rank = prepare_construction(spec, world=World.join(spec.timeout), allow_import=True)
        looked = sum(read)
        execute(rank)
    program = Program(rank)
    saving.save_checkpoint(program, Path(folder), 1, Exchange(program.world))
    held = (storage_of(x) for state, x in program.storages() if state is State.PARAMETERS)
    kept = {storage._cdata: storage.nbytes() for storage in held}
    return ReadBytes(looked, sum(read) - looked, sum(kept.values()))


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
                ("llama", "tp-zero3"),
                ("qwen3", "pp-zero3"),
                ("qwen3", "cp-ring"),
                ("gpt2", "tp"),
                ("gpt2", "tp-zero3"),
                ("mixtral", "pp-1f1b"),
                ("mixtral", "ep"),
            )
        ),
    ],
)
def test_ranks_with_a_transformers_class_start_with_the_values_of_the_files(
    ranks: Ranks, case: str, placement: str, tmp_path: Path
) -> None:
    folder = save_folder(case, tmp_path / "in")
    model = f"model={{pretrained: {folder}, hf: {case}}}"
    spec = load(placement, (model, "batch={global: 8, micro: 1, sequence: 16}")).spec
    begun = ranks.run(
        spec.world_size, save_initial_class, spec, str(tmp_path / "run" / "checkpoints")
    )
    size = sum(tensor.nbytes for tensor in tensors(folder).values())
    require_parts(begun, size)
    (tmp_path / "run" / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def train_three_steps(spec: Spec) -> list[float]:
    """Return the losses of three steps."""
    program = interpret(spec, world=World.join(spec.timeout), allow_import=True)
    torch.manual_seed(0)  # some classes draw as they route
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
    folder = save_folder("gemma3_text", tmp_path / "in")
    model = f"model={{pretrained: {folder}, hf: gemma3_text}}"
    words = (model, "batch={global: 4, micro: 1, sequence: 16}", "optimizer={name: sgd, lr: 0.05}")
    spec = load(placement, words).spec
    expected = one_device(spec, 3).losses
    for losses in ranks.run(spec.world_size, train_three_steps, spec):
        assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[0] - expected[2] > 0.01


# User model: the arguments of its folder.
OWN = {"own": "", "own, untied": "tied: false", "own, routed": "routed: true, tied: false"}


def folder_and_model(case: str, folder: Path) -> tuple[Path, str]:
    """Save a folder for this case; return it and the model that starts from it."""
    if case not in OWN:
        return save_folder(case, folder), f"model={{pretrained: {folder}, hf: {case}}}"
    given = f"target: 'tests.models_from_folder:build', arguments: {{{OWN[case]}}}"
    return save_decoder(folder, OWN[case]), f"model={{pretrained: {folder}, {given}}}"


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        ("own", "tp"),
        ("own, untied", "pp-1f1b"),
        *(
            pytest.param(case, placement, marks=pytest.mark.nightly)
            for case, placement in (
                *(("own", name) for name in ("ddp", "zero1", "zero3", "zero-offload")),
                *(("own", name) for name in ("cp-ring", "tp-zero3", "pp-1f1b", "pp-zero3")),
                *(("own, untied", name) for name in ("tp-sp", "3d")),
                *(("own, routed", name) for name in ("ep", "ep-zero3")),
            )
        ),
    ],
)
def test_ranks_with_a_user_model_read_only_their_shards(
    ranks: Ranks, case: str, placement: str, tmp_path: Path
) -> None:
    folder, model = folder_and_model(case, tmp_path / "in")
    spec = load(placement, (model, "batch={global: 8, micro: 1, sequence: 16}")).spec
    begun = ranks.run(
        spec.world_size, save_initial_class, spec, str(tmp_path / "run" / "checkpoints")
    )
    before = tensors(folder)
    require_parts(begun, sum(tensor.nbytes for tensor in before.values()))
    (tmp_path / "run" / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
    export_checkpoint(tmp_path / "run", tmp_path / "out", allow_import=True)
    after = tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def train_both_ways(spec: Spec) -> tuple[list[float], list[float]]:
    """Return the losses of three steps, with weights read by parts and read in full."""
    by_parts = train_three_steps(spec)
    needing = mock.Mock(side_effect=NeedsValuesError("the test says so"))
    with mock.patch.object(look, "build_module_on_meta", needing):
        whole = train_three_steps(spec)
    assert needing.called
    return by_parts, whole


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        ("mixtral", "ep"),
        ("own", "cp-ring"),
        *(
            pytest.param(case, placement, marks=pytest.mark.nightly)
            for case, placement in (
                *(("llama", name) for name in ("tp", "pp-1f1b", "tp-zero3", "pp-zero3", "tp-sp")),
                *(("qwen3", name) for name in ("tp", "pp-1f1b", "cp-ring", "cp-ulysses", "3d")),
                *(("mixtral", name) for name in ("ep-zero3", "pp-1f1b", "cp-ring", "ep-pp")),
                *(("own", name) for name in ("tp", "pp-1f1b", "tp-zero3", "pp-zero3", "zero1")),
                *(("own, routed", name) for name in ("ep", "ep-zero3")),
                ("phimoe", "pp-1f1b"),
                ("deepseek_v3", "pp-zero3"),
                ("gemma3_text", "pp-interleaved"),
            )
        ),
    ],
)
def test_weights_read_by_parts_train_like_weights_read_in_full(
    ranks: Ranks, case: str, placement: str, tmp_path: Path
) -> None:
    _, model = folder_and_model(case, tmp_path / "in")
    accumulate = 4 if "pp" in placement or placement == "3d" else 2
    batch = f"batch={{accumulate: {accumulate}, micro: 1, sequence: 16}}"
    spec = load(placement, (model, batch)).spec
    for by_parts, whole in ranks.run(spec.world_size, train_both_ways, spec):
        assert by_parts == whole and len({*whole}) == 3


@pytest.mark.parametrize("beside", ["drawn", pytest.param("''", marks=pytest.mark.nightly)])
def test_a_run_reports_why_its_model_was_read_in_full(
    ranks: Ranks, beside: str, tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path / "in")
    given = f"target: tests.models_from_folder:build, arguments: {{beside: {beside}}}"
    model = f"model={{pretrained: {folder}, {given}}}"
    words = ("mesh={}", "placement={}", model, "train.steps=1", "batch={global: 2, sequence: 16}")
    (ended,) = train_on_ranks(ranks, 1, "ddp", *words, "--allow-import", folder=tmp_path / "run")
    assert ended.code == 0, ended.error
    line = "weights  every rank built the full model first: its constructor draws random"
    assert ended.output.count(line) == int(beside == "drawn")


def save_after_two_steps(spec: Spec, run: str) -> None:
    program = interpret(spec, world=World.join(spec.timeout))
    for step in range(2):
        lr = learning_rate(spec.optimizer, step)
        program.forward_backward(program.samples(step), lr)
        program.step(lr)
    saving.save_checkpoint(program, Path(run) / "checkpoints", 2, Exchange(program.world))


@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 2, "ep": 2}, pytest.param({"dp_shard": 4}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_experts_fewer_than_ranks_are_exported_as_one_device_trains_them(
    ranks: Ranks, mesh: dict[str, int], tmp_path: Path
) -> None:
    """FSDP2 shards them along a dimension after the expert dimension."""
    shape = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
    shape |= {"vocab": 259, "rope_base": 1e6, "experts": 2, "experts_per_token": 1}
    common = {
        "model": shape,
        "precision": {"compute": "fp64"},
        "batch": {"global": 8, "micro": 1, "sequence": 16},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
    }
    exported = []
    for name, own in (("one", {}), ("many", mesh)):
        placement = dict.fromkeys(own, "zero3")
        spec = load({"name": name, **common, "mesh": own, "placement": placement}).spec
        run = tmp_path / name
        ranks.run(spec.world_size, save_after_two_steps, spec, str(run))
        (run / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
        export_checkpoint(run, tmp_path / f"{name}-exported")
        exported.append(tensors(tmp_path / f"{name}-exported"))
    one, many = exported
    assert one.keys() == many.keys()
    assert any("experts" in key for key in one)
    for key, tensor in one.items():
        torch.testing.assert_close(many[key], tensor, rtol=1e-10, atol=1e-10)
