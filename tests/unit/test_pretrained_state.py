"""The full state of a model is read from a folder and exported: scalars, buffers, and non-real
tensors; the checks of a folder do not depend on the placement."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ptrain.axes.data.run.flat_target import LocalRowWriter, ParameterMembers
from ptrain.axes.tensor.run.apply import FusedOrder
from ptrain.cli.main import main
from ptrain.convert.export import export_checkpoint
from ptrain.convert.saved import TextGenerator
from ptrain.errors import SpecError
from ptrain.interpreter.look import ModuleFiller, build_module
from ptrain.models.initialize import InitialValues, ModuleWeights, build_model
from ptrain.models.meta import without_values
from tests.models_with_odd_state import build_marked
from tests.published_folders import save_folder, tensors
from tests.unit.test_pretrained import SEQUENCE, run_of, spec_of

transformers = pytest.importorskip("transformers")
MARKED = ", target: tests.models_with_odd_state:build_marked, arguments: {width: 8}"
CPU = torch.device("cpu")
PLAIN = FusedOrder()
TIED = {"head.weight", "layers.1.scale"}  # second names
NORM, BIAS = "model.norm.weight", "e_score_correction_bias"


@pytest.fixture
def state(tmp_path: Path) -> dict[str, Tensor]:
    """Of a folder `in`: nothing of it is as the constructor makes it."""
    state = {
        name: ~tensor if tensor.dtype == torch.bool else tensor + 1
        for name, tensor in build_marked(8).state_dict().items()
        if name not in TIED
    }
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    return state


def require_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Both names of what is tied are of one tensor."""
    there = module.state_dict(keep_vars=True)
    assert there.keys() == state.keys() | TIED
    assert all(torch.equal(there[name], tensor) for name, tensor in state.items())
    assert there["layers.1.scale"] is there["scale"]
    assert there["head.weight"] is there["embed.weight"]


def test_the_full_state_of_a_user_model_is_read_and_exported(
    state: dict[str, Tensor], tmp_path: Path, capsys: Any
) -> None:
    run = run_of(tmp_path / "in", tmp_path / "run", beside=MARKED)
    words = ["export", str(run), "--to", str(tmp_path / "out")]
    assert main(words) == 2, "which of it are buffers, code of the user's says"
    assert "Add `--allow-import`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*words, "--allow-import"]) == 0
    after = tensors(tmp_path / "out")
    assert after.keys() == state.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
    assert {name: tensor.dtype for name, tensor in after.items()} == {
        name: tensor.dtype for name, tensor in state.items()
    }
    again = build_module(spec_of(tmp_path / "out", beside=MARKED), allow_import=True)
    require_state(again, state)


def test_other_state_in_another_dtype_is_rejected(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state | {"mask": state["mask"].long()}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(SpecError, match="mask is I64, but the model has bool"):
        build_module(spec_of(tmp_path / "in", beside=MARKED), allow_import=True)


def test_buffers_of_a_folder_that_is_gone_are_not_guessed(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "in", tmp_path / "run", beside=MARKED)
    shutil.rmtree(tmp_path / "in")
    for use in (
        lambda: TextGenerator(run, allow_import=True),
        lambda: export_checkpoint(run, tmp_path / "out", allow_import=True),
    ):
        with pytest.raises(
            SpecError, match="does not exist any more, but the model has buffers"
        ) as raised:
            use()
        assert (
            "If it contained none, remove `model.pretrained` from" in raised.value.faults[0].remedy
        )
    resolved = run / "spec.resolved.yaml"
    resolved.write_text(resolved.read_text().replace(str(tmp_path / "in"), "null"))
    assert TextGenerator(run, allow_import=True).score("one").tokens
    export_checkpoint(run, tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == {*dict(build_marked(8).named_parameters())}


@pytest.mark.parametrize("is_by_unit", [False, True], ids=["whole", "by unit"])
def test_a_module_without_values_gets_all_of_its_state(
    is_by_unit: bool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    with without_values():
        module = build_marked(8)
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, buffer in module.named_buffers():
        buffer.copy_(state[name])
    weights = ModuleWeights(module, str(tmp_path / "in"))
    filling = ModuleFiller(
        module, InitialValues(module=module, seed=0, weights=weights), CPU, {}, PLAIN
    )
    if is_by_unit:
        write = filling.fill_by_unit()
        members = ParameterMembers([*module.named_parameters()])
        size = sum(parameter.numel() for parameter in module.parameters())
        members.values = LocalRowWriter(write, [(0, size)])
        members.bind_views(torch.empty(size))
    else:
        filling.fill_all()
    require_state(module, state)


def lacking(folder: Path, word: str) -> None:
    there = {name: tensor for name, tensor in tensors(folder).items() if word not in name}
    save_file(there, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_that_lacks_a_parameter_is_rejected_wherever_the_model_is_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder("starcoder2", tmp_path / "in")
    kind = transformers.Starcoder2ForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_missing", [NORM], raising=False)
    lacking(folder, NORM)
    spec = spec_of(folder, beside=", hf: starcoder2")
    for begin in (build_module, lambda spec: build_model(spec.model, sequence=SEQUENCE)):
        with pytest.raises(SpecError, match=f"the tensor {NORM} is missing"):
            begin(spec)


def test_an_optional_buffer_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder("deepseek_v3", tmp_path / "in")
    kind = transformers.DeepseekV3ForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_missing", [BIAS], raising=False)
    lacking(folder, BIAS)
    export_checkpoint(
        run_of(folder, tmp_path / "run", beside=", hf: deepseek_v3"), tmp_path / "out"
    )
    assert tensors(tmp_path / "out").keys() == tensors(folder).keys()
