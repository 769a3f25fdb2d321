"""Choice of the ranks to simulate: one process plays one rank, and most ranks are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ptrain.cost import Estimate
from ptrain.errors import input_error
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, indices_in_groups

ALL_DISTINCT = "all-distinct"


def require_ranks(spec: Spec, choices: Sequence[str]) -> None:
    """Check the values of `--rank`.

    Args:
        spec: The spec, for the number of ranks.
        choices: Numbers of ranks, or `all-distinct`.

    Raises:
        SpecError: If a value is not a rank of the mesh, or `all-distinct` is combined with others.
    """
    for choice in choices:
        if choice != ALL_DISTINCT:
            _parse_rank(choice, spec.world_size)
    if ALL_DISTINCT in choices and len(choices) > 1:
        raise input_error(
            "--rank",
            f"{ALL_DISTINCT} is combined with other ranks",
            f"Use rank numbers, or `--rank {ALL_DISTINCT}` alone.",
        )


def choose_ranks(spec: Spec, exact: Estimate, choices: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the ranks to simulate.

    Args:
        spec: The spec, for the mesh.
        exact: The prediction, for peaks and equal ranks.
        choices: Numbers of ranks, or `all-distinct`. By default the first rank and the one with the
            highest predicted peak are chosen.

    Raises:
        SpecError: As for `require_ranks`.
    """
    require_ranks(spec, choices)
    if ALL_DISTINCT in choices:
        return tuple(ranks[0] for ranks in rank_classes(spec, exact))
    if choices:
        return tuple(dict.fromkeys(_parse_rank(choice, spec.world_size) for choice in choices))
    needed = _predicted_bytes(exact)
    most = max(range(spec.world_size), key=lambda rank: (needed[rank], -rank))  # ties: the first
    return tuple(dict.fromkeys((0, most)))


def rank_classes(spec: Spec, exact: Estimate) -> list[tuple[int, ...]]:
    """Return groups of equal ranks, in the order of their first ranks.

    Args:
        spec: The spec, for the places of ranks along pp.
        exact: The prediction.

    Returns:
        Ranks of one group have the same place along pp, and the same predicted memory, peaks and
        traffic.
    """
    rows: defaultdict[int, list[object]] = defaultdict(list)
    for row in exact.memory:
        rows[row.rank].append((row.state, row.device_bytes, row.host_bytes, row.file_bytes))
    for peak in exact.peak:
        rows[peak.rank].append((peak.phase, peak.device_bytes))
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for rank, place in enumerate(indices_in_groups(spec, (Axis.PP,))):
        account = exact.account_of[rank] if exact.account_of else 0
        groups[place, account, tuple(rows[rank])].append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _predicted_bytes(exact: Estimate) -> dict[int, int]:
    """Return device bytes by rank: the peak, or the resident bytes if no peak is predicted."""
    needed: defaultdict[int, int] = defaultdict(int)
    for row in exact.memory:
        needed[row.rank] += row.device_bytes
    peaks: defaultdict[int, int] = defaultdict(int)
    for peak in exact.peak:
        peaks[peak.rank] = max(peaks[peak.rank], peak.device_bytes)
    return peaks or needed


def _parse_rank(text: str, world_size: int) -> int:
    """Return the number of a rank.

    Raises:
        SpecError: If the text is not a rank of the mesh.
    """
    if text.isascii() and text.isdigit() and int(text) < world_size:
        return int(text)
    raise input_error(
        "--rank",
        f"{text!r} is not a rank of a mesh with {world_size} ranks",
        f"Use a number from 0 to {world_size - 1}, or `{ALL_DISTINCT}`.",
    )
