"""Whether a model tells the documents of packed rows apart as they were packed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.data.tokens import START, TARGET
from ptrain.errors import refused
from ptrain.spec.model import ExternalModel, ModelShape, ModelSpec

Rows = NDArray[Any]


def require_edges(name: str, tokens: Rows, marks: Rows, model: ModelSpec) -> None:
    """Raises SpecError where tokens of these rows would attend to those of another document, or not
    to all of their own. What a user's own model attends to nobody knows."""
    begins = marks == START
    is_packed = bool(begins[:, 1:].any())
    if isinstance(model, ExternalModel) or (not is_packed and not _has_documents(model)):
        return
    before = tokens[:, :-1][begins[:, 1:]]
    if len(np.unique(before)) > 1:
        finding = f"its mask is not of {name}: by it documents begin behind tokens of several kinds"
        remedy = "write the one that was made with it, or make both anew with ptrain tokenize"
        raise refused("data.loss_mask", finding, remedy)
    remedy = f"write model.document_end={before[0]}" if is_packed else "remove it"
    if not isinstance(model, ModelShape) or not model.has_documents:
        finding = f"{name} has rows of several documents, which would attend to one another"
        alone = "make the file with --alone, a document a row"
        remedy = f"{remedy}, or {alone}" if isinstance(model, ModelShape) else alone
        raise refused("data.path", finding, remedy)
    row = _differs(tokens, marks, model)
    if row is not None:
        key = model.document_key
        if is_packed and key == "document_start":
            remedy = f"remove it, and {remedy}"
        finding = f"row {row} of {name} has not its documents where model.{key} says"
        raise refused(f"model.{key}", finding, remedy)


def _has_documents(model: ModelSpec) -> bool:
    return isinstance(model, ModelShape) and model.has_documents


def _differs(tokens: Rows, marks: Rows, model: ModelShape) -> int | None:
    """Return the first row whose documents, as the model takes them, are others."""
    begins = marks == START
    begins[:, 0] = True
    if model.document_start is not None:
        edges = tokens == model.document_start
    else:
        edges = np.roll(tokens == model.document_end, 1, axis=1)
    edges[:, 0] = True
    is_target = marks == TARGET  # behind the last one nothing is learned
    counts = is_target[:, ::-1].cumsum(1)[:, ::-1] > 0
    rows = np.flatnonzero(((begins != edges) & counts).any(1))
    return int(rows[0]) if len(rows) else None
