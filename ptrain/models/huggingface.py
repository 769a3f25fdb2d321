"""A causal language model of transformers, by its class or its model type, from a config alone.

The module is of a class made here: transformers' own with `forward(tokens_BT) -> logits_BTV`, so
that its parameters keep the names that transformers gives them. transformers is imported where such
a model is built, and nowhere else: the import takes seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, SpecError, refused
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.boundary import boundary
from ptrain.models.meta import has_memory
from ptrain.models.published_config import EXPERTS, experts_setting, faults_of_class, taken
from ptrain.spec.extras import require_transformers
from ptrain.spec.model import Attention, HuggingFaceModel
from ptrain.spec.slips import near_word

# What is ptrain's to say: no keys and values are kept; attention and dtypes are those of the spec.
_FIXED = {"use_cache": False}
_ATTENTION = "attn_implementation"
_KINDS = {
    Attention.SDPA: ("sdpa", "_supports_sdpa"),
    Attention.EAGER: ("eager", ""),  # every class has it
    Attention.FLEX: ("flex_attention", "_supports_flex_attn"),
}
_BASE = "transformers.modeling_utils.PreTrainedModel"
_IS_PLAIN = "_gives_logits"  # of the classes that are made here
PACKED = "find_packed_sequence_indices"  # of `masks`
_FIELD = re.compile(r"field '(\w+)'")  # as strict dataclasses of newer versions name it
# Fields of a config with which a class adds a term to its loss. It does so only if it is given
# labels; ptrain gives none, and computes the loss of the logits.
_ROUTERS = "output_router_logits"
_MORE_LOSS = {_ROUTERS: False, "z_loss_coefficient": 0.0}
_LAYERS = "num_hidden_layers"  # as transformers calls it, whatever a config does


def build_hugging_face(model: HuggingFaceModel, *, sequence: int) -> nn.Module:
    """Raises SpecError for a class that is none, and for a config that the class does not take."""
    require_transformers(model)
    try:
        named = _class_of(model.hf)
    except SpecError as error:  # a class with code of its own is often unknown too
        raise SpecError(*faults_of_class(model.config), *error.faults) from error
    config = _config(named, model)
    _require_plain_loss(named, config, "model.config")
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < sequence:
        finding = f"max_position_embeddings is {positions}, and a sample has {sequence} tokens"
        raise refused("model.config", finding, f"write max_position_embeddings: {sequence} or more")
    with boundary(partial(_unbuilt, named, _attention(named, model))):
        module: nn.Module = _with_logits(named)(config)
        is_flex = model.attention is Attention.FLEX  # which a processor would compile, in minutes
        is_real = all(has_memory(parameter) for parameter in module.parameters())
        if not is_flex and is_real and detect_fake_mode() is None:  # fakes lack some operators too
            with torch.no_grad():  # sizes that do not fit one another show when they meet
                module(torch.zeros(1, min(2, sequence), dtype=torch.int64))
    return module


def _require_plain_loss(named: Any, config: Any, place: str) -> None:
    """Raise SpecError for a config with which a class trains on more than the loss of its logits.

    Args:
        named: The class of transformers.
        config: Its config object.
        place: How the user writes the config: as a key of a spec, or in Python.
    """
    for field, off in _MORE_LOSS.items():
        value = getattr(config, field, None) or off
        if value != off:
            finding = f"is {value}: {named.__name__} then adds a term to its loss, and ptrain "
            remedy = f"Use `{place}.{field}={off}`."
            if field == _ROUTERS:
                remedy += (
                    " A built-in mixture of experts trains on such a loss: key `model.aux_loss`."
                )
            raise refused(f"{place}.{field}", f"{finding}trains on the logits alone", remedy)


def layers_of(model: HuggingFaceModel) -> int | None:
    """Return how many layers its config says there are; None where it says none. Raises SpecError
    as `build_hugging_face`."""
    require_transformers(model)
    layers = getattr(_config(_class_of(model.hf), model), _LAYERS, None)
    return layers if isinstance(layers, int) else None


def ignored_fields(model: HuggingFaceModel) -> tuple[str, ...]:
    """Return what of a whole config has no influence, each with the reason."""
    return taken(_class_of(model.hf), model.config).ignored


def config_of_class(model: HuggingFaceModel) -> dict[str, Any]:
    """Return the fields of the config.json that says what a model is: those of its class, and of
    the file that it was built of those that nothing here reads. Raises SpecError as
    `build_hugging_face`."""
    require_transformers(model)
    named = _class_of(model.hf)
    fields: dict[str, Any] = json.loads(_config(named, model).to_json_string())
    said = {name: value for name, value in model.config.items() if name != EXPERTS}
    kept = {name: said.get(name, True) for name in _FIXED}  # keys and values are, where it is used
    return {**said, **fields, **kept, "architectures": [named.__name__]}


def as_saved(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state as its files have it: newer versions of transformers rename some of
    their modules and stack experts when they read one. Raises SpecError where they cannot say."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # an older one keeps what files have
        return state
    with boundary(lambda error: _unfit(f"how files have its tensors is unknown: {_line(error)}")):
        saved: dict[str, Tensor] = revert_weight_conversion(module, state)
    return saved


def unreal(model: HuggingFaceModel) -> nn.Module:
    """Return the module without values, on the meta device. Raises SpecError as
    `build_hugging_face`."""
    require_transformers(model)
    named = _class_of(model.hf)
    config = _config(named, model)
    with boundary(partial(_unbuilt, named, _attention(named, model))), torch.device("meta"):
        module: nn.Module = _with_logits(named)(config)
    return module


def with_layers(model: HuggingFaceModel, layers: int) -> HuggingFaceModel:
    """Return the model with so many layers; lists with an entry for each layer are cut."""
    kind = _class_of(model.hf).config_class
    names = (_LAYERS, kind.attribute_map.get(_LAYERS, _LAYERS))
    before = layers_of(model)

    def cut(value: object) -> object:
        return value[:layers] if isinstance(value, list) and len(value) == before else value

    config = {name: cut(value) for name, value in model.config.items() if name not in names}
    return replace(model, config={**config, names[-1]: layers}, pretrained=None)


def _attention(named: type, model: HuggingFaceModel) -> Attention:
    """What the spec says; else the best that the class has, as transformers itself chooses."""
    if model.attention is not None:
        return model.attention
    _, supported = _KINDS[Attention.SDPA]
    return Attention.SDPA if getattr(named, supported, True) else Attention.EAGER


def _unbuilt(named: type, attention: Attention, error: BaseException) -> Fault:
    _, supported = _KINDS[attention]
    if not getattr(named, supported, True):
        finding, remedy = f"{named.__name__} does not have {attention}", "write attention: eager"
        return Fault(place="attention", finding=finding, remedy=remedy)
    return _unfit(f"{named.__name__} cannot be built of this config: {_line(error)}")


def _unfit(finding: str) -> Fault:
    return Fault(place="model.config", finding=finding, remedy="change the field that it names")


def masks() -> ModuleType:
    """Return the module in which transformers makes the masks of attention."""
    from transformers import masking_utils

    module: ModuleType = masking_utils
    return module


@contextmanager
def _never_packed() -> Iterator[None]:
    """Within it transformers makes no mask of positions. Where one is not followed by the next it
    takes them for several samples in a row; they are a rank's chunks of one sample."""
    before = getattr(masks(), PACKED, None)
    if before is None:  # an older transformers does not look at them
        yield
        return
    setattr(masks(), PACKED, never_packed)
    try:
        yield
    finally:
        setattr(masks(), PACKED, before)


