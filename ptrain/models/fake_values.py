"""What torch raises where code reads a value, or a shape that depends on values, off a fake tensor,
which has none."""

from __future__ import annotations

from ptrain.internals.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

READ = (DataDependentOutputException, DynamicOutputShapeException)
