"""G of one flat unit in closed form: the device's bytes at every moment of one backward pass, and
what remains to be done with it for the update.

What the modes mean: while a micro-batch's backward fills it, G is whole, in the dtype of the
reduction. Where it is cut it is then reduced to a shard, the whole goes, and the shard is kept (or
added to what is kept) in the dtype of G, on G's tier. Where it is not cut the whole is what is
kept, unless G lives on another tier or a layout keeps the sum beside the parts.
A reduce-scatter has its whole input and its output at once, a copy of the input where the shards do
not lie in the order of the group, and one more as an exchange of parts (torch-facts A0.1: gloo's
own is an all-reduce; the substitute receives all parts and adds them up).
"""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.spec.dials import GradientSync, ReduceScatterVia
from ptrain.spec.placement import Tier, exclude_axes
from ptrain.spec.precision import DType, Layout
from ptrain.steps.wraps import FlatUnits
from tests.oracles.data.buffer import Axes, Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Device bytes of one unit's G: `before` its backward, `opened` for gradients to be added to,
    `reducing` at the reduction's fullest, `flying` from then on until it is awaited, `keeping`
    while its result is put where it is kept, and `after` that. `is_anew`: gradients are written,
    and not added to those of the micro-batch before."""

    before: int
    opened: int
    reducing: int
    flying: int
    keeping: int
    after: int
    is_anew: bool


@dataclass(frozen=True, slots=True)
class GradientsForm:
    """The gradients of a unit with this buffer in every step of this kind."""

    step: FlatUnits
    layout: Layout
    buffer: Buffer

    @property
    def is_on_device(self) -> bool:
        return self.step.gradients_tier is Tier.DEVICE

    @property
    def overlaps(self) -> bool:
        """Return True if a reduction overlaps with the backward pass; consumed gradients wait for
        it."""
        return self.step.overlaps and not self.step.consumed

    def reduction(self, cut: Axes, over: Axes, dtype: DType) -> int:
        """Return the bytes of a reduce-scatter of a shard over `cut`, without that shard."""
        buffer, itemsize = self.buffer, dtype.itemsize
        exchange = self.step.reduce_scatter is ReduceScatterVia.ALL_TO_ALL
        copies = buffer.permuted(cut, over) + exchange * buffer.shard(cut)
        return (buffer.shard((*cut, *over)) + copies) * itemsize

    def moments(self, *, is_first: bool, is_last: bool) -> Moments:
        """Return the bytes at the moments of the first, the last, or another micro-batch."""
        if self.step.gradients:
            return self._cut(is_first=is_first, is_last=is_last)
        return self._whole(is_first=is_first, is_last=is_last)

    def _cut(self, *, is_first: bool, is_last: bool) -> Moments:
        step, layout = self.step, self.layout
        whole = self.buffer.padded * layout.reduced.itemsize
        part = self.buffer.shard(step.gradients) * layout.reduced.itemsize
        summed = self.buffer.shard(step.gradients) * layout.gradients.itemsize
        kept = summed * self.is_on_device + part * layout.keeps_both
        reduces_always = step.sync.gradients is GradientSync.EVERY
        if not reduces_always and not is_first:
            before = opened = whole
        else:
            before = 0 if is_first else kept
            opened = before + whole
        if not reduces_always and not is_last:
            after = dict.fromkeys(("reducing", "flying", "keeping", "after"), opened)
            return Moments(before=before, opened=opened, **after, is_anew=is_first)
        is_cast = layout.reduced is not layout.gradients
        is_new = is_first or not reduces_always
        copied = is_cast or layout.keeps_both if self.is_on_device else is_cast
        makes = copied and (is_new or not self.is_on_device)
        reducing = opened + self.reduction((), step.gradients, layout.reduced)
        return Moments(
            before=before,
            opened=opened,
            reducing=reducing,
            flying=reducing if self.overlaps else kept,
            keeping=opened - whole + part + makes * summed,
            after=kept,
            is_anew=is_first or reduces_always,
        )

    def _whole(self, *, is_first: bool, is_last: bool) -> Moments:
        step, layout = self.step, self.layout
        whole = self.buffer.padded * layout.reduced.itemsize
        summed = self.buffer.padded * layout.gradients.itemsize
        stays = whole * (layout.keeps_both or self.is_on_device)
        kept = stays + summed * (layout.keeps_both and self.is_on_device)
        before = 0 if is_first else kept
        opened = before + whole - (0 if is_first else stays)
        is_cast = layout.reduced is not layout.gradients
        makes = is_first and layout.keeps_both if self.is_on_device else is_cast
        summing = opened + makes * summed
        is_anew = is_first or layout.keeps_both or not self.is_on_device
        if not (is_last and self.starts_the_update and step.updated):
            return Moments(
                before=before,
                opened=opened,
                reducing=summing,
                flying=kept,
                keeping=kept,
                after=kept,
                is_anew=is_anew,
            )
        flying = kept + self.reduction((), step.updated, self.held)
        part = self.buffer.shard(step.updated) * self.held.itemsize
        return Moments(
            before=before,
            opened=opened,
            reducing=max(summing, flying),
            flying=flying,
            keeping=kept + part,
            after=part + whole * layout.keeps_both,
            is_anew=is_anew,
        )

    @property
    def starts_the_update(self) -> bool:
        """Return True if the update's reduction starts during the last backward pass: with overlap,
        if nothing is reduced for storage."""
        return self.overlaps and not self.step.gradients and self.is_on_device

    @property
    def is_summed(self) -> bool:
        """Return True if the stored gradients are a separate tensor from the buffer that backward
        fills."""
        return bool(self.step.gradients) or self.layout.keeps_both or not self.is_on_device

    @property
    def held(self) -> DType:
        """Return the dtype of the gradients at the update."""
        return self.layout.gradients if self.is_summed else self.layout.reduced

    def preparation(self) -> Preparation:
        """Return the steps from the gradients after backward to those of the update."""
        step = self.step
        now, partial = step.gradients, exclude_axes(step.axes, (*step.updated, *step.gradients))
        early: Axes = ()
        if self.starts_the_update:
            now = early = step.updated
            partial = partial if step.updated else ()
        narrower = exclude_axes(step.updated, now)
        wider = exclude_axes(now, (*step.updated, *step.gathered_gradients))
        return Preparation(
            gradients=self,
            now=now,
            narrower=narrower,
            partial=partial,
            wider=wider,
            is_whole=not self.is_summed and not early,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """G comes cut along `now`, is reduced along `narrower`, all-reduced along `partial` and
    gathered along `wider`; off the device it goes there and back for that. `is_whole`: it is still
    the tensor that backward filled, and goes as soon as its part is there."""

    gradients: GradientsForm
    now: Axes
    narrower: Axes
    partial: Axes
    wider: Axes
    is_whole: bool

    @property
    def travels(self) -> bool:
        needs_device = bool(self.narrower or self.partial or self.wider)
        return needs_device and not self.gradients.is_on_device

    @property
    def narrow(self) -> Axes:
        """Return the axes that shard the gradients after the reduction."""
        return (*self.now, *self.narrower)

    @property
    def final(self) -> Axes:
        """Return the axes that shard the prepared gradients."""
        return exclude_axes(self.narrow, self.wider)

    def bytes(self, cut: Axes) -> int:
        """Return the bytes of gradients sharded along these axes, in their initial dtype."""
        return self.gradients.buffer.shard(cut) * self.gradients.held.itemsize

    @property
    def after(self) -> int:
        """Return the device bytes of the prepared gradients."""
        gradients = self.gradients
        ready = gradients.buffer.shard(self.final) * gradients.layout.gradients.itemsize
        return ready * gradients.is_on_device

    @property
    def peak(self) -> int:
        """Return the device bytes at the peak, including the initial gradients, after the layout's
        second copy is freed: stored gradients stay until the new ones are ready."""
        gradients = self.gradients
        if not (gradients.is_on_device or self.travels):
            return 0
        comes, narrow = self.bytes(self.now), self.bytes(self.narrow)
        stays = 0 if self.is_whole or self.travels else comes
        moments = [comes]
        if self.narrower:
            moments.append(comes + gradients.reduction(self.now, self.narrower, gradients.held))
            moments.append(stays + narrow)
        # the stored gradients themselves are gathered or cast, or a separate reduced shard
        current = stays + narrow if self.narrower or not stays else stays
        if self.wider:
            copy = gradients.buffer.permuted(self.final, self.wider) * gradients.held.itemsize
            moments.append(current + self.bytes(self.final) + copy)
            current = stays + self.bytes(self.final)
        if gradients.held is not gradients.layout.gradients:
            itemsize = gradients.layout.gradients.itemsize
            moments.append(current + gradients.buffer.shard(self.final) * itemsize)
        return max(moments)
