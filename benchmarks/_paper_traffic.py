"""What the text claims of communication: Theorem 2, Corollary 1, and accumulation."""

from __future__ import annotations

from _claims import (
    DP,
    HSDP,
    HSDP_FULL,
    KEEP,
    STAGES,
    ZERO1,
    ZERO2,
    ZERO3,
    Case,
    Claim,
    Form,
    Source,
    View,
    accumulating,
    one,
    seventy,
    with_overrides,
)


def _sent(view: View) -> float:
    return view.found.sent


def _units(view: View) -> float:
    """Bytes sent in units of r|Θ|."""
    return view.found.sent / (view.ring * view.theta)


def _times(before: View, after: View) -> float:
    return after.found.sent / before.found.sent


def _more_units(before: View, after: View) -> float:
    return _units(after) - _units(before)


def _change(label: str, before: Source, after: Source, *by: Source) -> Case:
    return Case(label=label, sources=(before, after), figure=_times, form=Form.TIMES, claimed_by=by)


def _accumulated(label: str, name: str, *overrides: str) -> Case:
    return one(label, accumulating(name, *overrides), _units, Form.UNITS, Source(f"70b-{name}"))


_DP_FP32 = with_overrides(DP, "precision.layout=fp32")
_REDUNDANCY = seventy("ddp-zero-redundancy", "mesh.dp_replicate=8", "precision.layout=fp32")
_OFFLOAD = seventy("zero-offload", "mesh.dp_shard=8", "precision.layout=zero16")

_LAST = "sync.gradients=last"
_KEPT_AFTER_FORWARD = "sync.reshard_after_forward=false"
_KEPT_AFTER_BACKWARD = "sync.reshard_after_backward=false"

