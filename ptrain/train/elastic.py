"""Several nodes: torch's elastic launcher, which starts `ptrain.train` on this node.

A restarted attempt continues from the run folder's newest checkpoint, so restarts want
`--run-dir` on a file system that all nodes see, and `checkpoint: {every: N}`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ptrain.errors import Fault, PtrainError, RankFailed, SpecError
from ptrain.selection.recompute import settled
from ptrain.spec.load import load
from ptrain.train import environment, options, rendezvous
from ptrain.train.failure import is_victim
from ptrain.train.guard import module_of
from ptrain.train.heading import parts_of_ranks
from ptrain.train.options import Options


def main(argv: Sequence[str]) -> int:
    """One agent. All nodes are given the same command line; nodes meet at --rdzv-endpoint."""
    try:
        return launch(options.parse(argv))
    except PtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def launch(settings: Options) -> int:
    """Run torch's agent of this node and return the exit code. Raises RankFailed with the root
    cause that the agent found."""
    spec = settled(load(settings.spec, settings.overrides))
    config = LaunchConfig(
        min_nodes=settings.nnodes,
        max_nodes=settings.nnodes,
        nproc_per_node=_ranks_per_node(spec.world_size, settings.nnodes),
        run_id=settings.rdzv_id,
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=settings.rdzv_endpoint,
        local_addr=rendezvous.local_address(settings.rdzv_endpoint),
        max_restarts=settings.max_restarts,
    )
    rendezvous.register()
    environment.let_agents_restart()
    try:
        argv = ("-P", "-m", module_of(spec), *options.to_argv(settings))
        elastic_launch(config, sys.executable)(*argv)
    except ChildFailedError as error:
        rank, message = _culprit(error)
        part = dict(enumerate(parts_of_ranks(spec))).get(rank)
        raise RankFailed(f"error: rank {rank}{f' ({part})' if part else ''}: {message}") from error
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _ranks_per_node(world_size: int, num_nodes: int) -> int:
    if world_size % num_nodes:
        fault = Fault(
            place="--nnodes",
            finding=f"{world_size} ranks do not divide over {num_nodes} nodes",
            remedy="let the mesh be a multiple of the nodes",
        )
        raise SpecError(fault)
    return world_size // num_nodes


def _culprit(error: ChildFailedError) -> tuple[int, str]:
    """Return the first rank to fail that did not fail because of another, and what it says; on this
    node, as each agent says."""
    failures = sorted(error.failures.items(), key=lambda failed: failed[1].timestamp)
    messages = [(rank, _message_text(failure.message)) for rank, failure in failures]
    return next((pair for pair in messages if not is_victim(pair[1])), messages[0])


def _message_text(message: object) -> str:
    """The agent's message: text, or what @record wrote."""
    return str(message.get("message", message) if isinstance(message, dict) else message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
