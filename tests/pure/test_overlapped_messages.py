"""Messages that overlap with operators of a pass: transfer time and exposed time."""

from __future__ import annotations

import pytest

from ptrain.cost import Collective, Spent
from ptrain.derivation.clock import Clock, messages_of
from ptrain.derivation.interconnect import Network
from ptrain.facts.model import InnerCollective, PassWork
from ptrain.spec.cluster import Hook
from ptrain.spec.placement import Axis
from tests.pure.build import make_spec, tuple_of
from tests.pure.hand_made_paces import HandPace, seconds

PACE = HandPace(sent=1.0)


def hop(payload: int, beside: int) -> InnerCollective:
    return InnerCollective(Collective.SEND, payload, axis="cp", beside=beside)


def waits(work: PassWork) -> list[tuple[float, float]]:
    played = messages_of(work, PACE.operator_seconds, lambda item: float(item.payload))
    return [(message.moving, message.waited) for _, message in played]


def test_a_message_shorter_than_its_product_is_overlapped():
    assert waits((hop(6, 1), *seconds(10), *seconds(4))) == [(6.0, 0.0)]


def test_of_a_longer_message_the_rest_is_awaited():
    assert waits((hop(13, 1), *seconds(10), *seconds(4))) == [(13.0, 3.0)]


def test_a_message_without_overlapping_work_is_awaited_at_once():
    assert waits((hop(6, 0), *seconds(10))) == []


def test_messages_over_one_axis_follow_each_other():
    # both set out at 0: the second arrives at 10, when 4 seconds of operators are over
    assert waits((hop(4, 2), hop(6, 1), *seconds(4))) == [(4.0, 0.0), (6.0, 6.0)]


def test_a_late_wait_is_shorter():
    # the first makes the rank wait until 8, so that the second one's product ends at 18
    work = (hop(8, 1), *seconds(2), hop(4, 1), *seconds(10))
    assert waits(work) == [(8.0, 6.0), (4.0, 0.0)]


def clock(**pace: object) -> Clock:
    spec = make_spec({Axis.CP: (4, tuple_of("R,R,R,S"))})
    return Clock(HandPace(sent=1.0, **pace), Network(spec))


def exposed_and_transfer(clock: Clock) -> tuple[float, float]:
    (row,) = (row for row in clock.step_time().rows if row.key.spent is Spent.COLLECTIVES)
    assert row.key.axes == ("cp",) and row.key.collective is Collective.SEND
    return row.seconds, row.moving


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_clock_counts_all_traffic_and_waits_for_exposed_traffic(share: float):
    timed = clock()
    work = timed.pass_seconds((hop(13, 1), *seconds(10)), Hook.FORWARD_OPERATOR)
    timed.compute(work, share)
    assert exposed_and_transfer(timed) == (share * 3.0, share * 13.0)
    assert timed.now == share * 13.0


def test_cores_that_compute_and_send_hide_nothing():
    timed = clock(overlaps=False)
    timed.compute(timed.pass_seconds((hop(6, 1), *seconds(10)), Hook.FORWARD_OPERATOR))
    assert exposed_and_transfer(timed) == (6.0, 6.0)


def test_hops_that_products_hide_one_after_the_other_leave_nothing_to_wait_for():
    timed = clock()
    ring = (hop(6, 1), *seconds(10), hop(6, 1), *seconds(10), *seconds(10))
    timed.compute(timed.pass_seconds(ring, Hook.FORWARD_OPERATOR))
    assert exposed_and_transfer(timed) == (0.0, 12.0)


@pytest.mark.parametrize(("held_up", "waited"), [(3, 0.0), (4, 0.0), (7, 3.0), (30, 12.0)])
def test_earlier_transfers_delay_messages_by_their_missing_slack(held_up: int, waited: float):
    timed = clock()
    timed.send_payload(Collective.ALL_REDUCE, (Axis.CP,), held_up)
    ring = (hop(6, 1), *seconds(10), hop(6, 1), *seconds(10), *seconds(10))
    timed.compute(timed.pass_seconds(ring, Hook.FORWARD_OPERATOR))
    rows = {row.key.collective: row for row in timed.step_time().rows}
    assert rows[Collective.SEND].seconds == waited


def test_consecutive_passes_take_compute_plus_exposed_time():
    exchange = InnerCollective(Collective.ALL_TO_ALL, 5, axis="cp", ranks=2)
    work = (exchange, hop(13, 1), *seconds(10))
    for overlaps, waited in ((True, 3.0), (False, 13.0)):
        timed = clock(overlaps=overlaps)
        taken = timed.pass_seconds(work, Hook.FORWARD_OPERATOR).in_a_row(timed.pace)
        assert taken == 10.0 + 5.0 + waited
