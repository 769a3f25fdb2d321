"""The memory that CUDA's caching allocator would reserve on a device, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ptrain.derivation.allocator import COMPUTING, Reserved
from ptrain.derivation.kernels import Workspace
from ptrain.report.table import (
    Importance,
    TableColumn,
    make_columns,
    memory_text,
    name_column,
    render_table,
)

_NOT_RESERVED = "not claimed: without what is unknown below, and CUDA's context"


def reserved_lines(
    reserved: Mapping[str, Reserved | None], workspaces: Sequence[Workspace] = ()
) -> list[str]:
    """Return a table of reserved memory by kind of segments, with the reason why it is not claimed.

    Args:
        reserved: The reserved memory by kind of segments; None for a kind that keeps growing. If
            there are no kinds, the result is empty.
        workspaces: Memory that kernels allocate, in a second table; unknown sizes are marked.
    """
    if not reserved:
        return []
    rows: list[tuple[str, ...]] = []
    for segments, reservation in reserved.items():
        if reservation is None:
            rows.append((segments, "grows on", "", "", "", ""))
            continue
        # Memory of other streams cannot be reused by the computing stream.
        elsewhere = sum(left for stream, left in reservation.beyond.items() if stream != COMPUTING)
        between = reservation.beyond.get(COMPUTING, 0) - reservation.gap
        figures = (
            reservation.device_bytes,
            reservation.living,
            reservation.gap,
            between,
            elsewhere,
        )
        rows.append((segments, *map(memory_text, figures)))
    columns = make_columns(
        rows,
        name_column("reserved by CUDA's allocator"),
        TableColumn("in all", Importance.RESULT),
        TableColumn("allocated"),
        TableColumn("largest gap"),
        TableColumn("other gaps", Importance.DETAIL),
        TableColumn("streams", Importance.DETAIL),
    )
    workspace_rows = [
        (space.what, "unknown" if space.device_bytes is None else memory_text(space.device_bytes))
        for space in workspaces
    ]
    space = make_columns(
        workspace_rows, name_column("of that within kernels"), TableColumn("bytes")
    )
    return [
        "",
        render_table(columns),
        _NOT_RESERVED,
        *([render_table(space)] if workspace_rows else []),
    ]