TRAFFIC = (
    Claim(
        title="Bytes sent in a step",
        where="Theorem 2 (12)–(14), Example 4; stages 1 and 2 by the same equations",
        printed="70B on 8 devices: 245 GB for DP, 368 GB for stage 3; by the rules 245 and "
        "122.5 GB for stages 1 and 2",
        cases=tuple(one(label, source, _sent, Form.BYTES) for label, source in STAGES.items()),
        condition="unless Ω and G are sharded and Θ is whole, as in stage 2",
        why="With whole parameters and a sharded optimizer a rank updates its own part only, and "
        "the others need it before the next forward pass: one all-gather, r|Θ|, that no rule of "
        "the theorem has. Stage 1 hides it (reduce-scatter and all-gather cost what its all-reduce "
        "would have), stage 2 does not.",
    ),
    Claim(
        title="Sharding the optimizer is free",
        where="Corollary 1.1",
        printed="Ω: R → S reduces memory with no communication increase, since updates are local",
        cases=(
            _change("DP → ZeRO-1", DP, ZERO1),
            _change("DP → torch's ZeroRedundancyOptimizer, fp32", _DP_FP32, _REDUNDANCY),
        ),
        condition="if the all-reduce is replaced by a reduce-scatter",
        why="The updated parameters must be gathered. The volume stays the same only because the "
        "gradients then need no more than a reduce-scatter; torch's ZeroRedundancyOptimizer "
        "keeps DDP's all-reduce and broadcasts besides: 3 units instead of 2.",
    ),
    Claim(
        title="Sharding gradients halves communication",
        where="Corollary 1.2",
        printed="G: R → S turns an all-reduce into a reduce-scatter, a 2× reduction",
        cases=(
            _change("DP → ZeRO-2", DP, ZERO2),
            _change("ZeRO-1 → ZeRO-2", ZERO1, ZERO2),
        ),
        why="The all-gather of the updated parameters takes the half that the reduce-scatter "
        "saves: an all-reduce is those two. Stage 2 sends what stage 1 and DP do, as in the notes.",
    ),
    Claim(
        title="Sharding parameters costs two gathers",
        where="Corollary 1.3",
        printed="Θ: R → S* adds 2r|Θ|",
        cases=(
            Case(
                label="ZeRO-2 → ZeRO-3",
                sources=(ZERO2, ZERO3),
                figure=_more_units,
                form=Form.UNITS,
            ),
        ),
        why="Stage 3 gathers in forward and in backward, and in exchange no longer gathers after "
        "the update: two in, one out.",
    ),
    Claim(
        title="Stage 3 sends 1.5×",
        where="§1, §4.3, §7.1",
        printed="1.5× the communication of data parallelism; §1 says it of stage 2",
        cases=(
            _change("DP → ZeRO-3", DP, ZERO3),
            _change("ZeRO-2 → ZeRO-3, as §1 says", ZERO2, ZERO3, DP, ZERO3),
            _change("ZeRO-2 → ZeRO-3, as Theorem 2 adds up", ZERO2, ZERO3),
        ),
        condition="as the sentences say it, of data parallelism and of stage 2; not as Theorem 2 "
        "adds up against stage 2",
        why="What runs agrees with the sentence of the introduction. The theorem, which forgets "
        "stage 2's gather, makes it twice that.",
    ),
    Claim(
        title="S* gathers twice",
        where="Theorem 2 (14)",
        printed="parameters are gathered for forward and again for backward",
        cases=(
            one("ZeRO-3, resharded after forward", ZERO3, _units, Form.UNITS),
            one("ZeRO-3, kept until backward", KEEP, _units, Form.UNITS),
            one("parameters offloaded in slices (O, O, S, R)", _OFFLOAD, _units, Form.UNITS, ZERO3),
        ),
        condition="if units are dropped after their forward pass",
        why="Keeping the gathered units until backward saves the second gather and costs the whole "
        "of Θ at the peak. Both are (S*, S, S, R): the tuple alone does not say which.",
    ),
    Claim(
        title="Volumes compose",
        where="Definition 5 with Theorem 2",
        printed="the inner axis moves Θ and G, the outer one what the inner leaves of G",
        cases=(
            one("HSDP, 2 × 4", HSDP, _sent, Form.BYTES),
            one("HSDP, 2 × 4, optimizer over all 8", HSDP_FULL, _sent, Form.BYTES),
        ),
        why="Gathers and the reduce-scatter stay inside a group; between groups one all-reduce of "
        "a shard.",
    ),
    Claim(
        title="Gradients travel in 2 bytes",
        where="Theorem 2 (13) with Remark 1",
        printed="|G| = 2P, so that stage 3 sends 3r|Θ|",
        cases=(
            one("reduced in 16 bits (zero16)", ZERO3, _units, Form.UNITS),
            one(
                "reduced in fp32 (megatron18)",
                with_overrides(ZERO3, "precision.layout=megatron18"),
                _units,
                Form.UNITS,
                ZERO3,
            ),
            one(
                "FSDP2, reduced in fp32",
                seventy("fsdp-mixed", "mesh.dp_shard=8", "precision.reduced=fp32"),
                _units,
                Form.UNITS,
                ZERO3,
            ),
        ),
        condition="if sums are taken in 16 bits",
        why="What travels has the dtype of the reduction, a dial of its own. Frameworks often "
        "reduce in fp32 for the sum's sake, which makes the reduce-scatter twice as large.",
    ),
    Claim(
        title="Accumulation divides communication by K",
        where="§9; notes, gradient accumulation",
        printed="costs are amortised over K micro-batches: a step of K sends what a step of 1 does",
        cases=(
            _accumulated("DP, reduced once (no_sync)", "dp", _LAST),
            _accumulated("ZeRO-2, reduced each time", "zero2"),
            _accumulated("ZeRO-2, reduced once", "zero2", _LAST),
            _accumulated("ZeRO-3, reduced each time", "zero3"),
            _accumulated("ZeRO-3, reduced once", "zero3", _LAST),
            _accumulated(
                "ZeRO-3, reduced once, kept after forward", "zero3", _LAST, _KEPT_AFTER_FORWARD
            ),
            _accumulated(
                "ZeRO-3, reduced once, kept after backward", "zero3", _LAST, _KEPT_AFTER_BACKWARD
            ),
            _accumulated(
                "ZeRO-3, reduced once, kept throughout",
                "zero3",
                _LAST,
                _KEPT_AFTER_FORWARD,
                _KEPT_AFTER_BACKWARD,
            ),
        ),
        condition="for plain data parallelism that reduces once",
        why="Only the reduction of gradients can wait. Parameters that are gathered for use are "
        "gathered for every micro-batch: with K of them 3K units by default, 2K + 1 when "
        "gradients wait, K + 2 or K + 1 when parameters are kept over one of the two turns, 2 "
        "when kept throughout, which is a whole Θ and a whole G on every rank.",
    ),
)
