"""A user model is built without parameter values while everything else matches its constructor; if
that is impossible, the reason is reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.axes.tensor.run.apply import FusedOrder
from ptrain.errors import SpecError
from ptrain.interpreter import look
from ptrain.interpreter.look import build_and_inspect, repeated_values
from ptrain.interpreter.program import interpret
from ptrain.models.boundary import convert_exceptions
from ptrain.models.external import target_fault
from ptrain.models.initialize import ModuleWeights
from ptrain.models.meta import NeedsValuesError, build_on_meta
from ptrain.models.window import full_window, narrow_to_window, split_window
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.model import UserFunction
from ptrain.spec.spec import Spec
from tests.models_from_folder import build, save_decoder
from tests.unit.test_windows_of_weights import random_window

CPU = torch.device("cpu")
FUNCTION = UserFunction(section="model", target="tests.models_from_folder:build")


def spec_of(folder: Path, arguments: str = "", *words: str, target: str = FUNCTION.target) -> Spec:
    model = f"model={{pretrained: {folder}, target: '{target}', arguments: {{{arguments}}}}}"
    words = (model, "batch={global: 4, micro: 1, sequence: 16}", *words)
    return load("ddp", ("mesh={}", "placement={}", *words)).spec


def build_changed(change: Callable[[nn.Module], None], more: int) -> nn.Module:
    """Build the decoder, and then something more of it."""
    torch.manual_seed(more)
    with convert_exceptions(partial(target_fault, FUNCTION)):
        module = build()
        change(module)
    return module


def own_generator(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    nn.init.normal_(module.get_parameter("norm.weight"), generator=generator)
    module.register_buffer("more", torch.rand(3, generator=generator))


NEEDING: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "a table that is drawn": (
        lambda module: module.register_buffer("more", torch.rand(3)),
        "draws random numbers for other tensors than parameters",
    ),
    "a number that is drawn": (
        lambda module: setattr(module, "more", [int(torch.randint(10**6, ()))]),
        "draws random numbers for other tensors than parameters",
    ),
    "a generator of its own": (own_generator, "a custom random generator"),
    "a number of values": (
        lambda module: setattr(module, "more", module.get_parameter("norm.bias").sum().item()),
        "meta device: RuntimeError",
    ),
    "a table of values": (
        lambda module: module.register_buffer("more", module.get_parameter("norm.bias") + 1),
        "computes more from a parameter",
    ),
    "a parameter by another way": (
        lambda module: setattr(module, "more", [module.get_parameter("norm.bias")]),
        "computes more from a parameter",
    ),
    "a recurrent layer": (
        lambda module: module.add_module("more", nn.LSTM(2, 2)),
        "computes more._flat_weights from a parameter",
    ),
}


@pytest.mark.parametrize("case", NEEDING)
def test_a_model_that_needs_parameter_values_is_not_built_on_meta(case: str) -> None:
    change, finding = NEEDING[case]
    with pytest.raises(NeedsValuesError, match=finding):
        build_on_meta(partial(build_changed, change))


def test_all_but_parameters_is_as_it_is_with_values() -> None:
    def change(module: nn.Module) -> None:
        drawn_first = nn.Parameter(torch.randn(3), requires_grad=False)
        module.register_parameter("more", drawn_first)
        module.get_submodule("norm").register_parameter("again", drawn_first)
        drawn_first.said = "kept"

    with_values, module = build_changed(change, 0), build_on_meta(partial(build_changed, change))
    before = dict(with_values.named_parameters(remove_duplicate=False))
    after = dict(module.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    for name, parameter in after.items():
        assert parameter.is_meta and parameter.shape == before[name].shape
        assert parameter.requires_grad is before[name].requires_grad
    assert after["head.weight"] is after["embed.weight"]
    assert after["norm.again"] is after["more"] and after["more"].said == "kept"
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, with_values.get_buffer(name)), name


@pytest.mark.parametrize("beside", ["drawn", "of values", "''"])
def test_a_model_that_needs_values_has_those_of_the_folder_all_the_same(
    beside: str, tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path / "in")
    program = interpret(spec_of(folder, f"beside: {beside}"), world=World(), allow_import=True)
    assert bool(program.whole_because) is (beside != "''")
    module = build(beside=beside.strip("'"))
    ModuleWeights(module, str(folder)).read_into(module)
    for name, tensor in module.state_dict().items():
        assert torch.equal(program.model.state_dict()[name], tensor), name
    turns = [program.model.get_buffer(f"layers.{number}.attention.turns") for number in range(2)]
    assert turns[0] is turns[1], "one tensor stays one"
    torch.manual_seed(0)
    expected = build(beside=beside.strip("'")).get_buffer("table")
    assert torch.equal(program.model.get_buffer("table"), expected)


def test_dtypes_of_the_module_round_before_those_of_the_spec(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "in")
    target = "tests.models_from_folder:build_in_half"
    model = interpret(spec_of(folder, target=target), world=World(), allow_import=True).model
    module = build()
    ModuleWeights(module, str(folder)).read_into(module)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, module.get_parameter(name).bfloat16().float()), name


def test_a_look_has_few_numbers_of_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "in")
    module = build_on_meta(partial(build_changed, lambda module: None))
    weights, before = ModuleWeights(module, str(folder)), dict(module.named_parameters())
    with repeated_values(module, weights):
        assert weights.bytes_read < 4 * 32 * 260
        assert torch.equal(module.get_parameter("norm.bias"), read(folder, "norm.bias"))
        matrix, stored = module.get_parameter("embed.weight"), read(folder, "embed.weight")
        numbers = stored.flatten()[: 260 + 32 - 1]
        assert torch.equal(matrix, numbers.unfold(0, 32, 1))
        assert module.get_parameter("head.weight") is matrix
        assert matrix.untyped_storage().nbytes() == 4 * len(numbers)
        module(torch.arange(4)[None])
    assert all(module.get_parameter(name) is tensor for name, tensor in before.items())


def read(folder: Path, name: str) -> Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_columns_are_products(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "MOST_COPIED", 512)
    torch.manual_seed(0)
    x, bias = torch.randn(2, 5, 64, dtype=dtype), torch.randn(100, dtype=dtype)
    weight = torch.randn(100 + 64 - 1, dtype=dtype).as_strided((100, 64), (1, 1))
    for more in ((), (bias,)):
        with look._ColumnwiseProducts():
            product = F.linear(x, weight, *more)
        torch.testing.assert_close(product, F.linear(x, weight.contiguous(), *more))


@pytest.mark.parametrize("most", [1, 7, 40, 10**6])
def test_stretches_of_a_window_are_the_window_and_none_is_larger_than_it_may(most: int) -> None:
    random = Random(most)
    shape = (3, 5, 8)
    stored = torch.arange(120.0).view(shape)
    for window in (full_window(shape), *(random_window(random, shape) for _ in range(8))):
        place = torch.full([size for _, size in window], -1.0)
        for part, target in split_window(window, place, shape, most) if place.numel() else ():
            reach = part[1][1] * 8 if part[0][1] == 1 else part[0][1] * 40
            assert reach <= max(most, 8)
            target.copy_(narrow_to_window(stored, part))
        assert torch.equal(place, narrow_to_window(stored, window))


def test_windows_of_fused_projections_are_read_as_they_are_held(tmp_path: Path) -> None:
    spec = spec_of(save_decoder(tmp_path / "in"), "", "mesh={tp: 2}", "placement={tp: tp}")
    plan = build_and_inspect(spec, CPU, allow_import=True).plan
    order, module, random = FusedOrder(plan.tensor, 2), build(), Random(0)
    for path, child in module.named_modules():
        before = {name: tensor.clone() for name, tensor in child.named_parameters(recurse=False)}
        order.reorder(path, child)
        for leaf, tensor in before.items():
            name, held = f"{path}.{leaf}", child.get_parameter(leaf)
            for window in (random_window(random, tuple(held.shape)) for _ in range(8)):
                part = torch.empty([size for _, size in window])
                for own, place in order.model_windows(name, held.shape, window, part):
                    place.copy_(narrow_to_window(tensor, own))
                assert torch.equal(part, narrow_to_window(held, window)), name


@pytest.mark.parametrize(
    ("kind", "placement", "finding"),
    [
        ("counting", "cp-ring", "passes a different query to attention than with all tokens"),
        ("passing", "pp-1f1b", "the stages compute different outputs than the model"),
    ],
)
def test_an_unshardable_model_with_a_folder_is_rejected_as_without(
    kind: str, placement: str, finding: str, tmp_path: Path
) -> None:
    target = f"target: 'tests.models_from_folder:{kind}'"
    folder = save_decoder(tmp_path / "in")
    messages = []
    for model in (f"{{pretrained: {folder}, {target}}}", f"{{{target}}}"):
        spec = load(placement, (f"model={model}", "batch.sequence=16")).spec
        with pytest.raises(SpecError, match=finding) as refusal:
            build_and_inspect(spec, CPU, allow_import=True)
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]
