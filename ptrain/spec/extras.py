"""What a spec's model needs beside ptrain's own requirements, and the leave to run its code."""

from __future__ import annotations

from importlib.util import find_spec

from ptrain.errors import refused
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelSpec


def require_leave(model: ModelSpec, *, allow_import: bool) -> None:
    """Before a model by a function of the user's is built."""
    if isinstance(model, ExternalModel) and not allow_import:
        finding = f"this would run code of {model.target}"
        raise refused("model.target", finding, "allow it with --allow-import")


def require_transformers(model: ModelSpec) -> None:
    """Before anything is built or started of a class of transformers."""
    if isinstance(model, HuggingFaceModel) and find_spec("transformers") is None:
        finding = f"{model.hf} is a class of transformers, which is not installed"
        raise refused("model.hf", finding, "pip install 'transformers>=4.56,<6'")
