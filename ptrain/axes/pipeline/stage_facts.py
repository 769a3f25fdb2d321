"""The stages of a model by its facts: what the pipeline axis cuts it into, and what of it each has.

A stage is a model like any other, with fewer layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ptrain.axes.pipeline.catalogue import stages_of as cut_as_said
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts, prefixes
from ptrain.facts.stages import ENDS, Chain, Ends, Layers, Stage, is_within, layers_of
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.role import Role, Roles, fits
from ptrain.spec.spec import Spec

# Of the built-in families: what a tied head takes, and its own name of it.
TIED = ("embed.weight", "head.weight")


def stages_of(spec: Spec, facts: ModelFacts) -> tuple[Stage, ...]:
    """The stages that the spec cuts the model into, first to last; none without pp. Raises
    SpecError where it has too few layers."""
    if spec.degree(Axis.PP) == 1:
        return ()
    return cut_as_said(spec, layers(spec, facts))


def chain_of(spec: Spec, facts: ModelFacts) -> Chain:
    """Return what stages are cut from: of a built-in model by its family, else as its facts say."""
    if facts.chain is not None:
        return facts.chain
    model = spec.model
    assert isinstance(model, ModelShape), "the facts of another model have their chain"
    return Chain(
        layers=tuple(f"blocks.{index}" for index in range(model.layers)),
        ends=ENDS,
        hidden=model.hidden,
        tied=(TIED,) if model.tied else (),
    )


def layers(spec: Spec, facts: ModelFacts) -> Layers:
    """Return what may be cut: whole layers, however small the wrap's units are."""
    return _layers(facts, chain_of(spec, facts))


@lru_cache(maxsize=2**3)
def _layers(facts: ModelFacts, chain: Chain) -> Layers:
    *inner, root = facts.units
    within: dict[str, list[TensorFacts]] = {name: [] for name in chain.layers}
    for unit in inner:
        for name in prefixes(unit.name):
            if name in within:
                within[name] += unit.tensors
    blocks = tuple(
        UnitFacts(modules=(name,), tensors=tuple(tensors)) for name, tensors in within.items()
    )
    assert sum(block.numel for block in blocks) == sum(unit.numel for unit in inner)
    return layers_of((*blocks, root), front=chain.ends.front, tied=chain.tied)


def stage_facts(spec: Spec, facts: ModelFacts, stage: Stage) -> ModelFacts:
    """Return the facts of one stage's part: its units, what it shares with another stage in units
    of their own, the root with what it has of the ends, and the order in which its gradients are
    complete. A tied head's copy is complete when the head is."""
    return _stage_facts(facts, chain_of(spec, facts), stage)


@lru_cache(maxsize=2**5)  # who looks for what fits asks of the same model again and again
def _stage_facts(facts: ModelFacts, chain: Chain, stage: Stage) -> ModelFacts:
    tensors = {tensor.name: tensor for tensor in facts.tensors}
    for name, copy in stage.copied:
        tensors[copy] = replace(tensors[name], name=copy, is_copy=True)
    modules_of = stage.units(facts.unit_modules)
    first: dict[str, int] = {}  # the unit that a module begins with, inner before outer
    for index, modules in enumerate(modules_of):
        for module in modules:
            first.setdefault(module, index)
    held: list[list[TensorFacts]] = [[] for _ in modules_of]
    for name in stage.tensors:
        held[min(first[module] for module in ("", *prefixes(name)) if module in first)].append(
            tensors[name]
        )
    units = [
        UnitFacts(modules=modules, tensors=tuple(own))
        for modules, own in zip(modules_of, held, strict=True)
    ]
    copies = [copy for _, copy in stage.copied if not tensors[copy].is_frozen]
    has = {*stage.tensors}
    order = [name for name in facts.gradient_order if name in has]
    lacking = chain.lacking(stage)
    return replace(
        facts,
        units=tuple(units),
        buffers=tuple(row for row in facts.buffers if not is_within(row[0], lacking)),
        gradient_order=(*copies, *order),
        timeline=None,
        stage_passes=(),
        stops=() if stage.index else facts.stops,  # what another stage gives has a gradient
    )


def stage_roles(roles: Roles, stage: Stage, stages: int, ends: Ends = ENDS) -> Roles:
    """Those of one stage's modules: of the ends only what it has. What it has its own copy of a cut
    table for is its head, whatever it was called before."""
    gone = (
        *(ends.front if stage.index else ()),
        *(ends.behind if stage.index < stages - 1 else ()),
    )
    kept = tuple(pair for pair in roles if not any(_means(pair[0], name) for name in gone))
    copied = {copy.rpartition(".")[0]: name.rpartition(".")[0] for name, copy in stage.copied}
    heads = tuple(
        (head, Role.HEAD)
        for head, table in copied.items()
        if any(fits(pattern, table) for pattern, _ in roles)
        and not any(fits(pattern, head) for pattern, _ in kept)
    )
    return (*kept, *heads)


def _means(pattern: str, module: str) -> bool:
    """Whether a role is one of a module, or of something in it."""
    return fits(pattern, module) or pattern.startswith(f"{module}.")
