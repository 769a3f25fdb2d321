"""User models on fake ranks: transformers models, user models, and models that read values, which
fake tensors lack."""

import pytest
import torch
from torch import Tensor, nn

from ptrain.cost import State
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.runtime import patches
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import facts
from tests.models_external import Necks

CONFIG = (
    "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, vocab_size: 261, max_position_embeddings: 64}"
)
BATCH = "batch={global: 2, micro: 1, sequence: 16}"


class Reading(Necks):
    """Looks at a value of its own logits."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV = super().forward(tokens_BT)
        return logits_BTV * 2 if logits_BTV.sum().item() > 1e9 else logits_BTV


def reading() -> nn.Module:
    return Reading(10, 2, 259)


class Products(nn.Module):
    """Multiplies with matrices transposed, as experts with places do: their gradient, which is most
    of the model, is copied by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 64, 259))

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_ENC = x_BTC.flatten(0, 1).expand(3, -1, -1)
        return x_BTC + (x_ENC @ self.weight.mT).mean((0, -1)).view_as(x_BTC[..., :1])


class Transposed(Necks):
    """Ends in such products."""

    def __init__(self) -> None:
        super().__init__(10, 2, 259)
        self.products = Products()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.products(super().forward(tokens_BT))
        return logits_BTV


def transposed() -> nn.Module:
    return Transposed()


class Scaled(Necks):
    """Has a matrix of its own, beside those of its modules."""

    def __init__(self) -> None:
        super().__init__(10, 2, 259)
        self.mixing = nn.Parameter(torch.eye(259))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = super().forward(tokens_BT) @ self.mixing
        return logits_BTV


def scaled() -> nn.Module:
    return Scaled()


def of_class() -> Spec:
    pytest.importorskip("transformers")
    return load("zero3", [f"model={{hf: LlamaForCausalLM, config: {CONFIG}}}", BATCH]).spec


def of_user(target: str, strategy: str = "zero3") -> Spec:
    return load(strategy, [f"model={{target: '{target}'}}", BATCH, "device=cpu"]).spec


def assert_as_derived(spec: Spec) -> None:
    found = simulate(spec, 1, allow_import=True)
    derived = derive(spec, facts.facts_of(spec)).exact
    exact = derived.of_rank(1)
    assert set(found.estimate.memory) == set(exact.memory)
    assert set(found.estimate.peak) == set(exact.peak)
    assert set(found.estimate.traffic) == set(exact.traffic)


def test_a_model_of_transformers_by_its_class_is_simulated() -> None:
    assert_as_derived(of_class())


def test_without_its_patch_transformers_makes_a_mask_for_samples_that_may_be_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = of_class()
    right = simulate(spec).memory_history.peak.total
    monkeypatch.setattr(patches, "PACKED", "nothing")
    assert simulate(spec).memory_history.peak.total > right


def test_a_model_of_the_user_is_simulated() -> None:
    assert_as_derived(of_user("tests.models_external:necks"))


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_copied_gradient_coexists_with_its_source(strategy: str) -> None:
    assert_as_derived(of_user("tests.unit.test_simulation_models:transposed", strategy))


def test_direct_parameters_of_a_module_are_last_in_fsdp2s_list() -> None:
    assert_as_derived(of_user("tests.unit.test_simulation_models:scaled"))


def test_without_leave_nothing_of_the_user_is_imported() -> None:
    with pytest.raises(SpecError, match="is not imported"):
        simulate(of_user("tests.models_external:necks"))


def test_a_model_that_reads_a_value_is_rejected_and_rehearsed() -> None:
    spec = of_user("tests.unit.test_simulation_models:reading")
    with pytest.raises(SpecError, match="reads the value of a tensor") as refusal:
        simulate(spec, allow_import=True)
    assert "--rehearse" in str(refusal.value)
    rehearsed = simulate(spec, allow_import=True, rehearse=True)
    assert rehearsed.estimate.bytes_of(State.PARAMETERS) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rehearsal_on_a_gpu_that_is_not_there_is_rejected() -> None:
    spec = load("zero3", ["device=cuda", BATCH]).spec
    with pytest.raises(SpecError, match="no GPU was found for --rehearse"):
        simulate(spec, rehearse=True)
