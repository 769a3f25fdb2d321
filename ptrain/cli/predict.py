"""The command `ptrain predict`: predict memory, traffic and step time, without running anything.

Built-in models need no torch. Modules that only several specs, a record or a chart need are
imported where they are used, because imports take half of a prediction's time.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial

import ptrain
from ptrain.algebra.legality import is_sound
from ptrain.axes.context.draw import balance_rows
from ptrain.cli.arguments import missing_spec, print_json
from ptrain.codec import encode
from ptrain.derivation.estimate import Derivation, derive, facts_from_shape, step_tokens
from ptrain.derivation.layers import is_tabulated
from ptrain.errors import input_error
from ptrain.facts.model import ModelFacts
from ptrain.plan.composition import all_conditions
from ptrain.report.predict import (
    Prediction,
    ReservedMemory,
    next_commands,
    prediction_of,
    prediction_screen,
    require_cuda,
)
from ptrain.report.screen import command_line, next_line, print_lines, print_screen
from ptrain.selection.preflight import Variant
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import expand_sweeps, load, split_arguments
from ptrain.spec.names import list_files
from ptrain.spec.placement import Tier
from ptrain.spec.spec import ActivationSpec, Spec
from ptrain.units import format_memory

# The job of a model name: FSDP2 with bf16 mixed precision, no recomputation, and about
# as many tokens per step as `ptrain select` assumes.
_SPEC_OF_MODELS = "fsdp-mixed"
_JOB = ("batch.sequence=4096", "batch.micro=1", "batch.global=4M tokens")
_DEVICE = frozenset({Tier.DEVICE})
# Copies of offloads pass through the device, so modes that raise the peak by less are not useless.
_TEMPORARY_SHARE = 0.001


def warn_useless_modes(spec: Spec, peak: int | None) -> tuple[str, ...]:
    """Return a warning if the modes of activations raise the predicted peak of a built-in model."""
    plain = spec.with_fields(activations=ActivationSpec())
    is_known = all(map(is_tabulated, (spec, plain))) and is_sound(plain)
    is_plain = all(mode.is_plain for mode in spec.activations.modes)
    if peak is None or not is_known or is_plain:
        return ()
    least = derive(plain, is_timed=False).exact.peak_bytes()
    if least is None or peak <= least * (
        1 + _TEMPORARY_SHARE * (spec.activations.tiers != _DEVICE)
    ):
        return ()
    rise = f"raises the peak from {format_memory(least)} to {format_memory(peak)}"
    why = (
        "the peak is in the backward pass of one block, when all its activations are on "
        "the device again"
    )
    return (f"activations: recomputation or offloading {rise}: {why}. Use `activations=R`.",)


def _simulate_reserved(
    label: str, derivation: Derivation, spec: Spec, *, allow_import: bool
) -> ReservedMemory:
    """Return the memory that CUDA would reserve on the rank with the highest predicted peak.

    That rank is simulated, which needs torch.
    """
    if not spec.is_for_cuda:
        return ReservedMemory(
            lines=("", f"{label}: nothing is reserved: not for GPUs"), record=None
        )
    from ptrain.derivation.kernels import workspaces
    from ptrain.installed import require_torch

    require_torch()
    from ptrain.report.simulation import reserved_lines
    from ptrain.simulation.choice import choose_ranks
    from ptrain.simulation.execute import simulate

    rank = choose_ranks(spec, derivation.exact)[-1]  # the last one has the highest predicted peak
    segments = simulate(spec, rank, allow_import=allow_import).reserved_memory(spec)
    internal = workspaces(spec)
    description = (
        f"{label}: rank {rank} of {spec.world_size}, the first of those predicted to need most, "
        "simulated with a processor's operators, which allocate what is known of CUDA's"
    )
    return ReservedMemory(
        lines=("", description, *reserved_lines(segments, internal), ""),
        record={
            "rank": rank,
            **encode(segments),
            "workspaces": encode(internal),
        },
    )


def run(args: Namespace) -> int:
    """Print one spec's figures, the differences of two, or a row for each of several; return 0."""
    sources, overrides, model = _resolve_sources(args)
    is_sweep = len(list(expand_sweeps(overrides))) > 1
    is_table = bool(args.csv or args.chart or args.sort)
    if args.timeline and is_table:
        raise input_error(
            "--timeline", "cannot be combined with --csv, --chart or --sort", "Remove them."
        )
    if args.timeline and (is_sweep or len(sources) > 1):
        raise input_error("--timeline", "draws one spec; got several", "Name one spec.")
    predict = partial(
        predict_spec,
        allow_import=args.allow_import,
        with_reserved=args.reserved,
        is_quiet=args.json,
        explain=args.explain,
    )
    if is_sweep or len(sources) > 2 or is_table:
        from ptrain.cli.sweep import run_sweep

        return run_sweep(args, sources, overrides, predict=predict, as_record=as_record)
    words, timeline = tuple(overrides), None
    if args.timeline:
        from ptrain.cli.sweep import draw_step, step_file

        timeline = step_file(args.timeline)
    predictions = [predict(source, words, offer=len(sources) == 1) for source in sources]
    if args.reserved:
        require_cuda(predictions)
    if timeline:
        draw_step(predictions[0].derivation, timeline)
    if args.json:
        records = [as_record(prediction) for prediction in predictions]
        print_json(records if len(records) > 1 else records[0])
    elif len(predictions) == 1:
        remarks = [f"timeline {args.timeline}"] if args.timeline else []
        (prediction,) = predictions
        commands = next_commands(prediction)
        if model:
            devices = str(prediction.spec.world_size)
            search = ["select", model, "--cluster", args.cluster, "--devices", devices]
            commands = [shlex.join(["ptrain", *search])]
            job = shlex.join(["ptrain", "predict", *sources, *overrides])
            remarks.append(f"Assumed: fully sharded, bf16 mixed precision, as in `{job}`.")
        print_screen(
            prediction_screen(prediction, explain=args.explain), *remarks, "", next_line(*commands)
        )
    else:
        from ptrain.report.sweep import pair_screen

        command = command_line("plan", args.arguments, allow_import=args.allow_import)
        print_screen(
            pair_screen(*predictions, explain=args.explain),
            "",
            next_line(command, "ptrain plan --help"),
        )
    return 0


