"""What the steps of a run show of the reference by itself: what gets a gradient, what moves, what
its optimizers keep from step to step, and which units are copies of each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ptrain.report.finding import Culprit, Subject
from ptrain.verification.jobs.culprits import families
from ptrain.verification.jobs.metamorphic import TriedRelation, of_both_sides
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.shards import ParameterShard, values_of

_STILL = 2  # steps at the end without a move, from which a schedule's last step is told


@dataclass(slots=True)
class Watched:
    """`trained`: parameters that had a gradient; `steps`: of each step whether any parameter had a
    gradient, and whether any moved; `has_masters`: an optimizer updates tensors that are none of
    the model's; `emptied`: how often an optimizer had nothing left of what it
    had kept of a parameter."""

    num_ranks: int
    trained: set[str] = field(default_factory=set)
    steps: list[tuple[bool, bool]] = field(default_factory=list)
    has_masters: bool = False
    emptied: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _given: set[str] = field(default_factory=set)
    _kept: set[str] = field(default_factory=set)
    _values: dict[str, Tensor] = field(default_factory=dict)
    _shapes: dict[str, torch.Size] = field(default_factory=dict)

    def begin(self, wholes: Mapping[str, ParameterShard]) -> None:
        """Take the values of the start."""
        self._values = values_of(wholes)
        self._shapes = {
            name: shard.shape for name, shard in wholes.items() if shard.parameter.requires_grad
        }

    def see(self, run: StepRecorder, wholes: Mapping[str, ParameterShard]) -> None:
        """Take what a step shows."""
        now = values_of(wholes)
        trained = {name for name, gradient in run.gradients.items() if bool(gradient.any())}
        moved = any(not torch.equal(row, self._values[name]) for name, row in now.items())
        self.trained |= trained
        self.steps.append((bool(trained), moved))
        for name in self._kept & run.without_state:
            self.emptied[name] = self.emptied.get(name, 0) + 1
        own = {id(shard.parameter): name for name, shard in wholes.items()}
        given = [
            id(parameter)
            for optimizer in run.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._given |= {own[parameter] for parameter in given if parameter in own}
        self.has_masters = self.has_masters or any(parameter not in own for parameter in given)
        self._kept = {
            own[id(parameter)]
            for optimizer in run.optimizers
            for parameter, state in optimizer.state.items()
            if id(parameter) in own
            and any(isinstance(row, Tensor) and bool(row.any()) for row in state.values())
        }
        self._values = now

    def relations(self, origin: Mapping[str, Tensor]) -> Iterator[TriedRelation]:
        """Yield what holds of any training, and what does not; `origin`: the values of the
        start."""
        if len(self.steps) < 2:
            return
        yield TriedRelation.of("what gets a gradient moves", self._unmoved(origin))
        yield TriedRelation.of("every step moves", self._stalled())
        yield TriedRelation.of("optimizers keep their state", self._emptied())
        yield TriedRelation.of("units differ", self._copies(origin))

    def _unmoved(self, origin: Mapping[str, Tensor]) -> Culprit | None:
        still = sorted(n for n in self.trained if torch.equal(self._values[n], origin[n].flatten()))
        if self.has_masters or not still or len(still) == len(self.trained):
            return None  # masters move in finer steps; where nothing moves, that is said already
        if rounded := [name for name in still if name in self._given]:
            self.notes.append(
                f"{families(rounded)} gets a gradient and stands still to the bit: its learning "
                "rate is zero, or its updates are too small for its dtype"
            )
        still = [name for name in still if name not in self._given]
        if not still:
            return None
        return self._culprit(
            Subject.PARAMETERS, "not updated on one device either", families(still),
            "It gets a gradient in the reference and in the loop, and no update moves it: give it "
            "to the optimizer, or freeze it (requires_grad_(False)).",
            f"its value is the same to the bit after {len(self.steps)} steps",
        )  # fmt: skip

    def _stalled(self) -> Culprit | None:
        """The last steps have gradients and move nothing."""
        count = 0
        for had_gradient, moved in reversed(self.steps):
            if moved or not had_gradient:
                break
            count += 1
        if count < _STILL or count == len(self.steps):
            return None
        first = len(self.steps) - count
        return self._culprit(
            Subject.LEARNING_RATE, "no update on one device either", "all parameters",
            f"From step {first} on nothing moves any parameter, though each has a gradient: the "
            "learning rate is zero, or an update is too small for the dtype of the parameters.",
            f"the last {count} steps leave every value the same to the bit", first,
        )  # fmt: skip

    def _emptied(self) -> Culprit | None:
        """In every step but the first."""
        names = sorted(n for n, times in self.emptied.items() if times == len(self.steps) - 1 > 1)
        if not names:
            return None
        return self._culprit(
            Subject.OPTIMIZER, "emptied in every step, on one device too", families(names),
            "The optimizer begins every step without what it kept of the step before (moments, "
            "step counters): it is made anew, or its state is emptied, in every step.",
            "when it steps there is no state of a parameter that it has updated before",
        )  # fmt: skip

    def _copies(self, origin: Mapping[str, Tensor]) -> Culprit | None:
        """Matrices that moved, and whose rows are all the same nevertheless."""
        alike = sorted(
            name
            for name, shape in self._shapes.items()
            if len(shape) >= 2 and shape[0] >= 2 and shape.numel() and name in self.trained
            and not torch.equal(self._values[name], origin[name].flatten())
            and _has_equal_rows(self._values[name], shape)
        )  # fmt: skip
        if not alike:
            return None
        return self._culprit(
            Subject.PARAMETERS, "units that are copies of each other", families(alike),
            "All rows are the same after updates, as they were made alike (zeros, one value): they "
            "get the same gradient and will never differ. Draw them (nn.init).",
            f"the rows are the same to the bit after {len(self.steps)} steps",
        )  # fmt: skip

    def _culprit(
        self, state: Subject, factor: str, place: str, sentence: str, tried: str,
        step: int | None = None,
    ) -> Culprit:  # fmt: skip
        """Without a `step` it is the last that ran that shows it."""
        shown = len(self.steps) - 1 if step is None else step
        return of_both_sides(
            state, factor, place, sentence, tried, num_ranks=self.num_ranks, step=shown
        )


def _has_equal_rows(values: Tensor, shape: torch.Size) -> bool:
    rows = values.view(shape)
    return bool((rows == rows[:1]).all())
