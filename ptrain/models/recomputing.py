"""Whether a module runs again."""

from __future__ import annotations

from ptrain.internals.autograd import is_in_backward


def runs_again() -> bool:
    """Within a backward pass a module's forward is only run for what it did not keep: its hooks
    have done their work. The engine's thread knows the pass that it works for."""
    return is_in_backward()