def _is_model(source: str, args: Namespace) -> bool:
    """Return True if a word names a model. Files are read only if `--cluster` is given."""
    if args.cluster is None:
        return source in list_files("models")
    from ptrain.selection.job import is_model

    return is_model(source)


def _resolve_sources(args: Namespace) -> tuple[list[str], list[str], str]:
    """Return the specs, the overrides, and the name of a model if one is given instead of a spec.

    Raises:
        SpecError: If the arguments contradict each other.
    """
    sources, overrides = split_arguments(args.arguments)
    if not sources:
        raise missing_spec("predict")
    model = next((source for source in sources if _is_model(source, args)), "")
    if model and args.cluster is None:
        raise input_error(
            "--cluster",
            f"is missing: {model} is a model, not a spec",
            f"Use `ptrain predict {model} --cluster h100-8`.",
        )
    if model and len(sources) > 1:
        raise input_error(
            model,
            "is a model, which is predicted alone",
            f"Use `ptrain predict {model} --cluster {args.cluster}`.",
        )
    if model:
        return [_SPEC_OF_MODELS], _overrides_of_model(model, overrides, args), model
    if args.devices is not None:
        raise input_error(
            "--devices",
            "needs a MODEL; the number of ranks of a SPEC is its mesh",
            f"Use `mesh.dp_shard={args.devices}`.",
        )
    of_cluster = [] if args.cluster is None else [f"cluster.preset={args.cluster}"]
    return sources, [*of_cluster, *overrides], ""


def _overrides_of_model(model: str, overrides: list[str], args: Namespace) -> list[str]:
    """Return the overrides that turn the default spec into a model's job, and the user's overrides.

    A default whose key the user sets is left out.
    """
    written = {override.partition("=")[0] for override in overrides}
    words = [f"model.preset={model}", f"cluster.preset={args.cluster}", *_JOB]
    if (devices := args.devices) is None:
        of_cluster = [word for word in (*words, *overrides) if word.startswith("cluster.")]
        cluster = load(_SPEC_OF_MODELS, of_cluster).spec.cluster
        assert cluster is not None, "a preset is a cluster"
        devices = cluster.devices
    words.append(f"mesh.dp_shard={devices}")
    kept = [word for word in words if word.partition("=")[0] not in written]
    return [*kept, *overrides]