def never_packed(position_ids: Tensor) -> None:
    """Stand in for transformers' reading of positions: no two samples are in one row."""


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether transformers made it, or it is of a class that is made here of theirs."""
    return _BASE in {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}


def gives_objects(module: nn.Module) -> bool:
    """Return whether it is a causal language model as transformers makes it, whose forward gives an
    object that has the logits."""
    return is_of_transformers(module) and not getattr(type(module), _IS_PLAIN, False)


def to_logits(module: nn.Module) -> None:
    """Let a model of transformers give logits of tokens. It is changed in place, as torch's
    fully_shard changes what it wraps. Raises SpecError for one that makes no logits."""
    if not callable(getattr(module, "get_output_embeddings", None)) or (
        module.get_output_embeddings() is None
    ):
        finding = f"{type(module).__name__} of transformers has no head, and so no logits"
        raise refused("model", finding, "give a causal language model: AutoModelForCausalLM")
    _require_plain_loss(type(module), module.config, "model.config")
    kind: Any = type(module)
    module.__class__ = _with_logits(kind)


@cache
def _with_logits(named: type) -> type:
    """`named`, whose forward takes tokens and gives logits. Where the tokens are not the first of
    their samples it is given their positions [1, T] too."""

    class Logits(named):
        def forward(self, tokens_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
            given = {} if position_ids is None else {"position_ids": position_ids}
            with _never_packed() if given else nullcontext():
                output = super().forward(input_ids=tokens_BT, use_cache=False, **given)
            logits: Tensor = output.logits
            return logits

    setattr(Logits, _IS_PLAIN, True)
    Logits.__name__ = Logits.__qualname__ = named.__name__
    Logits.__module__ = named.__module__  # whose source transformers reads for what it supports
    return Logits


def _class_of(name: str) -> Any:
    """The class of a causal language model, by its own name or by its model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    classes = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    kinds = {named: kind for kind, named in reversed(classes.items()) if isinstance(named, str)}
    kind = kinds.get(name, name.replace("-", "_"))
    if kind not in classes or kind not in CONFIG_MAPPING:
        finding = f"transformers has no causal language model {name!r}"
        near = near_word(name, [*classes, *kinds])
        raise refused("model.hf", finding, near or "name a class like LlamaForCausalLM")
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
    except (ImportError, AttributeError) as error:
        finding = f"transformers cannot give {name}: {_line(error)}"
        raise refused("model.hf", finding, "install what it names") from error


