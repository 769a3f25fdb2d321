"""What the host takes around the operators of a step, of the models of `test_clock`: an operator of
each block, and of both ends, in each pass."""

from __future__ import annotations

from dataclasses import replace

from ptrain.spec.activations import SELECTIVE, Kept
from ptrain.spec.rates import Hook
from ptrain.spec.spec import ActivationSpec
from tests.pure.paces import HandPace
from tests.pure.test_clock import BLOCKS, COMPUTED, spec, step


def test_what_the_host_takes_around_operators_is_computed_on_its_own_cores_and_hidden_on_a_gpu():
    hooks = {Hook.FORWARD_OPERATOR: 3.0, Hook.BACKWARD_OPERATOR: 5.0}
    passes = BLOCKS + 2
    more = HandPace(overlaps=False, hooks=hooks)
    without = step(spec(), replace(more, hooks={}))
    assert step(spec(), more).seconds - without.seconds == passes * (3 + 5)
    assert step(spec(), replace(more, overlaps=True)).seconds == step(spec(), HandPace()).seconds


def test_the_host_takes_longer_around_operators_of_layers_that_are_kept_otherwise():
    hooks = {Hook.FORWARD_OPERATOR: 3.0, Hook.BACKWARD_OPERATOR: 5.0, Hook.SELECTED_OPERATOR: 11.0}
    pace = HandPace(overlaps=False, hooks=hooks)
    selected = spec(activations=ActivationSpec(default=Kept(policy=SELECTIVE)))
    ends = 2 * (3 + 5)
    assert step(selected, pace).seconds == COMPUTED + BLOCKS * 2 * 11 + ends
