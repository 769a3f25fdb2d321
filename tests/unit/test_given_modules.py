"""A module that the user built replaces a spec's model, or is rejected by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ptrain
from ptrain.errors import SpecError
from ptrain.models.initialize import accept_module, with_model
from ptrain.models.transformer import Transformer
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from tests.models_external import necks


def spec_of(*overrides: str) -> Spec:
    return ptrain.load("zero3", ["batch.sequence=16", "optimizer.clip=null", *overrides]).spec


def user_module() -> nn.Module:
    return necks()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return user_module()


def half_cut() -> nn.Module:
    module = user_module()
    name, parameter = next(module.named_parameters())
    parent, _, leaf = name.rpartition(".")
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    cut = torch.distributed.tensor.DTensor.from_local(parameter.detach(), mesh, run_check=False)
    setattr(module.get_submodule(parent), leaf, nn.Parameter(cut))
    return module


@pytest.mark.parametrize(
    ("build", "finding"),
    [
        (lambda: "a path", "str is not a torch.nn.Module"),
        (on_meta, "is on the meta device and has no values"),
        (lambda: nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel),
         "is already wrapped: DistributedDataParallel"),
        (half_cut, "is already sharded"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_replace_the_model_is_rejected(
    build: Callable[[], nn.Module], finding: str
) -> None:
    module = build()
    if isinstance(module, nn.parallel.DistributedDataParallel):
        nn.Module.__init__(module)
    with pytest.raises(SpecError, match=finding):
        accept_module(module, spec_of())
    with pytest.raises(SpecError, match=finding):
        ptrain.read_facts(spec_of(), module)


def test_a_module_is_cast_and_trained_and_its_class_replaces_the_specs_shape() -> None:
    module = user_module().eval()
    spec = accept_module(module, spec_of("precision.layout=bf16"))
    assert module.training and {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert not isinstance(spec.model, ModelShape)
    named = spec_of("model={target: tests.models_external:necks}")
    assert with_model(named, module) == named


def test_the_shape_of_one_of_ours_takes_the_place_of_the_specs() -> None:
    shape = ptrain.load("zero3", ["model.layers=2"]).spec.model
    assert isinstance(shape, ModelShape)
    with torch.device("meta"):
        module = Transformer(shape, sequence=16)
    assert with_model(spec_of(), module).model == shape
    spec = spec_of("model.layers=2")
    facts = ptrain.read_facts(spec_of(), module)
    assert ptrain.derive(spec_of(), facts).exact == ptrain.derive(spec).exact


def test_facts_of_a_module_are_those_of_the_spec_that_builds_it() -> None:
    named = spec_of("model={target: tests.models_external:necks}")
    module = user_module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    facts = ptrain.read_facts(spec_of(), module)
    assert facts == ptrain.read_facts(named, allow_import=True)
    assert ptrain.derive(spec_of(), facts).exact == ptrain.derive(named, facts).exact
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_model_of_transformers_gives_its_logits_alone() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    module = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, 64, (2, 8))
    logits, names = module(tokens).logits, list(module.state_dict())
    accept_module(module, spec_of())
    assert torch.equal(module(tokens), logits) and list(module.state_dict()) == names
    accept_module(module, spec_of())
    assert torch.equal(module(tokens), logits)
    headless = transformers.AutoModel.from_config(config)
    with pytest.raises(SpecError, match="has no output head"):
        accept_module(headless, spec_of())
