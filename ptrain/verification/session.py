"""One rank of `ptrain verify`: read the spec, meet the others, verify, say so."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from ptrain.data.corpus import corpus
from ptrain.data.sampler import require as require_corpus
from ptrain.errors import VerdictFailed
from ptrain.models.contract import forward_once
from ptrain.report.record import Check
from ptrain.report.screen import show
from ptrain.report.verification import as_record, end_text, stage_text
from ptrain.rooms.world import World
from ptrain.selection.recompute import settled
from ptrain.spec.extras import require_leave
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train import environment
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, write_json
from ptrain.train.heading import announce_node, header
from ptrain.train.session import device_name
from ptrain.verification.options import VerifyOptions
from ptrain.verification.progress import Progress
from ptrain.verification.protocol import Request, Verification, account_here, verify_here
from ptrain.verification.reference import ReferenceTraining


def run(options: VerifyOptions) -> int:
    """Return the exit code, equal on all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is half written: gone at once
    size = dist.get_world_size() if dist.is_initialized() else environment.world_size()
    spec = settled(load(options.spec, options.overrides, world_size=size))
    require_leave(spec, allow_import=options.allow_import)
    logits = _num_logits(spec)
    with ExitStack() as stack:
        world = World.join(spec.timeout, device=spec.device, backend=spec.backend)
        stack.callback(world.close)
        exchange = Exchange(world)
        stack.callback(exchange.close)
        require_corpus(corpus(spec.data), spec, logits)
        request = Request(
            steps=options.steps,
            quick=options.quick,
            every_collective=options.every_collective,
            folder=options.references,
            account=options.account,
            against=options.compare,
        )
        if options.account is not None:
            account_here(spec, world, exchange, request)
            return 0
        return _verify(spec, world, exchange, request, options)


def _num_logits(spec: Spec) -> int | None:
    """Of a token, by the user's own code, which runs here for the first time. Raises SpecError."""
    if not spec.user_functions:
        return None
    model = ReferenceTraining(spec).module
    with torch.random.fork_rng(devices=[]):
        return forward_once(model, spec)


def _verify(
    spec: Spec, world: World, exchange: Exchange, request: Request, options: VerifyOptions
) -> int:
    heading = _heading(spec, world) if world.is_first else ""
    speaks = world.is_first and not options.json
    progress = Progress(sys.stderr if speaks else None)

    def print_stage(name: str, checks: Sequence[Check], seconds: float) -> None:
        progress.clear()
        show(stage_text(name, checks, seconds, verbose=options.verbose))

    if speaks:
        show(heading)
    elif not options.json:
        announce_node(world.rank, world.size)
    verification = verify_here(
        spec, world, exchange, request, speak=print_stage if speaks else None, progress=progress
    )
    if world.is_first:
        result = _record(spec, verification, world, request, heading)
        if options.folder is not None:
            write_json(RunFolder(options.folder).summary, result)
        if options.json and options.folder is None:
            print(json.dumps(result, indent=2, ensure_ascii=False))
    if speaks:
        show(_end(verification))
    exchange.barrier()  # no rank ends with a failed verdict before the record says so
    return 0 if verification.holds else VerdictFailed.exit_code


def _heading(spec: Spec, world: World) -> str:
    numel = sum(parameter.numel() for parameter in ReferenceTraining(spec).parameters.values())
    return header(spec, numel=numel, backend=world.backend, device=world.device.type)


def _end(verification: Verification) -> str:
    return end_text(
        verification.checks,
        torch=torch.__version__,
        culprit=verification.culprit,
        notes=verification.notes,
    )


def _record(
    spec: Spec, verification: Verification, world: World, request: Request, heading: str
) -> dict[str, object]:
    return as_record(
        spec.name,
        verification.checks,
        culprit=verification.culprit,
        departures=verification.departures,
        world_size=world.size,
        device=device_name(world),
        heading=heading,
        steps=request.steps,
        seconds=verification.seconds,
        trajectories=verification.trajectories,
        notes=list(verification.notes),
    )
