"""Rerun the micro-batch that differs with one thing changed, and compare the effect of the change
on a module's output or gradient with the ranks' values.

The gradient of the logits shows which targets a loss was computed with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from ptrain.axes.context.attention import Span
from ptrain.interpreter.program import Program
from ptrain.models.attention import Core
from ptrain.models.objective import IGNORED, SampleBatch, TokenPair
from ptrain.report.finding import Mismatch, Moment, RootCause, Subject
from ptrain.spec.placement import TOKEN_AXES, Axis
from ptrain.verification.capture import Outputs, as_held, clipped_by, watched
from ptrain.verification.evidence import Evidence
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.metamorphic import targets_of
from ptrain.verification.jobs.root_causes import root_cause
from ptrain.verification.jobs.shards import ParameterShard, numbered
from ptrain.verification.parts import Magnitude, TensorBox, difference, held, part_of, relative
from ptrain.verification.places import TokensOfRank, coordinates, data_place, line
from ptrain.verification.reference import MicroBatch, ReferenceTraining

EXACT = 1e-6  # a relative residual below which a cause explains what was found


class Investigation:
    """`found` by all ranks, in the order of time; the first counts, and `one` is explained. All
    ranks look at it together: methods that gather are called by all."""

    def __init__(
        self,
        mismatches: Sequence[Mismatch],
        evidence: Evidence | None,
        sides: tuple[Program, ReferenceTraining],
        ranks: Ranks,
    ) -> None:
        self.found = mismatches
        self.first = self.one = mismatches[0]
        self.program, self.reference = sides
        self.spec = self.reference.spec
        self.ranks, self.rank = ranks, ranks.rank
        self._evidence = evidence

    @property
    def evidence(self) -> Evidence:
        assert self._evidence is not None, "a step was run"
        return self._evidence

    @property
    def clipped_by(self) -> float:
        """Return what clipping multiplied this rank's gradients by."""
        return clipped_by(self.spec, self.evidence.seen.norm)

    @property
    def has_evidence(self) -> bool:
        return self._evidence is not None

    def root_cause(
        self,
        axis: str | None,
        factor: str,
        sentence: str,
        *,
        place: str = "",
        tried: str = "",
    ) -> RootCause:
        """Return the root cause of what is explained; `place` where it is not where that is.
        Without an `axis` it is the one that parts the ranks where it differs from the others."""
        one, ranks = self.one, self.blamed(self.one)
        axis = self.axis_of(ranks) if axis is None else axis
        return root_cause(
            [one], self.ranks, state=one.subject, axis=axis, factor=factor, sentence=sentence,
            names=[place or one.place], who=ranks, tried=tried,
        )  # fmt: skip

    def about(self, one: Mismatch) -> Investigation:
        """Return the same, to explain this mismatch, which tells more of the first."""
        other = copy(self)
        other.one = one
        return other

    def blamed(self, one: Mismatch) -> tuple[int, ...]:
        """Return the ranks where the same thing differs; of gradients anything, for a rank may have
        nothing of the first tensor that is not zero."""
        if one.subject is not Subject.GRADIENTS:
            return self.ranks_of(one)
        return tuple(sorted({mismatch.rank for mismatch in self.at(one.moment, one.subject)}))

    def ranks_of(self, one: Mismatch) -> tuple[int, ...]:
        """Return the ranks where the same thing differs at the same moment."""
        alike = (one.step, one.moment, one.subject, one.name)
        differing = (its for its in self.found if (*its.when, its.subject, its.name) == alike)
        return tuple(sorted({mismatch.rank for mismatch in differing}))

    def by_all(self, everyone: Sequence[object], one: Mismatch | None = None) -> bool:
        """Return whether each rank where this differs (without one the first) says something."""
        return all(bool(everyone[rank]) for rank in self.ranks_of(one or self.first))

    def elected(self, votes: Sequence[Any]) -> tuple[Any, bool] | None:
        """Return what most of all ranks' votes are for, and whether each rank where the first
        mismatch is has one; None where nobody has. Collective."""
        everyone = self.ranks.gather(list(votes))
        known = {str(vote): vote for its in everyone for vote in its}
        counts = Counter(str(vote) for its in everyone for vote in its)
        return (known[counts.most_common(1)[0][0]], self.by_all(everyone)) if known else None

    def boxes(self, own: Mapping[str, TensorBox]) -> dict[str, dict[int, TensorBox]]:
        """Return by name and rank which part of a tensor every rank has. Collective."""
        boxes: dict[str, dict[int, TensorBox]] = {}
        for rank, its in enumerate(self.ranks.gather(own, dict[str, TensorBox])):
            for name, box in its.items():
                boxes.setdefault(name, {})[rank] = box
        return boxes

    def at(self, moment: Moment, subject: Subject | None = None) -> list[Mismatch]:
        """Return the mismatches of the first mismatch's step."""
        return [
            mismatch
            for mismatch in self.found
            if mismatch.step == self.first.step
            and mismatch.moment is moment
            and subject in (None, mismatch.subject)
        ]

    @property
    def degrees(self) -> dict[str, int]:
        """Return what a factor may come from: the degrees of the mesh and the number of
        micro-batches."""
        degrees = {str(factor.axis): factor.degree for factor in self.spec.factors}
        return {**degrees, "K": self.spec.batch.accumulate}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Innermost first: where a rank's neighbours are."""
        return tuple(factor.axis for factor in reversed(self.spec.factors))

    @property
    def token_axis(self) -> str:
        """The axis along which ranks have other tokens of the same samples; "" without one."""
        return next((str(axis) for axis in self.axes if axis in TOKEN_AXES), "")

    def line(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        return line(self.spec, rank, *axes)

    def axis_of(self, ranks: Iterable[int]) -> str:
        """The axis along which some of a rank's neighbours are among `ranks` and others are not:
        the data axes first, whose ranks have most in common; "" where all ranks are."""
        order = sorted(self.axes, key=lambda axis: axis not in (Axis.DP_REPLICATE, Axis.DP_SHARD))
        return self.ranks.parting(ranks, map(str, order))

    def place(self, rank: int) -> dict[Axis, int]:
        return coordinates(self.spec, rank)

    def as_held(
        self, path: str, whole: torch.Tensor, spans: Sequence[Span] | None = None
    ) -> torch.Tensor:
        """Return what a module of one device gives, as this rank holds it: its tokens, or those in
        `spans`."""
        tokens = TokensOfRank(self.spec, self.rank, spans)
        return as_held(self.program, path, whole, tokens)

    def own_micro_batches(self, place: int | None = None) -> Iterator[MicroBatch]:
        """Yield one device's micro-batches of this rank's share of the batch, or of the one at a
        place."""
        index = data_place(self.spec, self.rank) if place is None else place
        return self.reference.micro_batches_of(index, self.evidence.step)

    def own_part(self, tensor: torch.Tensor, whole: torch.Tensor) -> TensorBox | None:
        return part_of(
            tensor,
            whole.shape,
            degree=self.spec.degree(Axis.TP),
            place=self.place(self.rank).get(Axis.TP, 0),
        )

    def shard(self, name: str, tensor: torch.Tensor, whole: torch.Tensor) -> ParameterShard | None:
        """Return which elements of a whole parameter this rank has; None where nothing tells."""
        part = self.own_part(tensor, whole)
        if part is None:
            return None
        at = part.of(numbered(whole.shape)).flatten()
        is_whole = at.numel() == whole.numel()
        return ParameterShard(name, held(tensor), whole.shape, None if is_whole else at)


SUM_ONCE = "Sum each sample's gradient once, and divide by the global number of tokens."
LIKE_ROUNDINGS = "the difference is as large and as even as such roundings"
_SHARE = 0.1  # of what differs, that a cause may leave
# A parameter's name, one device's gradient of it, and which part of that this rank has, to this
# part as the cause makes it.
Hypothesis: TypeAlias = "Callable[[str, Tensor, TensorBox], Tensor]"


def own_part_of(scene: Investigation, name: str) -> tuple[Tensor, Tensor, TensorBox] | None:
    """This rank's part of a gradient, that of the reference, and where it is."""
    evidence = scene.evidence
    tensor = evidence.seen.gradients.get(name)
    whole = evidence.expected.gradients.get(name)
    if tensor is None or whole is None:
        return None
    part = scene.own_part(tensor, whole)
    if part is None or not held(tensor).numel():
        return None
    return held(tensor), part.of(whole), part


def chosen(scene: Investigation, names: Iterable[str], least: int) -> str:
    """The smallest parameter of which every rank has at least so many elements, else the largest;
    chosen by the first mismatch's kind of tensor, so that it is one that differs."""
    known = [name for name in names if name in scene.evidence.expected.gradients]
    sizes = {name: scene.evidence.expected.gradients[name].numel() for name in known}
    enough = [name for name in known if sizes[name] >= least * scene.spec.world_size]
    if enough:
        return min(enough, key=lambda name: sizes[name])
    return max(known, key=lambda name: sizes[name])


def proven(
    scene: Investigation, cause: RootCause, words: str, hypothesis: Hypothesis
) -> RootCause | None:
    """Return the cause, proven, where it makes of one device's gradients those that the program's
    optimizers took, all of them, on all ranks; None where it does not. Collective."""
    truths = scene.evidence.expected.gradients
    scale = Magnitude.of(truths)
    left, mismatch = 0.0, 0.0
    for name, whole in truths.items():
        if (pair := own_part_of(scene, name)) is None:
            continue
        own, expected, part = pair
        length = scale.length(whole, expected)
        left = max(left, difference(own, hypothesis(name, whole, part), length))
        mismatch = max(mismatch, difference(own, expected, length))
    lefts, mismatches = zip(*scene.ranks.gather([left, mismatch]), strict=True)
    if max(lefts) > min(EXACT, _SHARE * max(mismatches)):
        return None
    count = len(truths)
    whose = f"all {count} gradients" if count > 1 else "the gradient"
    tried = (
        f"the reference with {words} reproduces {whose} that the optimizers take, to "
        f"{max(lefts):.1e}"
    )
    return cause.proven(tried)


def instead(rows: Mapping[str, Tensor]) -> Hypothesis:
    """Return what makes these whole gradients in the place of one device's."""

    def hypothesis(name: str, whole: Tensor, part: TensorBox) -> Tensor:
        return part.of(rows.get(name, whole))

    return hypothesis


def directly(cause: RootCause, words: str, *, by_all: bool) -> RootCause:
    """Return the cause, proven where all ranks that differ say the same of it."""
    return cause.proven(words) if by_all else replace(cause, tried=f"on some ranks only: {words}")


Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values: [samples, heads, tokens, features]


def output_with(scene: Investigation, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the whole output of the differing module, with these in the place of the model's
    parameters and buffers."""
    path, k = scene.first.name, scene.first.index
    outputs, module = Outputs(), scene.reference.module
    for micro_batch in _departing(scene):
        named = iter([(path, module.get_submodule(path))])
        with torch.no_grad(), watched(named, outputs, lambda: k):
            functional_call(module, dict(tensors), (micro_batch.samples.inputs,))
    return outputs.forward.get((path, k))


def gradient_with(
    scene: Investigation, path: str, attend: Callable[[Core, Heads, Tensor | None], Tensor]
) -> Tensor | None:
    """Return the whole gradient of the differing module's output, with another computation in the
    core `path`."""
    first, module, outputs = scene.first, scene.reference.module, Outputs()
    objective, scale = scene.reference.objective, scene.reference.updater.scale
    core = module.get_submodule(path)

    def instead(core: Any, args: tuple[Any, ...], _: Tensor) -> Tensor:
        return attend(core, args[:3], _mask(args))

    with ExitStack() as hooks:
        hooks.callback(core.register_forward_hook(instead).remove)
        named = iter([(first.name, module.get_submodule(first.name))])
        hooks.enter_context(watched(named, outputs, lambda: first.index))
        for micro_batch in _departing(scene):
            loss = micro_batch.loss(objective, module) * scale
            parameters = [tensor for tensor in module.parameters() if tensor.requires_grad]
            torch.autograd.grad(loss, parameters, allow_unused=True)
    return outputs.backward.get((first.name, first.index))


def inputs_of(scene: Investigation, path: str) -> tuple[Heads, Tensor | None]:
    """Return what the core `path` attends with on one device, and its mask."""
    args, _ = call_of(scene, path)
    return args[:3], _mask(args)


def call_of(
    scene: Investigation, path: str, at: tuple[int, int] | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Return what a module of one device is given in the differing micro-batch, at its first call,
    and what it returns; or in that of another share of the batch and another number, `at`."""
    module, calls = scene.reference.module, []

    def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append((args, output))

    _run(scene, module.get_submodule(path).register_forward_hook(keep), at)
    return calls[0]


def _run(scene: Investigation, watch: RemovableHandle, at: tuple[int, int] | None = None) -> None:
    """Run the differing micro-batch, or that `at` another place, forward on one device, under a
    hook that is removed then."""
    try:
        with torch.no_grad():
            for micro_batch in _departing(scene, at):
                scene.reference.module(micro_batch.samples.inputs)
    finally:
        watch.remove()


def core_of(scene: Investigation) -> str:
    """Return the path of the core that the differing module is, or that stands beside it; "" where
    there is none."""
    module, path = scene.reference.module, scene.first.name
    if isinstance(module.get_submodule(path), Core):
        return path
    parent = path.rpartition(".")[0]
    cores = (
        f"{parent}.{name}"
        for name, child in module.get_submodule(parent).named_children()
        if isinstance(child, Core)
    )
    return next(cores, "")


def _departing(scene: Investigation, at: tuple[int, int] | None = None) -> Iterator[MicroBatch]:
    """Yield the one in which this rank differs, or the one `at` a share of the batch and number."""
    place, number = at or (None, scene.first.index)
    yield from (its for its in scene.own_micro_batches(place) if its.k == number)


def _mask(args: tuple[Any, ...]) -> Tensor | None:
    return args[3] if len(args) > 3 else None


_MOST = 0.99  # of the tokens that agree, where the ends of rows may not


def targets_cause(scene: Investigation) -> RootCause | None:
    """The logits are right and the loss is not: it has other targets. Collective."""
    answers = scene.ranks.gather(next(_said(scene), ["", True]))
    everyone = [targets for targets, _ in answers]
    counts = Counter(answer for answer in everyone if answer)
    if not counts:
        return None
    targets = counts.most_common(1)[0][0]
    ranks = [rank for rank, answer in enumerate(everyone) if answer == targets]
    sentence = f"The logits are right, but the loss compares them with {targets}. Check the loader."
    lacking = [rank for rank, answer in enumerate(everyone) if answer not in ("", targets)]
    cause = scene.root_cause(scene.axis_of(ranks), targets, sentence, place="loss")
    if not all(is_made for _, is_made in answers):
        tried = "the gradient of the logits shows that nearly all positions have these targets"
        return replace(cause, tried=tried)
    tried = "with these targets, the loss of the reference logits has the gradient on the ranks"
    return directly(cause, tried, by_all=not lacking)


def _said(scene: Investigation) -> Iterator[list[Any]]:
    """Yield which targets the loss had, and whether one device's loss of these has the gradient
    that is there."""
    wanted = _targets(scene)
    for (path, k), whole in scene.evidence.expected.outputs.forward.items():
        gradient = scene.evidence.seen.outputs.backward.get((path, k))
        vocabulary = scene.spec.model.vocabulary[0]
        if gradient is None or whole.shape[-1] != vocabulary or k not in wanted:
            continue
        own = held(gradient)
        if own.shape == whole.shape:
            _, used = targets_of(own)
            for targets in _other(used, wanted, k):
                labels = used.where(wanted[k] != IGNORED, wanted[k])
                yield [targets, _is_made(scene, k, (whole, own), labels)]


def _is_made(scene: Investigation, k: int, sides: tuple[Tensor, Tensor], labels: Tensor) -> bool:
    """Return whether the loss of one device's logits with these labels has the gradient that is
    there. `sides`: these logits, and that gradient, of this rank's tokens."""
    (micro_batch,) = (its for its in scene.own_micro_batches() if its.k == k)
    inputs, _ = micro_batch.samples.data
    own = TokensOfRank(scene.spec, scene.rank)
    samples = SampleBatch(TokenPair(own.of_output(inputs), labels))
    objective, logits = scene.reference.objective, sides[0].detach().requires_grad_()
    loss = objective.of(logits, samples) / objective.divisor(micro_batch.batch, samples)
    (gradient,) = torch.autograd.grad(loss * scene.evidence.scale, [logits])
    return relative(sides[1], gradient) <= EXACT


def _targets(scene: Investigation) -> dict[int, Tensor]:
    """Return the targets of this rank's tokens, by micro-batch."""
    own = TokensOfRank(scene.spec, scene.rank)
    return {its.k: own.of_output(its.samples.targets) for its in scene.own_micro_batches()}


def _other(used: Tensor, wanted: dict[int, Tensor], k: int) -> Iterator[str]:
    """What `used` are, if not those of micro-batch k."""
    if _same(used, wanted[k]):
        return
    for other, targets in wanted.items():
        if other != k and _same(used, targets):
            yield f"targets of micro-batch {other} for {k}"
    for by in range(1, used.shape[1] // 2):
        if _same(used[:, :-by], wanted[k][:, by:]):
            yield f"targets shifted {by} too far"
        if _same(used[:, by:], wanted[k][:, :-by]):
            yield f"targets shifted {by} too little"


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one == other).double().mean()) >= _MOST
