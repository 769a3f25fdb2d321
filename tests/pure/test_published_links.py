"""Published collective bandwidths as shares of the link bandwidths in a cluster file."""

from __future__ import annotations

import pytest

from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.resolve_sections import expand_rates


@pytest.mark.parametrize(
    ("name", "link", "network"),
    [
        ("a100-64", "NVLink 3", "HDR"),
        ("h100-64", "NVLink 4", "NDR"),
        ("h200-64", "NVLink 4", "NDR"),
        ("b200-64", "NVLink 5", "NDR"),
        ("b300-8", "NVLink 5", "XDR"),
        ("v100-8", "NVLink 2", "EDR"),
    ],
)
def test_shares_of_links_name_the_links_of_their_cluster_and_are_below_one(name, link, network):
    text = list_files("clusters")[name].read_text(encoding="utf-8")
    known = load("8b-zero3", [f"cluster.preset={name}"]).spec.cluster
    assert known is not None and known.rates is not None
    assert link in text and f"InfiniBand {network}" in text
    rates = expand_rates(known.rates)
    assert f"of {link} (" in rates.source and f"of InfiniBand {network} (" in rates.source
    shares = [row.figures[2] for row in rates.links]
    assert len(shares) == 2 and all(0.7 < share < 1 for share in shares)
