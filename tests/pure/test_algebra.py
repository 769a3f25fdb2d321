"""Laws of the product of placements (Definition 5)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ptrain.cost import PLACED, State
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.derivation.ghosts.wrapping import by_shard
from ptrain.derivation.paper import IDENTITY, Product, compose, compose_factors, factor_product
from ptrain.plan.lower import lower
from ptrain.spec.placement import MODES, Axis, Distribution, Factor, Mode, Placement, S, Tier
from tests.pure.build import GATHERED, ZERO_1, ZERO_2, make_facts, make_spec, tuple_of

modes = st.sampled_from(MODES)
placements = st.builds(
    Placement, parameters=modes, optimizer=modes, gradients=modes, activations=modes
)
degrees = st.integers(min_value=1, max_value=12)
factors = st.builds(Factor, axis=st.sampled_from(list(Axis)), degree=degrees, placement=placements)
products = st.lists(factors, max_size=4).map(compose_factors)
sizes = st.integers(min_value=0, max_value=10**12)


@given(products, products)
def test_a_product_of_products_is_a_product(inner: Product, outer: Product):
    both = compose(inner, outer)
    assert both.ranks == inner.ranks * outer.ranks
    for state in PLACED:
        assert both[state].parts * both[state].copies == both.ranks


@given(factors, products)
def test_an_axis_of_degree_1_is_the_identity(factor: Factor, other: Product):
    alone = factor_product(factor._replace(degree=1))
    assert alone == IDENTITY
    assert compose(alone, other) == other == compose(other, alone)


@given(products, products, products)
def test_the_product_is_associative(a: Product, b: Product, c: Product):
    assert compose(compose(a, b), c) == compose(a, compose(b, c))


@given(modes, modes, st.integers(min_value=2, max_value=12))
def test_each_mode_gathers_materializes_and_offloads_as_defined(a, b, degree):
    """Definition 2: S and S* shard, S* gathers, M materializes; of two tiers the more distant one
    counts."""

    def over(axis: Axis, mode: Mode) -> Factor:
        every = Placement(parameters=mode, optimizer=mode, gradients=mode, activations=mode)
        return Factor(axis=axis, degree=degree, placement=every)

    both = (a.distribution, b.distribution)
    cut = sum(each in (Distribution.SHARDED, Distribution.GATHERED) for each in both)
    made = Distribution.MATERIALIZED
    tiers = [mode.tier for mode in (a, b) if mode.distribution is not made]
    placed = compose_factors((over(Axis.DP_REPLICATE, a), over(Axis.DP_SHARD, b)))
    for share in (placed[state] for state in PLACED):
        assert (share.parts, share.copies) == (degree**cut, degree ** (2 - cut))
        assert share.is_gathered is (Distribution.GATHERED in both)
        assert share.is_materialized is (made in both)
        assert share.needs_unit is (made in both or Distribution.GATHERED in both)
        furthest = next((t for t in (Tier.FILE, Tier.HOST) if t in tiers), Tier.DEVICE)
        assert share.tier is furthest
        size = 0 if made in both else -(-1000 // degree**cut)
        assert [share.bytes_on_tier(tier, 1000) for tier in Tier] == [
            size * (t is furthest) for t in Tier
        ]


@given(degrees, degrees)
def test_s_over_a_then_over_b_is_s_over_a_times_b(a: int, b: int):
    every = Placement(parameters=S, optimizer=S, gradients=S, activations=S)

    def over(degree: int, axis: Axis) -> Factor:
        return Factor(axis=axis, degree=degree, placement=every)

    assert compose_factors((over(a, Axis.DP_REPLICATE), over(b, Axis.DP_SHARD))) == factor_product(
        over(a * b, Axis.DP_SHARD)
    )


@given(placements, degrees, st.integers(min_value=1, max_value=6), sizes)
def test_memory_falls_when_a_degree_grows_by_a_factor(
    placement: Placement, degree: int, times: int, size: int
):
    def stored(ranks: int) -> list[int]:
        placed = factor_product(Factor(axis=Axis.DP_SHARD, degree=ranks, placement=placement))
        return [placed[state].stored_bytes(size) for state in PLACED]

    if degree > 1:
        pairs = zip(stored(degree), stored(degree * times), strict=True)
        assert all(after <= before for before, after in pairs)


@given(
    st.sampled_from([ZERO_1, ZERO_2, GATHERED, tuple_of("S*,R,S"), tuple_of("R,S,S")]),
    st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=6),
    st.integers(min_value=2, max_value=16),
    st.integers(min_value=1, max_value=4),
)
def test_exact_memory_falls_with_the_degree_up_to_padding(
    placement: Placement, rows: list[int], degree: int, times: int
):
    facts = make_facts(tuple((size, 3) for size in rows))
    # a row of each tensor, or what fills up a flat buffer kept whole
    padding = 3 * len(rows) + degree * times

    def stored(ranks: int) -> dict[State, int]:
        spec = make_spec({Axis.DP_SHARD: (ranks, placement)})
        kinds, kind_of = by_shard(make_wrapping(spec, lower(spec, facts), facts))
        return {row.state: row.device_bytes for row in kinds[kind_of[0]]}

    few, many = stored(degree), stored(degree * times)
    for state, itemsize in ((State.PARAMETERS, 4), (State.OPTIMIZER, 8), (State.GRADIENTS, 4)):
        assert many[state] <= few[state] + padding * itemsize


def test_offloaded_states_are_on_the_host():
    share = compose_factors((Factor(axis=Axis.DP_SHARD, degree=4, placement=tuple_of("O,O,S")),))
    assert share.optimizer.bytes_on_tier(Tier.HOST, 400) == 100
    assert share.optimizer.bytes_on_tier(Tier.DEVICE, 400) == 0
    assert share.gradients.bytes_on_tier(Tier.DEVICE, 400) == 100


def test_materialized_states_use_no_memory_between_uses():
    placed = factor_product(Factor(axis=Axis.DP_SHARD, degree=4, placement=tuple_of("M,S,S")))
    assert placed.parameters.stored_bytes(400) == 0 and placed.parameters.needs_unit
