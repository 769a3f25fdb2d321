"""Ranks exchange the same values over sockets of one host as over gloo between hosts."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.runtime.world import World
from ptrain.train import exchange
from ptrain.train.exchange import Exchange
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

VALUES = [0.1, float("inf"), -3e-300]


def exchange_values(share_a_host: bool) -> tuple[bool, list[Any]]:
    """Return whether the ranks use sockets, and the values this rank receives."""
    world = World.join()
    with pytest.MonkeyPatch.context() as patch:
        if not share_a_host:
            patch.setattr(exchange, "connect_ranks", lambda *_: None)
        ranks = Exchange(world)
    shares = [value * (world.rank + 1) for value in VALUES]
    heard = [
        ranks.sum_over_ranks(shares),
        ranks.gather({"rank": world.rank}),
        ranks.broadcast(world.rank + 7),
    ]
    has_sockets = ranks._host is not None
    ranks.close()
    return has_sockets, heard


def test_ranks_on_several_hosts_receive_the_values_of_ranks_on_one_host(ranks: Ranks) -> None:
    expected = [
        [value + 2 * value + 3 * value + 4 * value for value in VALUES],
        [{"rank": rank} for rank in range(4)],
        7,
    ]
    for share_a_host in (True, False):
        assert ranks.run(4, exchange_values, share_a_host) == [(share_a_host, expected)] * 4
