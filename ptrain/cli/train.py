"""The command `ptrain train [SPEC] [a.b=c …]`: check the spec, and start the ranks.

This process does not import torch, so wrong input is reported at once; its ranks are plain
processes. If a launcher has started it, or torch's elastic launcher is requested, it replaces
itself by that process.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from ptrain.charts.canvas import ChartFile, chart_file
from ptrain.charts.figures import logged_rows, training_sheets
from ptrain.charts.tokens import logged_tokens, routing_sheet
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError, RankFailed, input_error
from ptrain.installed import require_torch
from ptrain.report.routing import is_routing_recorded
from ptrain.report.screen import print_lines
from ptrain.selection.preflight import require_fit
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.batch import chosen_lines
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec, require_file_tier, require_leave, require_transformers
from ptrain.train import environment, options
from ptrain.train.folder import (
    Claim,
    RunFolder,
    is_done,
    open_run,
    require_resumable,
    restart_source,
)
from ptrain.train.heading import rank_stage_texts, require_ranks_fit_host
from ptrain.train.launch import launch_ranks
from ptrain.train.options import Options, rank_module, require_profiled_steps
from ptrain.train.tracker import require_trackers, tracker_names


def run(arguments: Namespace) -> int:
    """Run the job and return its exit code."""
    choices = options.from_arguments(arguments)
    if arguments.chart is not None and (environment.is_launched() or choices.wants_elastic):
        raise input_error(
            "--chart",
            "is not supported if another launcher starts the ranks",
            "Remove it, or train on one machine.",
        )
    if environment.is_launched():
        spec = load(choices.spec, choices.overrides, world_size=environment.world_size()).spec
        environment.exec_module(rank_module(spec), options.to_argv(choices))
    spec = load_checked(choices)
    chart = chart_file(arguments.chart)
    if choices.wants_elastic:
        argv = [*options.to_argv(choices), *options.elastic_argv(choices)]
        environment.exec_module("ptrain.train.elastic", argv)
    if not choices.force:
        _require_one_node(spec)
    if not (choices.json or choices.quiet):  # the ranks read a resolved spec, which has no choices
        for line in chosen_lines(spec.batch, spec.data_degree):
            print(line, flush=True)
    return start_ranks(spec, choices, lambda folder: _draw_training(spec, folder, chart))


def _draw_training(spec: Spec, folder: RunFolder, chart: ChartFile | None) -> None:
    """Draw losses, throughput and logged tokens per expert, if a chart is requested."""
    if chart is None:
        return
    rows = logged_rows(folder.metrics)
    sheets = training_sheets({spec.name: rows})
    if is_routing_recorded(spec) or not sheets:
        sheets.append(routing_sheet(spec.name, logged_tokens(rows)))
    for sheet in sheets[1:]:
        sheets[0].add_below(sheet)
    chart.draw(sheets[0])


def load_checked(choices: Options) -> Spec:
    """Load the spec that will run, and check it before any rank starts and anything is written.

    Raises:
        SpecError: If the spec or an option is wrong, or the job does not fit the devices or this
            host.
    """
    require_torch()
    spec = resolve_auto(load(choices.spec, choices.overrides))
    require_profiled_steps(spec)
    require_trackers(tracker_names(spec, choices))
    require_leave(spec, allow_import=choices.allow_import)
    require_transformers(spec.model)
    if isinstance(spec.model, ModelShape) and not choices.force:
        exact = derive(spec).exact  # the sizes of other models need a trace, which imports torch
        require_fit(
            spec, exact, reload=lambda more: load(choices.spec, (*choices.overrides, *more))
        )
        words = shlex.join([choices.spec, *choices.overrides])
        require_ranks_fit_host(spec, exact, words, nodes=choices.nnodes)
    require_file_tier(spec)
    require_resumable(spec, choices)
    return spec


def _require_one_node(spec: Spec) -> None:
    """Check that the ranks of a job on several GPU nodes do not all start on this machine.

    CPU clusters, and any cluster with `device: cpu`, may run on one machine.

    Raises:
        SpecError: If the job needs several nodes.
    """
    cluster, size = spec.cluster, spec.world_size
    if (
        cluster is not None
        and cluster.kind == "cuda"
        and spec.device != "cpu"
        and size > cluster.devices_per_node
    ):
        # The fewest nodes whose number divides the ranks: every node starts as many.
        fewest = -(-size // cluster.devices_per_node)
        nodes = next(nodes for nodes in range(fewest, size + 1) if size % nodes == 0)
        raise input_error(
            "mesh",
            f"{size} ranks would start on this machine; a node of {cluster.name} has "
            f"{cluster.devices_per_node} GPUs",
            f"Add `--nnodes {nodes} --rdzv-endpoint HOST:PORT --rdzv-id ID` and run the command on "
            f"each of {nodes} nodes (`ptrain help several-nodes`). To start all ranks here, add "
            "`device=cpu` or `--force`.",
        )


def start_ranks(spec: Spec, choices: Options, after: Callable[[RunFolder], None]) -> int:
    """Run one process per rank on this machine, and return the exit code.

    Args:
        spec: The resolved spec.
        choices: The options of the command.
        after: Called with the run folder when all ranks have ended.
    """
    claim = open_run(
        spec,
        given=choices.run_dir,
        resuming=choices.resume is not None,
        command=shlex.join(["ptrain", *sys.argv[1:]]),
    )
    prepared = replace(
        choices,
        spec=str(claim.folder.path / "spec.resolved.yaml"),
        overrides=(),
        run_dir=claim.folder.path,
        prepared=True,
    )
    try:
        code = _launch_with_restarts(spec, prepared, claim)
        after(claim.folder)
        return code
    except PtrainError as error:
        # Wrong input: the run folder is restored, unless a step was done.
        if error.exit_code == PtrainError.exit_code:
            claim.withdraw()
        raise
    finally:
        claim.lock.release()


def _launch_with_restarts(spec: Spec, prepared: Options, claim: Claim) -> int:
    """Start the ranks, and restart them if a rank fails.

    Args:
        spec: The resolved spec.
        prepared: The options for the ranks, with the run folder and the number of restarts.
        claim: The claim on the run folder; the ranks inherit its lock.

    Returns:
        The exit code of the first attempt in which no rank fails.

    Raises:
        RankFailed: If a rank of the last allowed attempt fails.
    """
    parts = rank_stage_texts(spec)
    for restart in count(1):
        try:
            return launch_ranks(
                options.to_argv(prepared),
                num_ranks=spec.world_size,
                folder=claim.folder,
                parts=parts,
                module=rank_module(spec),
                # Ranks inherit the lock: the run folder stays locked while any of them lives.
                inherited=(claim.lock.descriptor,),
            )
        except PtrainError as error:
            _record_failure(claim.folder, error)
            if (
                not isinstance(error, RankFailed)
                or restart > prepared.max_restarts
                or is_done(spec, claim.folder)
            ):
                raise
            print_lines(f"{error}\nrestart {restart} of {prepared.max_restarts}", stream=sys.stderr)
            prepared = replace(prepared, resume=restart_source(prepared.resume, claim.folder))
    raise AssertionError("the last restart returns or raises")


def _record_failure(folder: RunFolder, error: PtrainError) -> None:
    """Append an error to the failures of a run, unless the user's input was wrong."""
    if error.exit_code == PtrainError.exit_code:
        return
    row = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "error": str(error)}
    with folder.failures.open("a", encoding="utf-8") as file:
        folder.failures.chmod(0o600)
        file.write(json.dumps(row) + "\n")
