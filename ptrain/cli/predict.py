"""`ptrain predict`: what specs will take, before anything runs. Torch-free for built-in models.

What only several specs or a record need is imported there: half of a prediction's time are imports.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

import ptrain
from ptrain.cli.arguments import add_spec_arguments, print_json
from ptrain.derivation.estimate import Derivation, derive, facts_from_shape
from ptrain.errors import PtrainError, refused
from ptrain.facts.model import ModelFacts
from ptrain.plan.composition import theorem_6, theorem_7
from ptrain.report.predict import Prediction, Reserving, one, prediction_of
from ptrain.selection.recompute import settled
from ptrain.spec.load import load
from ptrain.spec.overrides import split_arguments, sweeps
from ptrain.spec.spec import Spec


def add_arguments(parser: ArgumentParser) -> None:
    add_spec_arguments(parser)
    parser.add_argument(
        "--reserved",
        action="store_true",
        help="what CUDA's allocator would reserve, too: simulates one rank of each spec for GPUs, "
        "the first of those predicted to need most, which takes seconds and torch",
    )


def _reserved(label: str, derivation: Derivation, spec: Spec, *, allow_import: bool) -> Reserving:
    """By a simulation of the rank that is predicted to need most."""
    if not spec.is_for_cuda:
        return Reserving(lines=("", f"{label}: nothing is reserved: not for GPUs"), record=None)
    from ptrain.derivation.workspaces import workspaces
    from ptrain.installed import require_torch

    require_torch()
    from ptrain.report.reserved import reserved_lines, reserved_record
    from ptrain.simulation.choice import chosen
    from ptrain.simulation.execute import simulate

    rank = chosen(spec, derivation.exact)[-1]
    segments = simulate(spec, rank, allow_import=allow_import).reserved(spec)
    within = workspaces(spec)
    whose = (
        f"{label}: rank {rank} of {spec.world_size}, the first of those predicted to need most, "
        "simulated with a processor's operators, which allocate what is known of CUDA's"
    )
    return Reserving(
        lines=("", whose, *reserved_lines(segments, within), ""),
        record={
            "rank": rank,
            **reserved_record(segments),
            "workspaces": [asdict(space) for space in within],
        },
    )


def run(args: Namespace) -> int:
    """One spec: all of it. Several, or lists: only what differs, or a row each."""
    sources, overrides = split_arguments(args.arguments)
    if not sources:
        raise PtrainError("ptrain predict: name a SPEC; `ptrain specs` lists them")
    predictions = [
        prediction
        for source in sources
        for prediction in predict(
            source,
            overrides,
            allow_import=args.allow_import,
            named=len(sources) > 1,
            with_reserved=args.reserved,
        )
    ]
    if args.reserved and not any(prediction.spec.is_for_cuda for prediction in predictions):
        of_specs = "the spec is not" if len(predictions) == 1 else "none of the specs is"
        finding = f"what is reserved is CUDA's allocator's, and {of_specs} for GPUs"
        raise refused("--reserved", finding, "write device: cuda, or a cluster of GPUs")
    if args.json:
        records = [as_record(prediction) for prediction in predictions]
        print_json(records if len(records) > 1 else records[0])
    elif len(predictions) == 1:
        print(one(predictions[0]))
    else:
        from ptrain.report.differences import several

        print(several(predictions, sweep=len(sources) == 1))
    return 0


def predict(
    source: str,
    overrides: list[str],
    *,
    allow_import: bool,
    named: bool = False,
    with_reserved: bool = False,
) -> list[Prediction]:
    """One prediction, or one per combination of the lists among the overrides; their labels hold
    the spec's name too where they are `named`. `with_reserved`: what CUDA's allocator would reserve
    is found by a simulation."""
    chosen = list(sweeps(overrides))
    specs = [settled(load(source, override)) for override in chosen]
    return [
        _predict(
            spec,
            label=_label(
                spec, [override for override in choice if override not in overrides], named=named
            ),
            facts=facts_of(spec, allow_import=allow_import),
            offer=len(specs) == 1,
            words=(source, *choice),
            allow_import=allow_import,
            with_reserved=with_reserved,
        )
        for spec, choice in zip(specs, chosen, strict=True)
    ]


def _label(spec: Spec, swept: list[str], *, named: bool) -> str:
    return " ".join([spec.name, *swept] if named or not swept else swept)


def facts_of(spec: Spec, *, allow_import: bool, runs_fakes: bool = True) -> ModelFacts:
    """A built-in model's from its shape, where tables tell what it allocates or it cannot be
    traced; else, and any other model's, from the cache, or they are read off the model, which needs
    torch. `runs_fakes`: whether the model does not run on real tensors in this process later."""
    if (known := facts_from_shape(spec)) is not None:
        return known
    from ptrain.facts.cache import kept

    return kept(
        spec,
        lambda: ptrain.read_facts(spec, allow_import=allow_import, runs_fakes=runs_fakes),
    )


def as_record(prediction: Prediction) -> dict[str, object]:
    """The result record, with what the text shows besides."""
    from ptrain.report.record import record

    derivation, fitting = prediction.derivation, prediction.fit
    result = record(prediction.label, (derivation.paper, derivation.exact))
    result["parameters"] = prediction.num_parameters
    result["fit"] = {
        "peak_bytes": fitting.peak_bytes,
        "lower_bytes": fitting.lower_bytes,
        "resident_bytes": fitting.resident_bytes,
        "device_memory": fitting.device_memory,
        "host_bytes": fitting.host_bytes,
        "host_memory": fitting.host_memory,
        "fits": fitting.fits,
        "unknown": fitting.unknown or None,
        "reserved": prediction.reserving.record if prediction.reserving else None,
        "command": None if fitting.peak_bytes is not None else prediction.telling,
    }
    spec, plan = prediction.spec, derivation.plan
    conditions = (*theorem_6(spec, plan), *theorem_7(spec, plan))
    result["conditions"] = [asdict(condition) for condition in conditions]
    result["cheaper"] = [
        {
            "overrides": list(variant.overrides),
            "peak_bytes": variant.peak_bytes,
            "fits": variant.fits,
        }
        for variant in prediction.cheaper
    ]
    return result


def _predict(
    spec: Spec,
    *,
    label: str,
    facts: ModelFacts,
    offer: bool,
    words: tuple[str, ...],
    allow_import: bool,
    with_reserved: bool,
) -> Prediction:
    derivation = derive(spec, facts)
    return prediction_of(
        derivation,
        label=label,
        offer=offer,
        words=words,
        allow_import=allow_import,
        reserving=_reserved(label, derivation, spec, allow_import=allow_import)
        if with_reserved
        else None,
    )
