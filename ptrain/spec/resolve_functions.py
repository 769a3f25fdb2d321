"""Resolution of the functions that a spec names in place of ptrain's own: the data's, the loss's,
the step's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ptrain.spec.activations import LossRaw
from ptrain.spec.axis import Axis
from ptrain.spec.function import StepRaw, UserFunction
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.job import DataSpec
from ptrain.spec.resolve_sections import Report
from ptrain.spec.spec import LossSpec
from ptrain.spec.tensor import TensorSpec
from ptrain.spec.text import Tree

_ONE = "remove one of the two"
_A = {"path": "a path", "sources": "sources"}


def resolve_data(raw: SpecRaw, tree: Tree, report: Report) -> DataSpec | None:
    """Return the section with one of corpus, path, sources and target; two are a fault."""
    data = raw.data
    if data.target is None:
        return None if _lacks_target("data", data, report) else _of_tokens(data, tree, report)
    for key in ("corpus", "path", "sources"):
        if tree.has("data", key):
            finding = f"target gives samples of its own, and {key} is given too"
            report.add(f"data.{key}", finding, _ONE)
            return None
    if _ignores_targets("target gives samples that are no tokens", data, report):
        return None
    if raw.batch.pad:
        report.add("batch.pad", "data.target gives samples that are no tokens", "remove pad")
        return None
    if not tree.has("step") and not tree.has("loss", "target"):
        finding = "of samples that are not tokens no loss is known"
        remedy = "write loss: {target: package.module:function}, of the model's output and the "
        report.add("data.target", finding, f"{remedy}batch; or step: {{target: …}}")
        return None
    folder = beside(data.folder, report)
    return replace(data, corpus=None, arguments=data.arguments or {}, folder=folder)


def _of_tokens(data: DataSpec, tree: Tree, report: Report) -> DataSpec | None:
    if data.loss_mask is not None and data.path is None:
        finding = "it stands beside a token file of one's own, and there is no path"
        remedy = "add data.path=FILE, or write data.ignored=[ID, …]"
        if data.sources is not None:
            finding, remedy = "it is of one file, and there are sources", "write it in its source"
        report.add("data.loss_mask", finding, remedy)
        return None
    given = [key for key in ("corpus", "path", "sources") if tree.has("data", key)]
    if len(given) > 1:
        report.add(f"data.{given[1]}", f"both a {given[0]} and {_A[given[1]]} are given", _ONE)
        return None
    return replace(data, corpus=None) if data.is_of_files else data


def _ignores_targets(why: str, data: DataSpec, report: Report) -> bool:
    """Report keys that say which targets count; return whether there is any."""
    keys = [key for key in ("ignored", "loss_mask") if getattr(data, key) is not None]
    for key in keys:
        report.add(f"data.{key}", f"{why}, and it says which of them count", f"remove {key}")
    return bool(keys)


def resolve_functions(raw: SpecRaw, report: Report) -> LossSpec:
    """Return the loss's or the step's function, if the spec names one of them; what contradicts it
    is reported as a fault."""
    loss, step = raw.loss or LossRaw(), raw.step
    kinds = [key for key in ("kind", "chunk", "fused") if getattr(loss, key) is not None]
    if loss.target is None:
        _lacks_target("loss", loss, report)
    elif kinds:
        finding = f"target computes the loss of all that the model returns, and {kinds[0]} says "
        report.add(f"loss.{kinds[0]}", f"{finding}how ptrain does", _ONE)
    if step is None:
        return LossSpec(function=_function("loss", loss, report))
    if loss.target is not None or kinds:
        report.add("step", "step runs the model and gives its loss, and loss says it too", _ONE)
    return LossSpec(step=_function("step", step, report))


def _lacks_target(section: str, raw: DataSpec | LossRaw, report: Report) -> bool:
    """Report what belongs to a target; return whether there is any."""
    keys = [key for key in ("arguments", "folder") if getattr(raw, key) is not None]
    for key in keys:
        report.add(f"{section}.{key}", f"{key} belongs to a target", f"add target, or remove {key}")
    return bool(keys)


def _function(section: str, raw: LossRaw | StepRaw, report: Report) -> UserFunction | None:
    if raw.target is None:
        return None
    return UserFunction(
        section=section,
        target=raw.target,
        arguments=raw.arguments or {},
        folder=beside(raw.folder, report),
    )


def beside(written: str | None, report: Report) -> str | None:
    """Return a folder, absolute and without links: the spec's own where none is written."""
    if written is None:
        return None if report.home is None else os.path.realpath(report.home)
    return os.path.realpath((report.home or report.folder) / written)


def resolve_tensor(
    raw: SpecRaw, loss: LossSpec, degrees: Mapping[Axis, int], tree: Tree, report: Report
) -> TensorSpec:
    """Return the section; a function of the user's is given whole logits, unless cut ones are
    asked for, which is a fault."""
    if loss.user_function is None or degrees.get(Axis.TP, 1) == 1 or not raw.tensor.loss_parallel:
        return raw.tensor
    if tree.has("tensor", "loss_parallel"):
        finding = f"true: {loss.user_function.target} would be given logits that are cut"
        report.add("tensor.loss_parallel", finding, "remove it, or write false")
    return replace(raw.tensor, loss_parallel=False)
