"""Faults that show once a run is stopped and resumed, at step 3."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import ptrain
from tests.corpus.fault import DATA, NEW_MOMENTS, planted
from tests.corpus.parts import (
    Regressor,
    adamw,
    average,
    looped,
    my_rows,
    rank,
    regression_loss,
    regressor,
    row_batches,
)

RESTART = 3
State = dict[str, Any]
LATE = "step 3|resum|restart|load|checkpoint|lost|reset|new|later|after|from step|again"


class ResumedRun:
    """A training that saves, restarts, and loads the states named by `restore`."""

    def __init__(
        self,
        model: nn.Module,
        restore: Callable[[ResumedRun, State], None],
        save: Callable[[ResumedRun], State] | None = None,
        decays: bool = False,
    ) -> None:
        self.model, self.restore, self.decays = model, restore, decays
        self.save = save or ResumedRun.state
        self.num_steps = 0
        self.reduces = not isinstance(model, FSDPModule)
        self.begin()

    def begin(self) -> None:
        """Make the optimizer and the schedule that a new process has."""
        self.optimizer = adamw(self.model)
        gamma = 0.6 if self.decays else 1.0
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)

    def state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def resume(self) -> None:
        file = io.BytesIO()
        torch.save(self.save(self), file)
        file.seek(0)
        self.begin()
        if self.reduces:
            self.model.load_state_dict(regressor().state_dict())
        self.restore(self, torch.load(file))

    def step(self, rows: Tensor) -> Tensor:
        if self.num_steps == RESTART:
            self.resume()
        self.num_steps += 1
        self.before = {name: part.clone() for name, part in self.model.state_dict().items()}
        loss = regression_loss(self.model, rows)
        loss.backward()
        if self.reduces:
            average(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()


def compared(
    restore: Callable[[ResumedRun, State], None],
    build: Callable[[], nn.Module] = regressor,
    save: Callable[[ResumedRun], State] | None = None,
    decays: bool = False,
) -> Any:
    def plain() -> ptrain.Job:
        model = regressor()
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6 if decays else 1.0)
        return looped(model, optimizer=optimizer, after_update=schedule.step)

    def job() -> ptrain.Job:
        run = ResumedRun(build(), restore, save, decays)
        return ptrain.Job(model=run.model, step=run.step)

    return ptrain.verify(plain, job, row_batches(8), share=my_rows)


@planted(
    source="https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/pull/65",
    wrong=("optimizer state", "parameters"), axis="none", place="*", step=RESTART,
    sentence="the optimizer's moments are not loaded at the resume of step 3",
    right=(NEW_MOMENTS, LATE),
    wrong_if=("not reduced", "counted twice", "sample"),
)  # fmt: skip
def moments_not_loaded(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        if fault:
            run.model.load_state_dict(state["model"])
        else:
            run.load(state)

    return compared(restore)


@planted(
    source="https://github.com/NVIDIA/apex/issues/480",
    wrong=("optimizer state", "parameters"), axis="none", place="*", step=RESTART,
    sentence="Adam's step counter begins again at the resume of step 3",
    right=("step count|counter|bias correction|optimizer|state|update", LATE),
    wrong_if=("not reduced", "counted twice", "sample"),
)  # fmt: skip
def step_counter_lost(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        run.load(state)
        for held in run.optimizer.state.values() if fault else ():
            held["step"].zero_()

    return compared(restore)


@planted(
    source="https://github.com/paiml/entrenar/issues/102",
    wrong=("parameters",), axis="none", place="*", step=RESTART,
    sentence="the schedule begins again at the resume of step 3: the learning rate is too large",
    right=("learning rate|lr|schedule|update", LATE + "|large|factor"),
    wrong_if=("not reduced", "counted twice", "sample"),
)  # fmt: skip
def schedule_begins_again(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        run.load(state)
        if fault:
            run.optimizer.param_groups[0]["lr"] = 1e-2

    return compared(restore, decays=True)


@planted(
    source="https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    wrong=("parameters",), axis="dp", place="rank 1", step=RESTART,
    sentence="the checkpoint is loaded on rank 0 only: rank 1 goes on from its initial weights",
    right=("rank 1|ranks|replica", "differ|differ|load|initial|not the same|other|weight"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def loaded_on_the_first_rank_only(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        if rank() == 0 or not fault:
            run.load(state)

    return compared(restore)


@planted(
    source="https://github.com/verl-project/verl/issues/7401",
    wrong=("parameters",), axis="none", place="*", step=RESTART,
    sentence="the checkpoint that is loaded at step 3 is older than the last update",
    right=("parameter|weight|loss|state", LATE + "|old|stale|update|differ|differ"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def checkpoint_of_an_earlier_step(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        run.load(state)
        if fault:
            run.model.load_state_dict(run.before)

    return compared(restore)


@planted(
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
    wrong=("parameters",), axis="none", place="*", step=RESTART,
    sentence="no weight is loaded at step 3: names have a prefix, and strict=False says nothing",
    right=("parameter|weight|loss", LATE + "|initial|start|differ|differ"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def names_do_not_match(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        if fault:
            state["model"] = {f"module.{name}": part for name, part in state["model"].items()}
        run.model.load_state_dict(state["model"], strict=False)
        run.optimizer.load_state_dict(state["optimizer"])
        run.schedule.load_state_dict(state["schedule"])

    return compared(restore)


@planted(
    source="https://github.com/NVIDIA/Model-Optimizer/pull/2322",
    wrong=("parameters",), axis="none", place="*", step=RESTART,
    sentence="weights are rounded to bf16 by the checkpoint of step 3",
    right=("round|precision|bf16|16 bit|bfloat16|dtype|cast", "parameter|weight|step|loss"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def saved_in_bf16(fault: bool) -> Any:
    def save(run: ResumedRun) -> State:
        state = run.state()
        kept = torch.bfloat16 if fault else torch.float32
        return state | {"model": {name: part.to(kept) for name, part in state["model"].items()}}

    return compared(ResumedRun.load, save=save)


@planted(
    source="https://github.com/KempnerInstitute/KempnerForge/pull/115",
    wrong=("optimizer state", "parameters"), axis="none", place="*", step=RESTART,
    sentence="the moments of the sharded optimizer are zero after the resume of step 3",
    right=(NEW_MOMENTS, LATE + "|zero"),
    wrong_if=("not reduced", "counted twice", "sample"),
)  # fmt: skip
def sharded_moments_not_loaded(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        if not fault:
            run.optimizer.load_state_dict(state["optimizer"])

    return compared(restore, build=lambda: fully_shard(regressor()))


@planted(
    source="https://github.com/pytorch/pytorch/issues/35047",
    wrong=("parameters", "optimizer state"), axis="dp", place="*", step=RESTART,
    sentence="moments go to the wrong parameters at step 3: the order of the groups has changed",
    right=(NEW_MOMENTS, LATE + "|wrong|other|order|" + DATA),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def moments_of_other_parameters(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        run.load(state)
        model = run.model
        assert isinstance(model, Regressor)
        if fault:  # norm's weight and bias have the same shape
            held, (weight, bias) = run.optimizer.state, (model.norm.weight, model.norm.bias)
            held[weight], held[bias] = held[bias], held[weight]

    return compared(restore)
