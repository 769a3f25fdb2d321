"""The passes of a built-in model's stage, from the committed tables (`derivation.layers`)."""

from __future__ import annotations

from dataclasses import replace

from ptrain.axes.tensor.costs import Cut
from ptrain.derivation import blocks, loss_chunks
from ptrain.derivation.layers import Layers, Pairs
from ptrain.derivation.loss_chunks import LossHead
from ptrain.derivation.repeats import Representatives
from ptrain.derivation.setting import Place, Setting, setting_of
from ptrain.facts.passes import Passes, of_first_stage, of_later_stage
from ptrain.facts.stages import Stage
from ptrain.spec.activations import PLAIN
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.spec import Spec
from ptrain.timeline import Run


def passes(
    spec: Spec, stage: Stage, stages: int, played: Representatives, cut: Cut | None
) -> Passes:
    """Return the passes of a built-in model's stage, of those units of it that are `played`; of one
    rank's part of it, where operators are `cut`."""
    ends = {0: Place.FIRST, stages - 1: Place.LAST}
    layers = _layers(spec, stage, cut, ends.get(stage.index, Place.MIDDLE))
    items = layers.passes(played.modules, played.turns)
    if stage.index == 0:
        of_stage = of_first_stage(items, output=layers.output())
    else:
        hidden = _hidden_bytes(layers.setting)
        of_stage = of_later_stage(items, output=layers.output(), hidden=hidden)
    return replace(of_stage, moved=layers.moved, repeated=layers.repeated)


def moved_and_repeated(spec: Spec, stage: Stage, cut: Cut | None) -> tuple[Pairs, Pairs]:
    """Return what goes off the device and comes back in one micro-batch on a built-in model's
    stage, and the collectives that backward runs again, as a timeline has them."""
    layers = _layers(spec, stage, cut, Place.MIDDLE)
    return layers.moved, layers.repeated


def _layers(spec: Spec, stage: Stage, cut: Cut | None, place: Place) -> Layers:
    setting, shape = setting_of(spec, cut), spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    kept = spec.activations.of(shape.layers)
    numbers = [layer.rpartition(".")[2] for layer in stage.layers]
    return Layers(
        setting=setting,
        place=place,
        numbers=numbers,
        kept=[kept[int(number)] for number in numbers],
        held=_hidden_bytes(setting) if stage.index else 0,
        head=_head(setting, len(numbers)) if place is Place.LAST else None,
    )


def _hidden_bytes(setting: Setting) -> int:
    """Bytes of what crosses a boundary between stages."""
    cut = setting.cut
    tokens = setting.sequence // (cut.degree if cut and cut.step.is_sequence else 1)
    return setting.batch * tokens * setting.shape.hidden * setting.compute.itemsize


def _head(setting: Setting, layers: int) -> LossHead | None:
    """What a loss in chunks does behind a last stage's layers, None of whole logits. The tables are
    of one layer, whose input is the schedule's: that of the last of several goes with its forward
    pass, where nothing saves it."""
    head = loss_chunks.head_of(setting, Place.LAST)
    if head is None or layers == 1:
        return head
    if not blocks.block(setting, PLAIN, Attention.SDPA).frees_input:
        return head
    return replace(head, forward=(Run(0, -_hidden_bytes(setting)), *head.forward))
