"""Whether a module runs again."""

from __future__ import annotations

import torch


def runs_again() -> bool:
    """Within a backward pass a module's forward is only run for what it did not keep: its hooks
    have done their work. The engine's thread knows the pass that it works for."""
    return bool(torch._C._current_graph_task_id() != -1)
