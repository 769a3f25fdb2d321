"""What torch raises where code reads a value, or a shape that depends on values, off a fake tensor,
which has none."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

READ = (DataDependentOutputException, DynamicOutputShapeException)
