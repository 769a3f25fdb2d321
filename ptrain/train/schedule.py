"""The learning rate of a step: linear warm-up, then constant, or a cosine to a fraction of it."""

from __future__ import annotations

import math

from ptrain.spec.job import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int) -> float:
    """Return the learning rate of a step.

    Args:
        optimizer: The optimizer section of the spec.
        step: The step, from 0. The first of w warm-up steps uses lr / w.
    """
    schedule = optimizer.schedule
    if step < schedule.warmup:
        return optimizer.lr * (step + 1) / schedule.warmup
    if not schedule.decay_steps:
        return optimizer.lr
    done = min(1.0, (step - schedule.warmup) / schedule.decay_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * cosine)
