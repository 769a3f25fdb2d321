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
    Form,
    Source,
    View,
    accumulating,
    claim,
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
    claim(
        "Bytes sent in a step",
        cases=tuple(one(label, source, _sent, Form.BYTES) for label, source in STAGES.items()),
    ),
    claim(
        "Sharding the optimizer is free",
        cases=(
            _change("DP → ZeRO-1", DP, ZERO1),
            _change("DP → torch's ZeroRedundancyOptimizer, fp32", _DP_FP32, _REDUNDANCY),
        ),
    ),
    claim(
        "Sharding gradients halves communication",
        cases=(
            _change("DP → ZeRO-2", DP, ZERO2),
            _change("ZeRO-1 → ZeRO-2", ZERO1, ZERO2),
        ),
    ),
    claim(
        "Sharding parameters costs two gathers",
        cases=(
            Case(
                label="ZeRO-2 → ZeRO-3",
                sources=(ZERO2, ZERO3),
                figure=_more_units,
                form=Form.UNITS,
            ),
        ),
    ),
    claim(
        "Stage 3 sends 1.5×",
        cases=(
            _change("DP → ZeRO-3", DP, ZERO3),
            _change("ZeRO-2 → ZeRO-3, as §1 says", ZERO2, ZERO3, DP, ZERO3),
            _change("ZeRO-2 → ZeRO-3, as Theorem 2 adds up", ZERO2, ZERO3),
        ),
    ),
    claim(
        "S* gathers twice",
        cases=(
            one("ZeRO-3, resharded after forward", ZERO3, _units, Form.UNITS),
            one("ZeRO-3, kept until backward", KEEP, _units, Form.UNITS),
            one("parameters offloaded in slices (O, O, S, R)", _OFFLOAD, _units, Form.UNITS, ZERO3),
        ),
    ),
    claim(
        "Volumes compose",
        cases=(
            one("HSDP, 2 × 4", HSDP, _sent, Form.BYTES),
            one("HSDP, 2 × 4, optimizer over all 8", HSDP_FULL, _sent, Form.BYTES),
        ),
    ),
    claim(
        "Gradients travel in 2 bytes",
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
    ),
    claim(
        "Accumulation divides communication by K",
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
    ),
)
