"""What the notes, a blog and the lecture say of seconds. Each claim is worked out from the time of
a step that is predicted on nodes of H100, and is undefined where nothing tells it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from _claims import Said, claim
from _paper_composition import part
from _paper_digest import exact, is_near

from ptrain.cost import Phase, Spent, StepTime

HIDDEN = 0.05  # of a step: what waits for less of it is hidden, or nearly free
_EIGHT_NODES = ("mesh.dp_shard=64", "cluster.preset=h100-64", "batch.global=512")


class UnknownSeconds(Exception):
    """An error for a step time without a prediction, with the reason."""


def step(name: str, *overrides: str) -> StepTime:
    """Return the predicted step of a named spec. Raises UnknownSeconds without a prediction."""
    estimate = exact(name, *overrides)
    if estimate.step is None:
        raise UnknownSeconds(estimate.undefined.get("step_seconds", "no step time is predicted"))
    return estimate.step


def if_known(find: Callable[[], tuple[bool, str]]) -> Callable[[], Said]:
    """Return the verdict, or undefined if the seconds are unknown."""

    @wraps(find)
    def known() -> Said:
        try:
            return find()
        except UnknownSeconds as reason:
            return None, str(reason)

    return known


def exposed(timed: StepTime, axis: str) -> float:
    """Return the share of a step in which a rank waits for the collectives of an axis."""
    return timed.exposed_seconds().get((axis,), 0.0) / timed.seconds


@if_known
def _beyond_512() -> tuple[bool, str]:
    """Return tokens per second and device for two samples per rank on any number of ranks."""
    pace: dict[int, float] = {}
    for ranks in (8, 64, 512, 1024):
        words = (f"mesh.dp_replicate={ranks}", f"batch.global={2 * ranks}", "batch.micro=2")
        cluster = "cluster.preset=h100-1024"
        pace[ranks] = 2 * 4096 / step("8b-ddp", *words, cluster, "activations=M").seconds
    text = ", ".join(f"{number:,.0f} on {ranks}" for ranks, number in pace.items())
    falls = pace[1024] < (1 - HIDDEN) * pace[512]
    return falls and pace[512] > (1 - HIDDEN) * pace[64], f"tokens per second and device: {text}"


@if_known
def _ranks_before_accumulation() -> tuple[bool, str]:
    """Check the notes' example: 1024 samples of 4096 in micro-batches of 2."""
    words = ("batch.global=1024", "batch.micro=2", "cluster.preset=h100-1024", "activations=M")
    four, one = (step("8b-zero3", *words, f"mesh.dp_shard={ranks}").seconds for ranks in (128, 512))
    text = f"{four:.3g} s on 128 ranks, 4 accumulated, and {one:.3g} s on 512: {four / one:.2f}×"
    return is_near(four / one, 4), text


@if_known
def _sharding_is_free() -> tuple[bool, str]:
    shares = {
        "a node": exposed(step("8b-zero3"), "dp_shard"),
        "eight nodes": exposed(step("8b-zero3", *_EIGHT_NODES), "dp_shard"),
    }
    text = ", ".join(f"{share:.1%} on {where}" for where, share in shares.items())
    return max(shares.values()) < HIDDEN, f"of the step waits for gathers and reductions: {text}"


@if_known
def _sums_are_exposed() -> tuple[bool, str]:
    rows = [row for row in step("8b-tp").rows if row.key.axes == ("tp",)]
    waits, moves = sum(row.seconds for row in rows), sum(row.moving for row in rows)
    return waits > (1 - HIDDEN) * moves, f"{waits:.3g} s of {moves:.3g} s are waited for on tp 8"


@if_known
def _across_nodes() -> tuple[bool, str]:
    figures = []
    for node in (8, 4, 1):
        timed = step("8b-tp", f"cluster.devices_per_node={node}")
        figures.append(
            (node, exposed(timed, "tp"), timed.seconds_in(Spent.COMPUTE) / timed.seconds)
        )
    text = ", ".join(
        f"nodes of {node}: {waits:.0%} waits, {computes:.0%} computes"
        for node, waits, computes in figures
    )
    return all(waits > computes for _, waits, computes in figures[1:]), f"tp 8 over {text}"


@if_known
def _layers_are_faster() -> tuple[bool, str]:
    """Return the step times of one device's micro-batches on tp 2, 4 and 8."""
    alone = step("8b-tp", "mesh={}", "placement={}").seconds
    ratios = {ranks: alone / step("8b-tp", f"mesh.tp={ranks}").seconds for ranks in (2, 4, 8)}
    text = ", ".join(f"{ratio:.2f}× on tp {ranks}" for ranks, ratio in ratios.items())
    return all(ratio > 1 for ratio in ratios.values()), f"as fast as one device: {text}"


@if_known
def _one_more_forward() -> tuple[bool, str]:
    plain, again = step("8b-zero3"), step("8b-zero3", "activations=M")
    more = (again.seconds - plain.seconds) / plain.of_phase(Phase.FORWARD)
    text = f"{more:.0%} of the forward pass's seconds, {again.seconds / plain.seconds - 1:.0%} more"
    return is_near(more, 1), f"{text} for the step"


@if_known
def _selective() -> tuple[bool, str]:
    whole = step("8b-zero3", "activations=M").seconds
    some = step("8b-zero3", "activations=M", "recompute=selective").seconds
    plain = step("8b-zero3").seconds
    text = f"{some / plain - 1:+.1%} for selective, {whole / plain - 1:+.1%} for whole blocks"
    return some < whole, f"seconds of a step: {text}"


@if_known
def _bubble_in_seconds() -> tuple[bool, str]:
    timed = step("70b-3d")
    share = timed.seconds_in(Spent.BUBBLE) / timed.seconds
    ideal = 3 / (16 + 3)  # 4 stages, 16 micro-batches
    return is_near(
        share, ideal
    ), f"{share:.1%} of 70b-3d's step, where equal stages give {ideal:.1%}"


SECONDS = (
    claim("Throughput per device falls beyond some 512 data ranks", find=_beyond_512),
    claim("Data ranks are faster than accumulation", find=_ranks_before_accumulation),
    claim("FSDP's communication is nearly free", find=_sharding_is_free),
    claim("tp's sums are on the critical path", find=_sums_are_exposed),
    claim("tp across nodes swamps what it parallelized", find=_across_nodes),
    claim("tp lowers the time of a layer", find=_layers_are_faster),
    claim("Recomputation takes one more forward pass", find=_one_more_forward),
    claim("Selective recomputation is faster than whole blocks", find=_selective),
    claim("A pipeline idles (p − 1)/(m + p − 1)", find=_bubble_in_seconds),
)


def section() -> str:
    """Return the page's part about seconds."""
    return part("seconds", SECONDS)
