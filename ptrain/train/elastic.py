"""Training on several nodes: torch's elastic launcher runs `ptrain.train` on this node.

A restarted attempt continues from the newest checkpoint of the run folder. Restarts therefore need
`--run-dir` on a file system that all nodes share, and `checkpoint: {every: N}`.

The agents of the nodes meet at torch's c10d rendezvous. torch's store listens on all interfaces of
its node, and the agents unpickle the state that they read from it: a client that can set a key can
run code as the user. The store of this module only listens on the address of --rdzv-endpoint. Any
client that reaches this address can still set keys, so use a private network.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ptrain.errors import Fault, PtrainError, RankFailed, SpecError, input_error
from ptrain.report.screen import print_lines
from ptrain.runtime.world import create_store, listen_arguments
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.train import environment, options
from ptrain.train.heading import rank_stage_texts
from ptrain.train.launch import is_victim
from ptrain.train.options import Options, rank_module

BACKEND = "ptrain"
# The seconds in which the first agent opens the store. torch's own backend has this key, too
# (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, torch 2.13).
_TIMEOUT = "read_timeout"


# torch's registry rejects a second creator for the name c10d (`register` in
# torch/distributed/elastic/rendezvous/api.py, torch 2.13).
class _Backend(C10dRendezvousBackend):
    """torch's c10d backend, registered under another name."""

    @property
    def name(self) -> str:
        """The name under which torch's launcher finds the backend."""
        return BACKEND


def register_backend() -> None:
    """Register BACKEND with torch's launcher in this process."""
    rendezvous_handler_registry.register(BACKEND, _make_handler)


def local_address(endpoint: str) -> str:
    """Return this node's address on the route to the endpoint, where its ranks meet.

    Connecting a UDP socket selects the route without sending a packet.

    Raises:
        SpecError: The endpoint cannot be resolved or reached.
    """
    family, address, port = _resolve_endpoint(endpoint)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise _endpoint_error(
                endpoint, f"it is not reachable: {error.strerror or error}"
            ) from error
        return str(probe.getsockname()[0])


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous handler, as torch's registry calls it."""
    waits = timedelta(seconds=int(parameters.get(_TIMEOUT)))
    store = _open_store(parameters.endpoint, waits)
    return create_handler(store, _Backend(store, parameters.run_id), parameters)


def _open_store(endpoint: str, waits: timedelta) -> TCPStore:
    """Open the store on the node that has the address of the endpoint, or connect to it.

    Raises:
        RankFailed: No agent opens the store in time.
    """
    _, address, port = _resolve_endpoint(endpoint)
    # {} makes this a client: the address is another node's, or a process listens on it already.
    arguments = listen_arguments(address, port)
    try:
        return create_store(address, port, waits, is_master=bool(arguments), **arguments)
    except (RuntimeError, ValueError, TimeoutError) as error:
        finding = f"no agent responded at {endpoint} within {waits.seconds} s"
        raise RankFailed(f"error: --rdzv-endpoint: {finding}") from error


def _resolve_endpoint(endpoint: str) -> tuple[socket.AddressFamily, str, int]:
    """Return address family, address and port of an endpoint HOST:PORT.

    Raises:
        SpecError: It has another form, or HOST cannot be resolved.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise _endpoint_error(endpoint, "does not have the form HOST:PORT")
    try:
        families = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise _endpoint_error(
            endpoint, f"{host} cannot be resolved: {error.strerror or error}"
        ) from error
    family, *_, address = families[0]
    return family, str(address[0]), int(port)


def _endpoint_error(endpoint: str, finding: str) -> SpecError:
    """Return the error of an endpoint."""
    return input_error(
        f"--rdzv-endpoint {endpoint}",
        finding,
        "Use the address of one of the nodes on their private network, and a free port.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one agent and return its exit code. All nodes get the same command line."""
    try:
        return launch_agent(options.parse_options(argv))
    except PtrainError as error:
        print_lines(str(error), stream=sys.stderr)
        return error.exit_code


def launch_agent(settings: Options) -> int:
    """Run torch's agent of this node and return the exit code.

    Raises:
        RankFailed: A rank failed. The message has the root cause that the agent found.
    """
    spec = resolve_auto(load(settings.spec, settings.overrides))
    config = LaunchConfig(
        # A fixed number: the mesh has one world size, so fewer nodes cannot train.
        min_nodes=settings.nnodes,
        max_nodes=settings.nnodes,
        nproc_per_node=_ranks_per_node(spec.world_size, settings.nnodes),
        run_id=settings.rdzv_id,
        rdzv_backend=BACKEND,
        rdzv_endpoint=settings.rdzv_endpoint,
        local_addr=local_address(settings.rdzv_endpoint),
        max_restarts=settings.max_restarts,
        rdzv_configs={_TIMEOUT: max(1, int(spec.timeout.init))},
    )
    register_backend()
    # The agent reads the variable when it joins the rendezvous, and its ranks inherit it.
    environment.allow_agent_restarts()
    try:
        # -P keeps the current folder off the path of the ranks.
        argv = ("-P", "-m", rank_module(spec), *options.to_argv(settings))
        elastic_launch(config, sys.executable)(*argv)
    except ChildFailedError as error:
        rank, message = _root_cause(error)
        part = dict(enumerate(rank_stage_texts(spec))).get(rank)
        raise RankFailed(f"error: rank {rank}{f' ({part})' if part else ''}: {message}") from error
    except SignalException as error:
        return 128 + int(error.sigval)  # the convention of shells
    return 0


def _ranks_per_node(world_size: int, num_nodes: int) -> int:
    """Return the ranks per node. Raises SpecError if the ranks cannot be divided evenly."""
    if world_size % num_nodes:
        fault = Fault(
            place="--nnodes",
            finding=f"{world_size} ranks cannot be divided evenly over {num_nodes} nodes",
            remedy=f"Use a mesh whose size is a multiple of {num_nodes}.",
        )
        raise SpecError(fault)
    return world_size // num_nodes


def _root_cause(error: ChildFailedError) -> tuple[int, str]:
    """Return the rank and message of the first failure on this node that no other rank caused."""
    # torch records whole seconds (torch/distributed/elastic/multiprocessing/errors/__init__.py,
    # torch 2.13), so a victim may come before its root cause: the messages decide.
    failures = sorted(error.failures.items(), key=lambda failed: failed[1].timestamp)
    messages = [(rank, _message_text(failure.message)) for rank, failure in failures]
    return next((pair for pair in messages if not is_victim(pair[1])), messages[0])


def _message_text(message: object) -> str:
    """Return the message of a failure, which is a text or the dictionary that @record writes."""
    return str(message.get("message", message) if isinstance(message, dict) else message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
