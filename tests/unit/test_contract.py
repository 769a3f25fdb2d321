"""User code that raises, needs other inputs or returns other values gives one message: the
function, its result, and the requirement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptrain.axes.pipeline.stage_facts import stages_of
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import require_trainable_data
from ptrain.errors import PtrainError, SpecError
from ptrain.models.boundary import UserCodeError
from ptrain.models.contract import NEEDED
from ptrain.models.initialize import build_model
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import tensor_parts
from ptrain.traces.facts import read_facts
from tests import models_external, models_invalid

# What each of models_invalid.CHANGES is called.
GIVEN = {
    "tuple": "returned tuple (float32 [1, 16, 259], NoneType)",
    "dict": "returned dict (logits: float32 [1, 16, 259])",
    "flat": "returned float32 [16, 259]",
    "last": "returned float32 [1, 259]",
    "swapped": "returned float32 [16, 1, 259]",
    "integers": "returned int64 [1, 16, 1]",
    "complex": "returned complex64 [1, 16, 259]",
    "number": "returned int",
    "detached": "returned logits that depend on no trainable parameter",
}
RAISED = {
    "raising": "raised ZeroDivisionError: never mind (",
    "masked": "raised TypeError: Masked.forward() missing 1 required positional argument",
    "of reals": "raised RuntimeError: ",
    "short": "raised IndexError: ",
}
PP = {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}}


def spec_of(
    target: str, *, module: str = "models_invalid", sections: Any = None, **given: Any
) -> Spec:
    mapping: dict[str, Any] = {
        "model": {"target": f"tests.{module}:{target}", "arguments": given},
        "mesh": {"dp_shard": 2},
        "placement": {"dp_shard": "R,S,S,R"},
        "batch": {"global": 2, "micro": 1, "sequence": 16},
    }
    return load(mapping | (sections or {})).spec


def refusal(spec: Spec) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as raised:
        read_facts(spec, allow_import=True)
    (fault,) = raised.value.faults
    return fault.place, fault.finding, fault.remedy


@pytest.mark.parametrize("how", GIVEN)
def test_invalid_logits_are_named_with_their_shape(how):
    place, finding, remedy = refusal(spec_of("changed", how=how))
    assert place == "model.target" and NEEDED in remedy
    assert finding.startswith("Changed.forward of tests.models_invalid:changed")
    assert finding.endswith(GIVEN[how])


@pytest.mark.parametrize("kind", RAISED)
def test_a_forward_that_raises_is_named_with_its_line(kind):
    place, finding, remedy = refusal(spec_of("failing", kind=kind))
    assert place == "model.target" and NEEDED in remedy
    assert RAISED[kind] in finding and "given tokens int64 [1, 16]" in finding
    assert kind == "masked" or f"{models_invalid.__file__}:" in finding, "it is called in vain"


@pytest.mark.parametrize("sections", [PP, {"loss": {"chunk": 8}}], ids=["pp", "chunked loss"])
def test_the_first_caller_of_the_model_reports_the_error(sections):
    _, finding, _ = refusal(spec_of("changed", how="tuple", sections=sections))
    assert "returned tuple (float32 [1, 4, 259], NoneType)" in finding


@pytest.mark.parametrize("error", ["KeyError", "SystemExit"])
def test_a_function_that_raises_is_named_with_its_line(error):
    place, finding, remedy = refusal(spec_of("raises", error=error))
    assert place == "model.target" and "a torch.nn.Module" in remedy
    assert finding.startswith(f"tests.models_invalid:raises raised {error}: ")
    assert "no such weights" in finding and f"({models_invalid.__file__}:" in finding


def test_messages_of_the_user_and_of_ptrain_pass_unchanged():
    with pytest.raises(KeyboardInterrupt):
        read_facts(spec_of("raises", error="KeyboardInterrupt"), allow_import=True)
    assert refusal(spec_of("refuses")) == ("model.arguments", "too wide", "")


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_a_plan_that_raises_is_named(axis):
    sections = {"mesh": {axis: 2}, "placement": {axis: "S,S,S,R"}}
    place, finding, _ = refusal(spec_of("unplanned", sections=sections))
    assert place == "model.target"
    assert (
        f"{axis}_plan of tests.models_invalid:unplanned raised RuntimeError: no plan yet" in finding
    )


def test_a_vocabulary_smaller_than_the_texts_is_rejected_by_the_logits_that_were_seen():
    spec = spec_of("necks", module="models_external", vocab=100)
    logits = read_facts(spec, allow_import=True).vocabulary
    assert logits == 100
    with pytest.raises(
        PtrainError, match=r"models_external:necks returns 100 logits per token\n.* 259 or more"
    ):
        require_trainable_data(open_corpus(spec.data), spec, logits)


@pytest.mark.parametrize("chunk", [{}, {"loss": {"chunk": 8}}], ids=["whole", "chunked"])
def test_the_vocabulary_is_seen_however_the_loss_is_computed(chunk):
    spec = spec_of("necks", module="models_external", vocab=300, sections=chunk)
    assert read_facts(spec, allow_import=True).vocabulary == 300


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parts, "REAL_BYTES", 0)


@pytest.mark.usefixtures("all_are_large")
def test_a_model_too_large_to_run_shows_it_on_fakes(capfd):
    assert refusal(spec_of("changed", how="tuple"))[1].endswith(GIVEN["tuple"])
    assert RAISED["raising"] in refusal(spec_of("failing", kind="raising"))[1]
    assert "raised RuntimeError: a and b must" in refusal(spec_of("failing", kind="of reals"))[1]
    assert "argument: 'mask_BT'" in refusal(spec_of("failing", kind="masked"))[1]
    assert capfd.readouterr() == ("", ""), "torch logs what its fakes refuse"


@pytest.mark.usefixtures("all_are_large")
def test_code_that_only_fake_tensors_cannot_run_is_no_error(monkeypatch):
    monkeypatch.setitem(models_invalid.CHANGES, "number", lambda logits: logits.tolist())
    read_facts(spec_of("changed", how="number"), allow_import=True)


@pytest.mark.usefixtures("all_are_large")
def test_a_model_that_is_to_train_is_not_run_on_fakes(monkeypatch):
    kept: list[torch.Tensor] = []
    monkeypatch.setitem(
        models_invalid.CHANGES, "number", lambda logits: kept.append(logits) or logits
    )
    read_facts(spec_of("changed", how="number"), allow_import=True, runs_fakes=False)
    assert not kept


def test_a_constructor_that_cannot_build_on_fakes_is_built_on_real_tensors(monkeypatch):
    class OfNumbers(models_external.Necks):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.scale = torch.ones(3).numpy().sum()

    monkeypatch.setattr(models_external, "Necks", OfNumbers)
    spec = spec_of("necks", module="models_external")
    assert read_facts(spec, allow_import=True).vocabulary == 259


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_of_modules_in_front_of_the_layers_is_on_the_first_stage(tied):
    spec = spec_of("nested", tied=tied, sections=PP)
    first, last = stages_of(spec, read_facts(spec, allow_import=True))
    front = {"front.table.weight", "front.norm.weight", "front.norm.bias"}
    assert front <= {*first.tensors} and not front & {*last.tensors}
    assert "head.weight" in last.tensors


def test_the_cause_is_kept_for_who_calls_from_python():
    with pytest.raises(UserCodeError) as raised:
        build_model(spec_of("raises", error="KeyError").model, sequence=16, allow_import=True)
    assert isinstance(raised.value.__cause__, KeyError)
