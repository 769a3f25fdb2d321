"""The answer of the paper's Algorithm 1 as text and as plain data."""

from __future__ import annotations

from ptrain.codec import encode
from ptrain.errors import refused
from ptrain.selection.algorithm1 import STATE_BYTES, Advice, Answer, Thresholds
from ptrain.units import format_count, format_memory


def lines(answer: Answer) -> list[str]:
    """Return the answer as text: the conditions with their figures, what follows, and what the
    algorithm does not see."""
    required = answer.requirements
    head = (
        f"Algorithm 1, thresholds {answer.thresholds.states:g} and {answer.thresholds.layer:g}: "
        f"P = {format_count(required.parameters)}, N = {required.devices}, "
        f"M_d = {format_memory(required.device_memory)}"
    )
    conditions = [
        f"  line {test.line}: {test.text}: {'yes' if test.is_true else 'no'}"
        for test in answer.tests
    ]
    return [head, *conditions, _conclusion(answer), *_remarks(answer)]


def record(answer: Answer) -> dict[str, object]:
    """Return the answer as plain data: what was required, each condition, and the overrides that
    make a spec of it."""
    return {
        "algorithm": "algorithm1",
        "thresholds": encode(answer.thresholds),
        "requirements": encode(answer.requirements),
        "conditions": encode(answer.tests),
        "advice": None if answer.advice is Advice.NONE else str(answer.advice),
        "overrides": list(answer.overrides),
    }


def _conclusion(answer: Answer) -> str:
    if answer.advice is Advice.NONE:
        return "  no answer: line 11 returns a specification that was never set"
    tuples = " ⊗ ".join(f"{axis} {degree} ({modes})" for axis, degree, modes in answer.degrees)
    return f"  {answer.advice}: {tuples}"


def _remarks(answer: Answer) -> list[str]:
    """What a reader would else take for said: activations, and what a second axis changes."""
    required = answer.requirements
    share = STATE_BYTES * required.parameters / required.devices
    whole = format_memory(share)
    if answer.advice is Advice.NONE:
        if share < required.device_memory:
            rest = format_memory(required.device_memory - share)
            return [f"  the share of {whole} is less than the device memory; {rest} remain"]
        return [
            f"  the share of {whole} exceeds the device memory; more devices, fewer bytes "
            "per parameter or states on the host would help, but the algorithm considers "
            "none of them"
        ]
    if answer.advice is Advice.ADD_TENSOR:
        return [
            f"  with the same number of devices the states' share stays {whole}, which line "
            "5 rejected: tp reduces the all-gathered parameters, not the stored states",
            "  the paper does not define how tp is combined; ZeRO-3 over the nodes is assumed here",
        ]
    return [
        "  activations are in no condition; the threshold leaves them "
        f"{format_memory((1 - answer.thresholds.states) * required.device_memory)}"
    ]


def thresholds_of(text: str) -> Thresholds:
    """Return the thresholds that `0.7,0.3` writes. Raises SpecError for anything else: they are
    shares of a device's memory."""
    try:
        states, layer = (float(part) for part in text.split(","))
    except ValueError:
        states = layer = 0.0
    if not (0 < states <= 1 and 0 < layer <= 1):
        raise refused(
            "--thresholds",
            f"{text[:60]!r} is not two shares of a device's memory, for states and for a layer",
            "Use two numbers in 0..1, for example `--thresholds 0.7,0.3`.",
        )
    return Thresholds(states=states, layer=layer)
