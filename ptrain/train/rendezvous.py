"""Where the agents of several nodes meet: torch's c10d rendezvous, in a store of one address.

torch's own store listens on all interfaces of its node, and its agents unpickle the state that they
read there: whoever can set a key can run code as the user. This store listens on the address of
--rdzv-endpoint alone. Whoever reaches that address still can: it belongs on a private network.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ptrain.errors import RankFailed, SpecError, refused
from ptrain.rooms.world import listener

BACKEND = "ptrain"
_WAIT = timedelta(seconds=60)  # torch's own, for the first agent to open the store


class _Backend(C10dRendezvousBackend):
    """torch's, under the name by which its launcher looks for it."""

    @property
    def name(self) -> str:
        return BACKEND


def register() -> None:
    """Make BACKEND known to torch's launcher in this process."""
    rendezvous_handler_registry.register(BACKEND, _handler)


def local_address(endpoint: str) -> str:
    """This node's address on the way to the endpoint: the interface on which its ranks meet. No
    packet is sent. Raises SpecError for an endpoint that cannot be looked up."""
    family, address, port = _resolved(endpoint)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            finding = f"there is no way to it: {error.strerror or error}"
            raise _refused(endpoint, finding) from error
        return str(probe.getsockname()[0])


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    store = _store(parameters.endpoint)
    return create_handler(store, _Backend(store, parameters.run_id), parameters)


def _store(endpoint: str) -> TCPStore:
    """Opened by the first agent on the node that has the address; the others are its clients.
    Raises RankFailed where none opens it in time."""
    _, address, port = _resolved(endpoint)
    own = listener(address, port)
    try:
        return TCPStore(
            address, port, is_master=bool(own), timeout=_WAIT, wait_for_workers=False, **own
        )
    except (RuntimeError, ValueError) as error:
        finding = f"no agent answers at {endpoint} within {_WAIT.seconds} s"
        raise RankFailed(f"error: --rdzv-endpoint: {finding}") from error


def _resolved(endpoint: str) -> tuple[socket.AddressFamily, str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise _refused(endpoint, "is not HOST:PORT")
    try:
        families = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        finding = f"{host} cannot be looked up: {error.strerror or error}"
        raise _refused(endpoint, finding) from error
    family, *_, address = families[0]
    return family, str(address[0]), int(port)


def _refused(endpoint: str, finding: str) -> SpecError:
    remedy = "give the address of one of the nodes on their private network, and a free port"
    return refused(f"--rdzv-endpoint {endpoint}", finding, remedy)
