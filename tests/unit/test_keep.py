"""Activation modes on one device: identical losses and gradients to the bit, fewer bytes on the
device, and no leaks."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ptrain.activations.run import apply
from ptrain.activations.run.apply import apply_modes
from ptrain.errors import SpecError
from ptrain.models import ledger
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.initialize import build_model, initialize
from ptrain.models.trace import Recording, to_timeline
from ptrain.models.units import unit_modules
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.torch import Tiers
from ptrain.spec.activations import (
    ATTENTION_ONLY,
    FULL,
    PLAIN,
    SELECTIVE,
    ActivationMode,
    Operators,
    Policy,
)
from ptrain.spec.model import Attention, Family, ModelShape
from ptrain.spec.placement import Tier
from ptrain.steps.step import Keep
from ptrain.timeline import Timeline
from ptrain.traces.record import record
from tests.models_external import necks
from tests.saved_tensors import saved_bytes, saved_storages

LAYERS, HIDDEN, SAMPLES, TOKENS, VOCAB = 3, 32, 2, 16, 50
INPUT = SAMPLES * TOKENS * HIDDEN * 4  # bytes of a block's input
HOST = Tier.HOST
M, AWAY = ActivationMode(policy=FULL), ActivationMode(tier=HOST)
VARIANTS = {
    "M": M,
    "selective": ActivationMode(policy=SELECTIVE),
    "attention": ActivationMode(policy=ATTENTION_ONLY),
    "O": AWAY,
    "O@file": ActivationMode(tier=Tier.FILE),
    "M@host": ActivationMode(policy=FULL, tier=HOST),
    "M@file": ActivationMode(policy=FULL, tier=Tier.FILE),
    "selective@host": ActivationMode(policy=SELECTIVE, tier=HOST),
    "attention@host": ActivationMode(policy=ATTENTION_ONLY, tier=HOST),
    **{f"keep {kind}": ActivationMode(policy=Policy(keep=(kind,))) for kind in Operators},
}
MIXTURES = {
    "every second": (M, PLAIN, M),
    "M, O, R": (M, AWAY, PLAIN),
    "R, M, O": (PLAIN, M, AWAY),
    "O, R, O@file": (AWAY, PLAIN, VARIANTS["O@file"]),
}
MODELS = {
    "llama": (Family.LLAMA, Attention.SDPA, 0.0),
    "gpt": (Family.GPT, Attention.SDPA, 0.0),
    "gpt-dropout": (Family.GPT, Attention.SDPA, 0.1),
    "llama-eager": (Family.LLAMA, Attention.EAGER, 0.0),
    "gpt-eager-dropout": (Family.GPT, Attention.EAGER, 0.1),
}

BY_DEFAULT = ("llama", "gpt-dropout")


def nightly(names: Iterable[str]) -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.nightly) for name in names if name not in BY_DEFAULT
    ]


def build_blocks(model: str = "llama", kept: tuple[ActivationMode, ...] = ()) -> nn.Module:
    family, attention, dropout = MODELS[model]
    shape = ModelShape(
        family=family,
        layers=LAYERS,
        hidden=HIDDEN,
        heads=4,
        kv_heads=4 if family is Family.GPT else 2,
        ffn=64,
        vocab=VOCAB,
        tied=False,
        dropout=dropout,
        attention=attention,
    )
    module = build_model(shape, sequence=TOKENS)
    initialize(module, 0)
    return with_modes(module, "blocks", kept)


def with_modes(module: nn.Module, blocks: str, kept: tuple[ActivationMode, ...]) -> nn.Module:
    step = Keep(blocks=tuple((f"{blocks}.{index}", each) for index, each in enumerate(kept)))
    apply_modes(module, step, Tiers(torch.device("cpu"), TagRegistry()))
    return module


BATCH = torch.arange(SAMPLES * (TOKENS + 1)).view(SAMPLES, -1) * 7 % VOCAB


def loss_of(module: nn.Module) -> Tensor:
    return token_loss_sum(module(BATCH[:, :-1]), BATCH[:, 1:])


@dataclass(frozen=True)
class Run:
    losses: list[Tensor]
    gradients: dict[str, Tensor]


def run(module: nn.Module) -> Run:
    """Two micro-batches, with random numbers of their own."""
    torch.manual_seed(2)
    losses = []
    for _ in range(2):
        losses.append(loss := loss_of(module))
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return Run([loss.detach() for loss in losses], gradients)


def require_equal(found: Run, plain: Run) -> None:
    assert all(map(torch.equal, found.losses, plain.losses))
    assert found.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def record_pass(module: nn.Module) -> Recording:
    return record(module, unit_modules(module), lambda: loss_of(module), BATCH)


def trace_pass(module: nn.Module) -> Timeline:
    return to_timeline(record_pass(module))


@pytest.mark.parametrize("model", [*BY_DEFAULT, *nightly(MODELS)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mode_computes_the_bits_of_its_plain_twin(model, variant):
    kept = (VARIANTS[variant],) * LAYERS
    require_equal(run(build_blocks(model, kept)), run(build_blocks(model)))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_by_block_compute_the_bits_of_their_plain_twin(mixture):
    for model in ("llama", "gpt-dropout"):
        require_equal(run(build_blocks(model, MIXTURES[mixture])), run(build_blocks(model)))


def test_module_and_parameter_names_do_not_change():
    plain, module = build_blocks(), build_blocks(kept=tuple(MIXTURES["M, O, R"]))
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [*map(type, module.modules())] == [*map(type, plain.modules())]


@pytest.mark.parametrize("model", [*BY_DEFAULT, *nightly(MODELS)])
def test_a_recomputed_block_leaves_its_input(model):
    plain, all_of_them = (
        trace_pass(build_blocks(model)),
        trace_pass(build_blocks(model, (M,) * LAYERS)),
    )
    but_one = trace_pass(build_blocks(model, (M,) * (LAYERS - 1)))
    saved_by_one = (saved_bytes(plain) - saved_bytes(all_of_them)) / LAYERS
    assert saved_bytes(but_one) == saved_bytes(all_of_them) + saved_by_one
    assert 0 < saved_by_one < saved_bytes(plain) / LAYERS


@pytest.mark.parametrize("tier", [HOST, Tier.FILE])
@pytest.mark.parametrize("model", [*BY_DEFAULT, *nightly(MODELS)])
def test_an_offloaded_block_leaves_nothing_on_the_device(model, tier):
    recomputed = trace_pass(build_blocks(model, (M,) * LAYERS))
    timeline = trace_pass(build_blocks(model, (ActivationMode(tier=tier),) * LAYERS))
    assert saved_bytes(timeline) == saved_bytes(recomputed) - LAYERS * INPUT
    assert {name for name, _ in timeline.moved} == {tier.value}


@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_offloaded_bytes_equal_saved_bytes_with_each_storage_once(model):
    plain, away = (
        record_pass(build_blocks(model)),
        record_pass(build_blocks(model, (AWAY,) * LAYERS)),
    )
    left = [event.size for event in saved_storages(away)]
    expected = [event.size for event in saved_storages(plain)]
    for size in left:
        expected.remove(size)
    # the first block's input is not saved by a plain model's blocks alone
    assert sorted(expected) == sorted(size for _, size in to_timeline(away).moved)


def test_inputs_of_recomputed_blocks_are_all_that_leaves_the_device():
    for policy in (FULL, SELECTIVE):
        on_device = trace_pass(build_blocks(kept=(ActivationMode(policy=policy),) * LAYERS))
        timeline = trace_pass(
            build_blocks(kept=(ActivationMode(policy=policy, tier=HOST),) * LAYERS)
        )
        assert timeline.moved == (("host", INPUT),) * LAYERS
        assert saved_bytes(timeline) == saved_bytes(on_device) - LAYERS * INPUT


@pytest.mark.nightly
def test_gradients_are_all_that_is_left_of_a_step():
    def left(timeline: Timeline) -> int:
        items = (*timeline.forward, *timeline.backward)
        return sum(getattr(item, "net", 0) for item in items)

    plain = left(trace_pass(build_blocks()))
    for kept in VARIANTS.values():
        assert left(trace_pass(build_blocks(kept=(kept,) * LAYERS))) == plain


def test_parameters_that_come_while_a_block_runs_stay_on_the_device():
    """As where its parts are gathered for their own time, into other storages."""
    module = build_blocks(kept=(AWAY,) * LAYERS)
    fresh: list[Tensor] = []

    def gather(inner: nn.Module, _: object) -> None:
        for parameter in inner.parameters(recurse=False):
            parameter.data = parameter.data.clone()
            fresh.append(parameter.data)

    for block in module.blocks:
        for inner in block.modules():
            inner.register_forward_pre_hook(gather)
    moved = trace_pass(module).moved
    assert fresh and moved == trace_pass(build_blocks(kept=(AWAY,) * LAYERS)).moved


def test_modules_are_looked_through_once_a_pass_and_not_for_each_tensor(monkeypatch):
    looks: list[nn.Module] = []
    homes = apply._tensor_dicts

    def looking(module: nn.Module, *kinds: str) -> object:
        looks.append(module)
        return homes(module, *kinds)

    monkeypatch.setattr(apply, "_tensor_dicts", looking)
    module = build_blocks(kept=(AWAY,) * LAYERS)
    loss_of(module)
    assert looks.count(module) == 1
    assert [looks.count(block) for block in module.blocks] == [1] * LAYERS


def test_a_pass_that_has_no_backward_leaves_nothing_off_the_device():
    gc.collect()
    before = len(ledger._TIERS)
    module = build_blocks(kept=(AWAY, VARIANTS["M@host"], VARIANTS["O@file"]))
    loss = loss_of(module)
    assert len(ledger._TIERS) > before
    del loss
    assert len(ledger._TIERS) == before
    with torch.no_grad():
        held = loss_of(module)
    assert len(ledger._TIERS) == before and held.isfinite()
    loss_of(module).backward()
    assert len(ledger._TIERS) == before


def test_a_block_that_fails_leaves_nothing_and_the_next_pass_is_right():
    module, gave = build_blocks(kept=(AWAY,) * LAYERS), run(build_blocks())
    before = len(ledger._TIERS)
    hook = module.get_submodule("blocks.1.mlp").register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(module)
    hook.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    gc.collect()
    assert len(ledger._TIERS) == before
    require_equal(run(module), gave)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_a_graph_that_is_kept_is_gone_through_again():
    """Under another loss than ours, which turns what it saved into its gradient."""
    module = build_blocks(kept=(AWAY,) * LAYERS)
    loss = module(BATCH[:, :-1]).square().sum()
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    loss.backward()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name])


@pytest.mark.parametrize("variant", ["M", "selective", "O", "O@file", "M@host"])
def test_a_model_that_is_not_built_in_computes_the_same(variant):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return necks(vocab=VOCAB)

    kept = (VARIANTS[variant],) * 2
    require_equal(run(with_modes(model(), "layers", kept)), run(model()))


def test_blocks_that_a_stage_lacks_are_left_out():
    module = build_blocks()
    del module.blocks[0]
    apply_modes(
        module,
        Keep(blocks=tuple((f"blocks.{index}", M) for index in range(LAYERS + 1))),
        Tiers(torch.device("cpu"), TagRegistry()),
    )
    run(module)


def test_the_attention_alone_is_rejected_where_it_is_no_module():
    with pytest.raises(SpecError, match="policy attention needs an attention module"):
        with_modes(necks(), "layers", (VARIANTS["attention"],))


class _RecordedCopies:
    """A stub for the streams of an accelerator that records the start of each copy."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.numbers: dict[int, int] = {}

    def offload(self, kept: Tensor, whole: Tensor) -> int:
        number = self.numbers.setdefault(id(kept), len(self.numbers))
        kept.copy_(whole)
        self.log.append(("out", number))
        return number

    def load(self, back: Tensor, kept: Tensor, taken: int) -> int:
        back.copy_(kept)
        self.log.append(("back", taken))
        return taken

    def wait_for(self, event: int) -> None:
        self.log.append(("use", event))


def test_each_storage_is_prefetched_one_block_ahead(monkeypatch):
    copies = _RecordedCopies()
    before = apply.OffloadHooks.__init__

    def with_streams(self, model, tiers):
        before(self, model, tiers)
        self.streams = copies

    monkeypatch.setattr(apply.OffloadHooks, "__init__", with_streams)
    module, gave = build_blocks(kept=(AWAY,) * LAYERS), loss_of(build_blocks())
    loss = loss_of(module)
    out = [number for what, number in copies.log if what == "out"]
    by_block = len(out) // LAYERS
    loss.backward()
    assert torch.equal(loss, gave)
    backward = copies.log[len(out) :]
    back = [number for what, number in backward if what == "back"]
    assert back == out[::-1], "the last block's first, each once"
    first_use = backward.index(next(each for each in backward if each[0] == "use"))
    assert first_use == 2 * by_block, "the last block and the one before it"
    for number in out[:by_block]:  # the first block's, while the second one is at work
        of_second = [backward.index(("use", each)) for each in out[by_block : 2 * by_block]]
        assert backward.index(("back", number)) < max(of_second)
