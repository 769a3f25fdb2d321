"""Traffic of one steady step, call by call: the `exact` column of Theorem 2.

Theorem 2 as printed forgets that a rank which updates a part of what it stores must gather the
rest; here every collective that the plan's wrap issues is counted, with its padding.
"""

from __future__ import annotations

from ptrain.costs import Traffic, add_traffic
from ptrain.derivation.ghosts.clipping import norm
from ptrain.derivation.ghosts.wrapping import Wrapping


def sent(ghost: Wrapping) -> tuple[Traffic, ...]:
    """Return what every rank sends: once (setup) and in each step."""
    return add_traffic((*ghost.sent(None), *norm(ghost)))
