"""Bytes on the wire against the prediction: what the kernel counted on the ranks' own sockets.

Claim: predicted sent bytes times gloo's factor (its reduce-scatter is an all-reduce; everything
else sends what the ring model says) agree with the kernel's counters within 0.1 %, axis by axis,
in a step whose tensors are larger than 1 MiB. The rest is gloo's headers, 48 bytes a message, of
which smaller tensors have more in proportion: the same is shown for a small model, with no claim.
The figures do not depend on how busy the machine is. Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command

from ptrain.derivation.wire import TOLERANCE, WireRow
from tests.ranks import Ranks

STEADY = 2  # counted from 0
OVERRIDES = (
    "model.preset=llama-tiny", "model.layers=4", "model.hidden=256", "model.heads=4",
    "model.ffn=1024", "model.vocab=4096", "batch.micro=1", "batch.sequence=32",
)  # fmt: skip
SMALL = ("model.preset=llama-tiny", "batch.micro=1", "batch.sequence=32")
HEADER = 48  # bytes that gloo puts before each message
STRATEGIES = {
    "ddp": ("dp_replicate",),
    "zero1": ("dp_shard",),
    "zero2": ("dp_shard",),
    "zero3": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
}
VIAS = ("native", "all_to_all")
# Two layers of 4096 tokens, 1024 on each of four ranks: keys and values of two heads of four are
# 1 MiB together, and go round; what Ulysses exchanges, which needs four heads, is 1 MiB a tensor.
LONG = ("model.layers=2", "batch.global=1", "batch.sequence=4096")
CONTEXT = ("cp-ring", "cp-zigzag", "cp-all-gather", "cp-ulysses", "cp-hybrid")

# Two layers of 2048 tokens a rank, each of which chooses two of eight experts on four ranks: 4 MiB
# of rows set out at once, and about a quarter of them goes to each rank.
ROUTED = (
    "model.preset=moe-tiny", "model.layers=2", "model.hidden=256", "model.heads=4",
    "model.expert_ffn=512", "model.experts=8", "model.experts_per_token=2", "model.vocab=4096",
    "batch.micro=1", "batch.sequence=2048", "data.tokenizer=bytes",
)  # fmt: skip
EXPERTS = {
    "ep": ("model.capacity_factor=null",),
    "ep-zero3": ("model.capacity_factor=null", "mesh.dp_shard=1"),
    "ep, with places": ("model.capacity_factor=1.25",),
}

Case = tuple[str, int, str]  # strategy, ranks, how reduce-scatters are executed


def context_cases() -> Iterator[Case]:
    """Slices of the tokens, on four ranks."""
    for strategy in CONTEXT:
        for via in VIAS if strategy == "cp-all-gather" else VIAS[:1]:
            yield strategy, 4, via


def expert_cases() -> Iterator[Case]:
    """Experts on four ranks."""
    for strategy in EXPERTS:
        yield strategy, 4, "native"


def cases() -> Iterator[Case]:
    """Copies of the model, and shards of it."""
    for size in (2, 4):
        for strategy, axes in STRATEGIES.items():
            for via in VIAS if "dp_shard" in axes else VIAS[:1]:
                if len(axes) == 1 or size == 4:
                    yield strategy, size, via


def overrides_of(model: Sequence[str], strategy: str, size: int, via: str) -> tuple[str, ...]:
    """What makes the named spec the one that runs."""
    if strategy in CONTEXT:
        heads = "model.kv_heads=4" if strategy == "cp-ulysses" else "model.kv_heads=2"
        return (*model, *LONG, heads, f"mesh.cp={size}", f"reduce_scatter={via}")
    if strategy in EXPERTS:
        return (*model, *EXPERTS[strategy], f"mesh.ep={size}", f"batch.global={size}")
    axes = STRATEGIES[strategy]
    degree = size if len(axes) == 1 else size // 2
    mesh = [f"mesh.{axis}={degree}" for axis in axes]
    return (*model, *mesh, f"batch.global={size}", f"reduce_scatter={via}")


def measure(pool: Ranks, strategy: str, overrides: Sequence[str]) -> tuple[WireRow, ...]:
    """One steady step of this strategy in a pool of ranks."""
    from ptrain.algebra.legality import require
    from ptrain.derivation.estimate import derive
    from ptrain.derivation.wire import wire_rows
    from ptrain.meters.measure import join_estimates
    from ptrain.spec.load import load
    from ptrain.traces.facts import facts_of
    from tests.gloo.runs import judged, train

    spec = require(load(strategy.partition(",")[0], tuple(overrides)))
    reports = pool.run(spec.world_size, train, spec, STEADY + 1, STEADY, timeout=600)
    measured = join_estimates([report.measured for report in reports if report.measured])
    assert not measured.undefined, measured.undefined
    return wire_rows(judged(derive(spec, facts_of(spec)), reports, STEADY), measured)


def table(
    pool: Ranks, model: Sequence[str], rows: Iterable[Case], *, is_claimed: bool
) -> tuple[list[str], list[str]]:
    """A row for each case and axis, and those that are not within the claim."""
    lines, failed = list(_HEAD), []
    for strategy, size, via in rows:
        for row in measure(pool, strategy, overrides_of(model, strategy, size, via)):
            more = row.measured_bytes - row.predicted_bytes
            apart, name = more / row.predicted_bytes, f"{strategy} | {size} | `{via}`"
            verdict = "holds" if 0 <= apart <= TOLERANCE else "fails"
            if is_claimed and verdict == "fails":
                told = f"{name.replace(' |', ',')}, {'+'.join(row.axes)}: {apart:.4%} apart"
                failed.append(f"{told}, at most {TOLERANCE:.1%}")
            lines.append(
                f"| {name} | {'+'.join(row.axes)} | {row.predicted_bytes:,} "
                f"| {row.measured_bytes:,} | {apart:.4%} | {more / HEADER:g} "
                f"| {row.factor.partition(';')[0]} | {verdict if is_claimed else 'no claim'} |"
            )
    return lines, failed


_HEAD = (
    "| strategy | N | `reduce_scatter` | axis | predicted bytes | measured bytes | apart "
    "| apart / 48 | factor | verdict |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def _explained() -> list[str]:
    """The claim, and what is inside the two columns."""
    return [
        f"Claim: measured / predicted - 1 is at least 0 and at most {TOLERANCE:.1%}, axis by axis, "
        "where the tensors of a call are larger than 1 MiB (here all but the gradient norm's "
        "scalar are).",
        "",
        "Both are bytes that one rank sends in one steady step, the mean over the ranks.",
        "",
        "- *Measured*: what the kernel counted on the ranks' own TCP connections from the "
        "beginning to the end of the step, by `TCP_INFO`: `bytes_sent` − `bytes_retrans` + "
        "`notsent_bytes` (what still waits in the send buffer). A connection belongs to the "
        "process group whose ranks it connects, and so to an axis.",
        "- *Predicted*: the bytes of the ring model × the backend's *factor*, already multiplied. "
        "gloo executes a reduce-scatter as an all-reduce, so with `reduce_scatter=native` a "
        "reduce-scatter sends twice what the ring model says. With `reduce_scatter=all_to_all` "
        "it is executed as an all-to-all and a sum on the rank: factor 1.",
        f"- *Apart*: gloo puts {HEADER} bytes before each message, which are not in the "
        "prediction. The smaller the tensors, the larger their share. "
        f"*Apart / {HEADER}* is the number of messages that explains all of it (a mean over the "
        "ranks, so not always whole).",
        "",
    ]


def _commands() -> list[str]:
    """Which specs are copies and shards of the model."""
    first, *_, last = cases()
    told = ", ".join(f"`{name}`" for name in STRATEGIES)
    return [
        f"The specs are {told} with `{' '.join(OVERRIDES)}`, on N gloo ranks; an axis has N "
        "ranks, or N / 2 where a spec has two. The commands of the first and the last row, which "
        "end in the same figures:",
        "",
        *(
            f"    ptrain validate {case[0]} {' '.join(overrides_of(OVERRIDES, *case))}"
            for case in (first, last)
        ),
        "",
    ]


def of_context(pool: Ranks) -> tuple[list[str], list[str]]:
    """Return the section on slices of the tokens, and what is not within the claim."""
    rows, failed = table(pool, OVERRIDES, context_cases(), is_claimed=True)
    first, *_ = context_cases()
    words = " ".join(overrides_of(OVERRIDES, *first))
    closing = (
        "The same claim. Over cp go keys and values and their gradients, or tokens for heads, and "
    )
    closing += "the sum of the parameters' gradients. The command of the first row:"
    return [
        "",
        "## Slices of the tokens",
        "",
        closing,
        "",
        f"    ptrain validate {first[0]} {words}",
        "",
        *rows,
    ], failed


def of_experts(pool: Ranks) -> tuple[list[str], list[str]]:
    """Return the section on rows that travel to experts, and what is not within the claim."""
    rows, failed = table(pool, ROUTED, expert_cases(), is_claimed=True)
    first, *_ = expert_cases()
    words = " ".join(overrides_of(ROUTED, *first))
    return [
        "",
        "## Experts of other ranks",
        "",
        "The same claim. Over ep go rows of tokens to their experts and back, how many they are "
        "(64 bytes, of no claim by themselves), and the sum of the gradients of all else. Without "
        "places the sizes are the routers': *predicted* is derived from what they chose in the "
        "measured step. The command of the first row:",
        "",
        f"    ptrain validate {first[0]} {words}",
        "",
        *rows,
    ], failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sections = {"context": of_context, "experts": of_experts}
    parser.add_argument("--only", choices=sections, help="slices of the tokens, or experts, alone")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    pool = Ranks()
    lines = [header("wire: predicted bytes against the kernel's counters", this_command())]
    lines += _explained()
    failed: list[str] = []
    if args.only is None:
        rows, failed = table(pool, OVERRIDES, cases(), is_claimed=True)
        lines += [*_commands(), *rows]
    for name, of_section in sections.items():
        if args.only in (None, name):
            section, wrong = of_section(pool)
            lines += section
            failed += wrong
    if args.only is None:
        lines += ["", "## Smaller tensors", ""]
        lines += [
            f"The same specs with `{' '.join(SMALL)}`: headers weigh more, and nothing is claimed."
        ]
        lines += ["", *table(pool, SMALL, cases(), is_claimed=False)[0]]
    pool.close()
    return conclude(
        "wire" if args.only is None else f"wire-{args.only}",
        lines,
        failed=failed,
        not_covered="tensors of 1 MiB and less (shown above), other models and strategies, other "
        "backends (NCCL sends past the sockets that are read), IP and TCP headers, and "
        "retransmissions.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
