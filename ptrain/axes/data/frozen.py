"""Frozen parameters, which are used and trained by nobody: what executes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.errors import SpecError, refused
from ptrain.facts.model import ModelFacts
from ptrain.spec.dials import Reshard
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import Form, FullyShard


def require_executed(spec: Spec, plan: Plan, facts: ModelFacts) -> None:
    """Raises SpecError for frozen parameters where nothing executes them, or where what is held and
    sent for them is not derived."""
    require_any(spec, any(tensor.is_frozen for tensor in facts.tensors))
    frozen = [tensor.name for tensor in facts.tensors if tensor.is_frozen]
    if not frozen:
        return
    for where, names, remedy in (*_cut(plan, frozen), *_idle(plan, facts)):
        raise _not_yet(where, names, remedy)


def require_any(spec: Spec, is_any: bool) -> None:
    """Raises SpecError where a spec says where frozen parameters are, unless there is one."""
    if spec.frozen.is_written and not is_any:
        finding = "every parameter of the model is trained: none is frozen (requires_grad=False)"
        raise refused(
            "frozen",
            finding,
            "remove frozen, or freeze parameters in the function that model.target names",
        )


_TAKE_IDLE = (Form.LOCAL, Form.FLAT)  # torch's wrappers expect a gradient in every stage
_Refusal = tuple[str, Sequence[str], str]  # where, which of them, and the remedy


def _cut(plan: Plan, frozen: Sequence[str]) -> Iterator[_Refusal]:
    """Yield axes on which nobody has tried them."""
    if plan.tensor is not None and plan.tensor.is_saved_cut:
        yield "where tp saves slices of the tokens", frozen, "write placement.tp=S,S,S,S"
    if plan.context is not None:
        yield "over cp", frozen, "leave cp out"
    if plan.experts is not None:
        yield "over ep", frozen, "leave ep out"


def _idle(plan: Plan, facts: ModelFacts) -> Iterator[_Refusal]:
    """Yield units and stages of which nothing is trained."""
    trained = {tensor.name for tensor in facts.trained}
    for stage in plan.stages:
        own = [*stage.tensors, *(name for name, _ in stage.copied)]
        if own and not trained & {*own} and plan.form not in _TAKE_IDLE:
            remedy = "leave pp out, or take a tuple of flat units, as zero2's"
            yield "of a stage of which nothing is trained", own, remedy
    passed = [t.name for unit in facts.units if facts.is_passed_by(unit) for t in unit.tensors]
    if passed and isinstance(plan.wrap, FullyShard):
        where = "of a unit in front of all that is trained, which fully_shard passes by"
        if not isinstance(plan.wrap.sync.reshard_after_forward, bool | Reshard):
            yield f"{where} in smaller shards", passed, "write sync.reshard_after_forward=true"
        if plan.pipeline is not None and plan.wrap.sync.reshard_after_backward:
            yield f"{where} after each pass of a stage", passed, "leave sync out"


def _not_yet(where: str, frozen: Sequence[str], remedy: str) -> SpecError:
    first, *others = frozen
    more = f" and {len(others)} more" if others else ""
    return refused("placement", f"not yet: frozen parameters {where}: {first}{more}", remedy)
