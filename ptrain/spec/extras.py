"""What a spec needs beside ptrain's own requirements."""

from __future__ import annotations

from importlib.util import find_spec

from ptrain.errors import refused
from ptrain.spec.model import HuggingFaceModel, ModelSpec


def require_transformers(model: ModelSpec) -> None:
    """Before anything is built or started of a class of transformers."""
    if isinstance(model, HuggingFaceModel) and find_spec("transformers") is None:
        finding = f"{model.hf} is a class of transformers, which is not installed"
        raise refused("model.hf", finding, "pip install 'transformers>=4.56,<6'")
