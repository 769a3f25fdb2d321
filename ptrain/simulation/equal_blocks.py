"""Which blocks of a rank are equal, so that a few may run for all: those of a built-in model by its
shape, those of a class of transformers by proof.

The proof is of the model and of the same one with few layers, both on fake tensors. In either all
blocks have the same classes, shapes and attributes but for their own index, and around them nothing
differs but the number of layers. And in a forward pass all blocks between the first and the last
run the same operators on the same neighbours, and all else is the same in both.

Note: what some code does in its backward pass alone, by what it reads of its block there, is seen
as far as attributes say it: not what it takes from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

import torch

from ptrain.derivation.flat import joined
from ptrain.derivation.tensor import local_units
from ptrain.errors import PtrainError
from ptrain.facts.model import ModelFacts
from ptrain.models.contract import forward_once
from ptrain.models.facts import untraced_facts
from ptrain.models.fake_values import READ
from ptrain.models.huggingface import layers_of, with_layers
from ptrain.plan.lower import lower, own_facts
from ptrain.simulation.sections import Section, SectionRecorder
from ptrain.simulation.structure import (
    Incomparable,
    Leaves,
    alike,
    differ_in_layers_alone,
    structure_of,
)
from ptrain.spec.axis import Axis
from ptrain.spec.dials import UnitKind
from ptrain.spec.layout import positions
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, ModelSpec
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import Form
from ptrain.traces.on_fakes import FakeModel, fake_model

FEWEST = 4  # blocks of the shortest run: more than are gathered ahead, so that it has an end
LEAST = 20  # three runs have 15 blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBlocks:
    """The blocks of one rank of a job: `number` in a row in each of its stages. `split` are those
    of each stage, of which `own` are the rank's; empty without pp."""

    spec: Spec
    number: int
    split: tuple[int, ...] = ()
    own: tuple[int, ...] = ()

    def cut_to(self, blocks: int) -> Spec:
        """Return the job with so many blocks in each of the rank's stages; those of others stay."""
        spec = self.spec
        split = tuple(
            blocks if stage in self.own else count for stage, count in enumerate(self.split)
        )
        kept = spec.activations.of(sum(self.split) or self.number)[0]  # whichever ranges say it
        shorter = replace(
            spec,
            model=_with_layers(spec.model, sum(split) or blocks),
            activations=replace(spec.activations, default=kept, by_block=(), every=1),
        )
        if not split:
            return shorter
        return replace(shorter, pipeline=replace(spec.pipeline, split=split))


def _with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    match model:
        case ModelShape():
            return replace(model, layers=layers)
        case HuggingFaceModel():
            return with_layers(model, layers)
        case ExternalModel():
            raise AssertionError("nobody says how a user's function makes fewer layers")
        case other:
            assert_never(other)


def equal_blocks(
    spec: Spec, rank: int, *, fewest: int = FEWEST, least: int = LEAST
) -> EqualBlocks | None:
    """Return the rank's blocks; None where they differ, where its stages have different numbers or
    fewer than the `least`, or where nobody says that they are equal. The proof is of `fewest`."""
    match spec.model:
        case ModelShape():
            if not spec.model.has_equal_blocks:
                return None
            blocks = _of_facts(spec, rank, own_facts(spec), spec.model.layers, fewest)
            return blocks if blocks and blocks.number >= least else None
        case HuggingFaceModel():
            return _proven(spec, rank, fewest, least)
    return None


def _of_facts(
    spec: Spec, rank: int, facts: ModelFacts, layers: int, fewest: int
) -> EqualBlocks | None:
    """Return the rank's blocks, if the plan treats them alike. Where as many units are gathered
    ahead as the shortest run has blocks, what is gathered at a time grows from run to run and then
    no more: three runs do not show where it ends."""
    is_within = spec.unit_size.kind in (UnitKind.BLOCK, UnitKind.SUB_BLOCK)
    is_far = spec.prefetch is not None and spec.prefetch >= fewest
    if not is_within or is_far or len({*spec.activations.of(layers)}) > 1:
        return None
    plan = lower(spec, facts)
    if not plan.wrap.treats_equal_blocks_alike or _are_joined(plan, facts):
        return None
    if plan.pipeline is None:
        return EqualBlocks(spec=spec, number=layers)
    split = tuple(map(len, plan.pipeline.layers))
    own = plan.pipeline.stages_of(positions(spec, (Axis.PP,))[rank])
    numbers = {split[stage] for stage in own}
    if len(numbers) > 1:
        return None
    return EqualBlocks(spec=spec, number=numbers.pop(), split=split, own=own)


def _are_joined(plan: Plan, facts: ModelFacts) -> bool:
    """Return whether some blocks of a rank are one unit: how many are is not as many of fewer."""
    if plan.form is not Form.FLAT:
        return False
    parts = [facts.units]
    if plan.tensor is not None:
        degree = plan.spec.degree(plan.tensor.axis)
        parts = [units for units, _ in local_units(facts, plan.tensor, degree)]
    return any(len(joined(plan, units)) < len(units) for units in parts)


# -- the proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A model with equal blocks: what stands around them and what each is; the operators in front
    of them, of the first, of each between, and of the last with what is behind."""

    facts: ModelFacts
    around: Leaves
    block: Leaves
    sections: tuple[Section, ...]

    @property
    def layers(self) -> int:
        return len(self.facts.blocks)

    def is_as(self, other: Repetition) -> bool:
        """Return whether the other one differs by its number of blocks alone."""
        layers = self.layers, other.layers
        return (
            self.block == other.block
            and self.sections == other.sections
            and self.facts.roles == other.facts.roles
            and differ_in_layers_alone(self.around, other.around, layers)
        )


def _proven(spec: Spec, rank: int, fewest: int, least: int) -> EqualBlocks | None:
    assert isinstance(spec.model, HuggingFaceModel)
    layers = layers_of(spec.model)
    if layers is None or layers < least:  # without building it
        return None
    whole = _repetition(spec)
    if whole is None or whole.layers != layers:
        return None
    blocks = _of_facts(spec, rank, whole.facts, layers, fewest)
    if blocks is None or blocks.number < least:
        return None
    few = _repetition(blocks.cut_to(fewest))
    return blocks if few is not None and whole.is_as(few) else None


def _repetition(spec: Spec) -> Repetition | None:
    """The model, if its blocks are equal, as far as it shows on fake tensors."""
    try:
        model = fake_model(spec)
        return None if model is None else _read(model)
    except (*READ, Incomparable, PtrainError, RuntimeError):  # whoever runs it hears of it
        return None


def _read(model: FakeModel) -> Repetition | None:
    with model.running(), torch.random.fork_rng(devices=[]):
        facts = untraced_facts(model.module, model.spec)
        around, structures = structure_of(model.module, facts.blocks)
        block = alike(structures) if len(structures) > 2 else None
        if block is None:
            return None
        sections = _sections(model, facts.blocks)
    if sections is None:
        return None
    return Repetition(facts=facts, around=around, block=block, sections=sections)


def _sections(model: FakeModel, blocks: tuple[str, ...]) -> tuple[Section, ...] | None:
    """Return those of a forward pass; None where blocks do not run once, in order, and alike."""
    recorder = SectionRecorder(model.module, blocks)
    with recorder.recording():
        forward_once(model.module, model.spec)
    if recorder.entered != [*range(len(blocks))]:
        return None
    front, first, *between, last = recorder.sections
    if any(section != between[0] for section in between):
        return None
    return front, first, between[0], last
