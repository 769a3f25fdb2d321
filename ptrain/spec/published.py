"""A model of transformers from a config that somebody has published: written into the spec, or a
file beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ptrain.spec.model import Attention, HuggingFaceModel, ModelRaw

_ARCHITECTURES = "architectures"  # the classes that a published config is of


def has_architecture(config: object) -> bool:
    """Return whether a config says by itself of which class it is."""
    return isinstance(config, dict) and bool(config.get(_ARCHITECTURES))


def hugging_face_model(
    raw: ModelRaw, attention: Attention | None, folder: Path, add: Callable[[str, str, str], None]
) -> HuggingFaceModel | None:
    """Return the model; None, with a fault, where its config cannot be read or nobody says of which
    class it is. `folder` is that of relative files."""
    config = raw.config if isinstance(raw.config, dict) else {}
    if isinstance(raw.config, str):
        read = _read(folder / raw.config)
        if not isinstance(read, dict):
            add("model.config", f"{raw.config}: {read}", "name a config.json, or write its fields")
            return None
        config = read
    classes = config.get(_ARCHITECTURES)
    hf = raw.hf or (str(classes[0]) if isinstance(classes, list) and classes else None)
    if hf is None:
        finding = f"the config has no {_ARCHITECTURES}: of which class it is nobody says"
        add("model.config", finding, "write model.hf, a class like LlamaForCausalLM")
        return None
    return HuggingFaceModel(hf=hf, config=config, blocks=raw.blocks, attention=attention)


def _read(path: Path) -> dict[str, object] | str:
    """What a file says, or why it says nothing."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return error.strerror or "cannot be read"
    except ValueError as error:
        return f"is no JSON: {error}"
    return read if isinstance(read, dict) else "is no mapping"