def load_facts(
    spec: Spec, *, allow_import: bool, runs_fakes: bool = True, is_quiet: bool = False
) -> ModelFacts:
    """Return the facts of a spec's model.

    The facts of a built-in model come from its shape if tables have its allocations, or if it
    cannot be traced. Other facts come from the cache, or from a trace, which needs torch.

    Args:
        spec: The resolved spec.
        allow_import: Allow the import of the user's code.
        runs_fakes: The process will not run the model on real tensors later.
        is_quiet: Do not announce a trace that may take minutes.
    """
    if (facts := facts_from_shape(spec)) is not None:
        return facts
    from ptrain.facts.cache import read_or_cache

    return read_or_cache(
        spec,
        lambda: ptrain.read_facts(
            spec,
            allow_import=allow_import,
            runs_fakes=runs_fakes,
            progress=print_nothing if is_quiet else print_progress,
        ),
        allow_import=allow_import,
    )


def print_progress(line: str) -> None:
    """Print a line of progress to standard error."""
    print_lines(line, stream=sys.stderr)


def print_nothing(line: str) -> None:
    """Print nothing."""


def as_record(prediction: Prediction) -> dict[str, object]:
    """Return the result record of a prediction, with the figures that only the screen has."""
    from ptrain.report.record import result_record

    derivation, fitting = prediction.derivation, prediction.fit
    result = result_record(prediction.label, (derivation.paper, derivation.exact))
    result["parameters"] = prediction.num_parameters
    result["tokens_per_step"] = step_tokens(prediction.spec, derivation.facts)
    result["checkpoint_bytes"] = prediction.checkpoint_bytes
    result["fit"] = {
        "peak_bytes": fitting.peak_bytes,
        "lower_bytes": fitting.lower_bytes,
        "resident_bytes": fitting.resident_bytes,
        "device_memory": fitting.device_memory,
        "reserve_bytes": fitting.reserve_bytes,
        "host_bytes": fitting.host_bytes,
        "host_memory": fitting.host_memory,
        "host_needed_bytes": fitting.host_needed_bytes,
        "startup_host_bytes": fitting.startup_host_bytes,
        "fits": fitting.fits,
        "tight": fitting.is_tight,
        "unknown": fitting.unknown or None,
        "reserved": prediction.reserving.record if prediction.reserving else None,
        "command": None if fitting.peak_bytes is not None else prediction.measuring_command,
    }
    spec, plan = prediction.spec, derivation.plan
    result["conditions"] = encode(all_conditions(spec, plan))
    result["balance"] = balance_rows(plan.context) if plan.context else []
    result["cheaper"] = [as_change(variant) for variant in prediction.advice.variants]
    result["faster"] = [as_change(variant) for variant in prediction.faster]
    return result


def as_change(variant: Variant) -> dict[str, object]:
    """Return a suggested change as plain data."""
    return {
        "overrides": list(variant.overrides),
        "peak_bytes": variant.fit.peak_bytes,
        "step_seconds": variant.seconds,
        "spare_bytes": variant.fit.spare_bytes,
        "fits": variant.fit.fits is True,
    }


def predict_spec(
    source: str,
    words: tuple[str, ...],
    *,
    label: str = "",
    offer: bool = False,
    allow_import: bool,
    with_reserved: bool = False,
    is_quiet: bool = False,
    explain: bool = False,
) -> Prediction:
    """Load a spec and predict it.

    Args:
        source: The name or file of the spec.
        words: Overrides.
        label: The name of the prediction; by default the spec's.
        offer: Search for changes with which the spec fits, or for faster ones; warn of useless
            modes.
        allow_import: Allow the import of the user's code.
        with_reserved: Simulate the memory that CUDA's allocator would reserve.
        is_quiet: Do not announce traces.
        explain: Search for faster changes of pipelines too.
    """
    spec = resolve_auto(load(source, words))
    label = label or spec.name
    derivation = derive(spec, load_facts(spec, allow_import=allow_import, is_quiet=is_quiet))
    if offer:
        exact = derivation.exact
        more = warn_useless_modes(spec, exact.peak_bytes())
        derivation = replace(derivation, exact=replace(exact, warnings=(*exact.warnings, *more)))
    return prediction_of(
        derivation,
        label=label,
        offer=offer,
        explain=explain,
        reload=lambda more: load(source, (*words, *more)),
        words=(source, *words),
        allow_import=allow_import,
        reserving=_simulate_reserved(label, derivation, spec, allow_import=allow_import)
        if with_reserved
        else None,
    )
