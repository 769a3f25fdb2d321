"""The allocations of experts as a formula of their number of rows, from two recordings."""

from __future__ import annotations

from collections.abc import Mapping

from ptrain.models.trace import GradientComplete, Recording, StorageAllocated, StorageFreed
from ptrain.timeline import Boundary, Complete, Mark, Run
from ptrain.traces.stage_parts import UnevenLoads

LAYERS = ("blocks.0.mlp", "blocks.1.mlp")
LOADS = UnevenLoads(layers=LAYERS, rows=16, of_model=LAYERS)
ENTER, LEAVE = Boundary(Mark.ENTER, 0), Boundary(Mark.LEAVE, 0)


def recording(sizes: Mapping[int, int], operator: str = "aten::mm") -> Recording:
    """Three storages of forward, of which the last one stays, and a gradient."""
    births = [StorageAllocated(number, size, operator) for number, size in sizes.items()]
    return Recording(
        passes={
            "forward": (ENTER, *births[:3], StorageFreed(0), StorageFreed(1), LEAVE),
            "backward": (
                StorageFreed(2),
                births[3],
                GradientComplete("blocks.0.mlp.w", 3, is_cloned=False),
            ),
        },
        sizes=sizes,
        moved=((2, "host"),),
    )


EVENLY = recording({0: 100, 1: 16 * 4, 2: 16 * 8, 3: 40})
UNEVENLY = recording({0: 100, 1: 17 * 4, 2: 18 * 8, 3: 40})


def test_a_storage_that_grows_as_the_rows_of_a_layer_is_as_large_as_these():
    formula = LOADS.formula(EVENLY, UNEVENLY)
    assert formula is not None
    evenly = formula.at_rows((16, 16))
    assert evenly.forward == (ENTER, Run(100 + 64 + 128, 128), LEAVE)
    assert evenly.backward == (Run(0, -88), Complete("blocks.0.mlp.w", 40))
    unevenly = formula.at_rows((0, 1000))
    assert unevenly.forward == (ENTER, Run(8100, 8000), LEAVE)
    assert unevenly.moved == (("host", 8000),)


def test_there_is_no_formula_for_nonlinear_storages_or_other_operators():
    assert LOADS.formula(EVENLY, recording({0: 101, 1: 68, 2: 144, 3: 40})) is None
    assert LOADS.formula(EVENLY, recording({0: 100, 1: 17 * 4, 2: 19 * 8, 3: 40})) is None
    assert LOADS.formula(EVENLY, recording({0: 100, 1: 68, 2: 144, 3: 40}, "aten::cat")) is None


def test_a_gradient_that_grows_with_rows_is_none_of_a_weight():
    first = recording({0: 100, 1: 64, 2: 128, 3: 16})
    assert LOADS.formula(first, recording({0: 100, 1: 68, 2: 144, 3: 17})) is None
