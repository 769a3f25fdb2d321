"""Scripts of accelerate, added when all others had been judged: faults that its users reported, and
a sound one. Nothing is entered where accelerate is not installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import ptrain
from tests.corpus.fault import TOO_SMALL, planted, sound
from tests.corpus.parts import adamw, my_rows, regression_loss, regressor, row_batches
from tests.gloo.field_stories import AccelerateEnvironment

MICRO_BATCHES, MOST = 2, 0.5


def clipped(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)


def plain(clips: bool = True) -> ptrain.Job:
    """One device: two micro-batches, their mean, the norm clipped."""
    model = regressor()
    optimizer = adamw(model)

    def step(rows: Tensor) -> Tensor:
        loss = regression_loss(model, rows)
        loss.backward()
        if clips:
            clipped(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return ptrain.Job(model=model, step=step)


def script(
    *,
    scale: float = 1.0,
    clips: bool = True,
    clips_always: bool = False,
    prepares_optimizer: bool = True,
) -> Callable[[], ptrain.Job]:
    """The script; each option replaces one part of it."""

    def made() -> ptrain.Job:
        from accelerate import Accelerator

        with AccelerateEnvironment():
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
        bare = regressor()
        own = adamw(bare)
        model, prepared = accelerator.prepare(bare, own)
        optimizer = prepared if prepares_optimizer else own

        def step(rows: Tensor) -> Tensor:
            losses = []
            for micro in rows.chunk(MICRO_BATCHES):
                with accelerator.accumulate(model):
                    loss = regression_loss(model, micro)
                    accelerator.backward(loss * scale)
                    if clips and (clips_always or accelerator.sync_gradients):
                        accelerator.clip_grad_norm_(model.parameters(), MOST)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        return ptrain.Job(model=model, step=step)

    return made


def judged(loop: Callable[[], ptrain.Job], clips: bool = True) -> Any:
    return ptrain.verify(lambda: plain(clips), loop, row_batches(), share=my_rows)


def loss_divided_by_accelerate_too(fault: bool) -> Any:
    """`backward` divides by the number of micro-batches already."""
    return judged(script(scale=1 / MICRO_BATCHES if fault else 1.0, clips=False), clips=False)


def clipped_between_micro_batches(fault: bool) -> Any:
    """The gradients of a rank alone are clipped before they are synchronised."""
    return judged(script(clips_always=fault))


def optimizer_not_prepared(fault: bool) -> Any:
    """It steps after every micro-batch, whose gradients are its own rank's."""
    return judged(script(clips=False, prepares_optimizer=not fault), clips=False)


def accelerated_script() -> Any:
    return judged(script())


if find_spec("accelerate") is not None:
    planted(
        source="https://github.com/huggingface/accelerate/issues/3533",
        wrong=("loss", "gradients"), axis="none", place="*", step=0,
        sentence="the loss is divided by the number of micro-batches, and by accelerate once more",
        right=(TOO_SMALL, "micro-batch|gradient|loss|accumul"),
        wrong_if=("learning rate", "not reduced"),
    )(loss_divided_by_accelerate_too)  # fmt: skip
    planted(
        source="https://github.com/huggingface/accelerate/issues/641",
        wrong=("gradients",), axis="none", place="*", step=0,
        sentence="gradients are clipped after every micro-batch, before they are synchronised",
        right=("clip|norm|scaled", "micro-batch|before|each|every"),
        wrong_if=("learning rate", "not reduced"),
    )(clipped_between_micro_batches)  # fmt: skip
    planted(
        source="https://github.com/QwenLM/Qwen3-TTS/pull/326",
        wrong=("parameters", "gradients"), axis="none", place="*", step=0,
        sentence="the optimizer steps after every micro-batch",
        right=("step|update", "once|every|as often|micro-batch|2 updates"),
        wrong_if=("learning rate",),
    )(optimizer_not_prepared)  # fmt: skip
    sound("a script of accelerate: accumulates, and clips what is synchronised")(accelerated_script)