def _config(named: Any, model: HuggingFaceModel) -> Any:
    """Build the class's config from the spec's fields.

    Raises:
        SpecError: with all faults: fields that the class does not have, and values that it rejects.
    """
    kind, chosen = named.config_class, taken(named, model.config)
    faults, fields = [*chosen.faults], {**chosen.fields}
    attention, _ = _KINDS[_attention(named, model)]
    own = {_ATTENTION: attention, **_experts(fields.get(EXPERTS)), **_FIXED}
    while True:  # each attempt names one field, which the next leaves out
        try:
            with boundary(lambda error: _rejected(kind, error, fields)):
                config = kind(**{**fields, **own})
            break
        except SpecError as error:
            faults += error.faults
            field = error.faults[0].place.removeprefix("model.config").removeprefix(".")
            if field not in fields:
                break
            del fields[field]
    if faults:
        raise SpecError(*faults)
    return config


def _rejected(kind: type, error: BaseException, fields: Mapping[str, object]) -> Fault:
    """Return the fault of a value that a config rejects, at the field that the error names."""
    fault = _unfit(f"{kind.__name__} does not take it: {_line(error)}")
    named = _FIELD.search(_line(error))
    if named is None or named[1] not in fields:
        return fault
    return fault._replace(place=f"{fault.place}.{named[1]}")


def _experts(given: object) -> dict[str, object]:
    """How layers of experts compute; nothing of a transformers that has no choice."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
    except ImportError:
        return {}
    return experts_setting(ALL_EXPERTS_FUNCTIONS.register, grouped_mm_experts_forward, given)


def _line(error: BaseException) -> str:
    """An error's message on one line; its class, where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
