"""Build causal language models of transformers, and read published weights from safetensors.

A rank reads only the elements that it keeps, some rows at a time, so that it never holds more than
these rows in addition.

A model is built from a config alone, by its class name or model type. The class is a subclass of
transformers' with `forward(tokens_BT) -> logits_BTV`, so that parameters keep their names.
transformers is imported only to build such a model, because the import takes seconds.

Files are checked before any weight is read: every tensor of the model must exist once, with its
shape, in a dtype of weights, in a file next to the index. No code that comes with weights is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, SpecError, input_error
from ptrain.facts.parameters import OF_VOCABULARY, is_of_adapter
from ptrain.internals.fakes import detect_fake_mode
from ptrain.internals.part import replace_attributes
from ptrain.models.boundary import convert_exceptions
from ptrain.models.meta import has_memory
from ptrain.models.published_config import (
    EXPERTS,
    StoredPiece,
    StoredTensor,
    experts_setting,
    faults_of_class,
    select_fields,
    stored_tensor,
)
from ptrain.models.window import Window, split_window
from ptrain.spec.model import Attention, HuggingFaceModel, ModelShape
from ptrain.spec.resolve_sections import CONFIG
from ptrain.spec.slips import suggest_word
from ptrain.spec.spec import require_transformers
from ptrain.spec.text import require_file

# Fields that ptrain sets: no key-value cache. Attention and dtypes come from the spec.
_FIXED = {"use_cache": False}
_ATTENTION = "attn_implementation"
_KINDS = {
    Attention.SDPA: ("sdpa", "_supports_sdpa"),
    Attention.EAGER: ("eager", ""),  # every class has it
    Attention.FLEX: ("flex_attention", "_supports_flex_attn"),
}
_BASE = "transformers.modeling_utils.PreTrainedModel"
_IS_PLAIN = "_gives_logits"  # attribute of subclasses created here
PACKED = "find_packed_sequence_indices"  # a function of `masks_module()`
_FIELD = re.compile(r"field '(\w+)'")  # in errors of strict dataclasses (newer versions)
# Fields of a config with which a class adds a term to its loss. It does so only if it is given
# labels; ptrain gives none, and computes the loss of the logits.
_ROUTERS = "output_router_logits"
_MORE_LOSS = {_ROUTERS: False, "z_loss_coefficient": 0.0}
_LAYERS = "num_hidden_layers"  # transformers' standard name; a config may map another to it


def build_hugging_face(model: HuggingFaceModel, *, sequence: int) -> nn.Module:
    """Build a model of transformers; raise SpecError for an unknown class or an invalid config."""
    require_transformers(model)
    try:
        named = _class_of(model.hf)
    except SpecError as error:  # a class with custom code is often unknown too
        raise SpecError(*faults_of_class(model.config), *error.faults) from error
    config = _build_config(named, model)
    _require_plain_loss(named, config, "model.config")
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < sequence:
        raise input_error(
            "model.config",
            f"max_position_embeddings is {positions}, but a sample has {sequence} tokens",
            f"Set `max_position_embeddings` to {sequence} or more.",
        )
    with convert_exceptions(partial(_build_fault, named, _choose_attention(named, model))):
        module: nn.Module = _with_logits(named)(config)
        is_flex = model.attention is Attention.FLEX  # a CPU would compile it for minutes
        is_real = all(has_memory(parameter) for parameter in module.parameters())
        if not is_flex and is_real and detect_fake_mode() is None:  # fakes lack some operators too
            with torch.no_grad():  # a forward pass finds inconsistent sizes
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
            finding = f"is {value}: {named.__name__} then adds a term to its loss, but ptrain "
            remedy = f"Use `{place}.{field}={off}`."
            if field == _ROUTERS:
                remedy += " Built-in MoE models support such a loss: `model.aux_loss`."
            raise input_error(f"{place}.{field}", f"{finding}trains on the logits only", remedy)


def layers_of(model: HuggingFaceModel) -> int | None:
    """Return the number of layers in the config, or None; raise SpecError as
    `build_hugging_face`."""
    require_transformers(model)
    layers = getattr(_build_config(_class_of(model.hf), model), _LAYERS, None)
    return layers if isinstance(layers, int) else None


def ignored_fields(model: HuggingFaceModel) -> tuple[str, ...]:
    """Return the fields of a full config that have no effect, each with the reason."""
    return select_fields(_class_of(model.hf), model.config).ignored


def config_of_class(model: HuggingFaceModel) -> dict[str, Any]:
    """Return the fields of the config.json of a model: its class's, and fields of the original file
    that nothing here reads. Raise SpecError as `build_hugging_face`."""
    require_transformers(model)
    named = _class_of(model.hf)
    fields: dict[str, Any] = json.loads(_build_config(named, model).to_json_string())
    said = {name: value for name, value in model.config.items() if name != EXPERTS}
    kept = {name: said.get(name, True) for name in _FIXED}  # the cache is used after training
    return {**said, **fields, **kept, "architectures": [named.__name__]}


def as_saved(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state as in its files; newer versions of transformers rename modules and
    stack experts at load. Raise SpecError if the layout in files is unknown."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # older versions keep the layout of files
        return state
    with convert_exceptions(
        lambda error: _config_field_fault(
            f"the layout of its tensors in files is unknown: {_one_line_message(error)}"
        )
    ):
        saved: dict[str, Tensor] = revert_weight_conversion(module, state)
    return saved


def build_meta_module(model: HuggingFaceModel) -> nn.Module:
    """Return the module on the meta device; raise SpecError as `build_hugging_face`."""
    require_transformers(model)
    named = _class_of(model.hf)
    config = _build_config(named, model)
    with (
        convert_exceptions(partial(_build_fault, named, _choose_attention(named, model))),
        torch.device("meta"),
    ):
        module: nn.Module = _with_logits(named)(config)
    return module


def with_layers(model: HuggingFaceModel, layers: int) -> HuggingFaceModel:
    """Return the model with `layers` layers; lists with one entry per layer are shortened."""
    kind = _class_of(model.hf).config_class
    names = (_LAYERS, kind.attribute_map.get(_LAYERS, _LAYERS))
    before = layers_of(model)

    def cut(value: object) -> object:
        return value[:layers] if isinstance(value, list) and len(value) == before else value

    config = {name: cut(value) for name, value in model.config.items() if name not in names}
    return replace(model, config={**config, names[-1]: layers}, pretrained=None)


def _choose_attention(named: type, model: HuggingFaceModel) -> Attention:
    """Return the spec's attention, else SDPA if the class supports it, as transformers chooses."""
    if model.attention is not None:
        return model.attention
    _, supported = _KINDS[Attention.SDPA]
    return Attention.SDPA if getattr(named, supported, True) else Attention.EAGER


def _build_fault(named: type, attention: Attention, error: BaseException) -> Fault:
    _, supported = _KINDS[attention]
    if not getattr(named, supported, True):
        finding, remedy = f"{named.__name__} does not support {attention}", "Use `attention=eager`."
        return Fault(place="attention", finding=finding, remedy=remedy)
    return _config_field_fault(
        f"{named.__name__} cannot be built from this config: {_one_line_message(error)}"
    )


def _config_field_fault(finding: str) -> Fault:
    return Fault(
        place="model.config", finding=finding, remedy=("Change the field that the error names.")
    )


def masks_module() -> ModuleType:
    """Return the module of transformers that makes attention masks."""
    from transformers import masking_utils

    module: ModuleType = masking_utils
    return module


def _never_packed() -> AbstractContextManager[None]:
    """Temporarily disable transformers' detection of packed samples, which takes a jump in
    positions for a new sample; here the positions are a rank's chunks of one sample."""
    looks = hasattr(masks_module(), PACKED)  # older versions have no detection
    return replace_attributes(masks_module(), **{PACKED: never_packed}) if looks else nullcontext()


def never_packed(position_ids: Tensor) -> None:
    """Replace transformers' detection of packed samples: no row has two samples."""


def is_of_transformers(module: nn.Module) -> bool:
    """Return True for a model of transformers, or of a subclass created here."""
    return _BASE in {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}


def gives_objects(module: nn.Module) -> bool:
    """Return True for a causal language model of transformers whose forward returns an object."""
    return is_of_transformers(module) and not getattr(type(module), _IS_PLAIN, False)


def to_logits(module: nn.Module) -> None:
    """Make a model of transformers return logits, by replacing its class in place. Raise SpecError
    if it has no output head."""
    if not callable(getattr(module, "get_output_embeddings", None)) or (
        module.get_output_embeddings() is None
    ):
        raise input_error(
            "model",
            f"{type(module).__name__} of Transformers has no output head and returns no logits",
            "Use a causal language model (`AutoModelForCausalLM`).",
        )
    _require_plain_loss(type(module), module.config, "model.config")
    kind: Any = type(module)
    module.__class__ = _with_logits(kind)


@cache
def _with_logits(named: type) -> type:
    """Return a subclass whose forward takes tokens and returns logits. It also takes positions [1,
    T], for tokens that are not the first of their samples."""

    class Logits(named):
        def forward(self, tokens_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
            given = {} if position_ids is None else {"position_ids": position_ids}
            with _never_packed() if given else nullcontext():
                output = super().forward(input_ids=tokens_BT, use_cache=False, **given)
            logits: Tensor = output.logits
            return logits

    setattr(Logits, _IS_PLAIN, True)
    Logits.__name__ = Logits.__qualname__ = named.__name__
    Logits.__module__ = named.__module__  # transformers reads its source to find supported features
    return Logits


def _class_of(name: str) -> Any:
    """Return the class of a causal language model, by class name or model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    classes = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    kinds = {named: kind for kind, named in reversed(classes.items()) if isinstance(named, str)}
    kind = kinds.get(name, name.replace("-", "_"))
    if kind not in classes or kind not in CONFIG_MAPPING:
        finding = f"Transformers has no causal language model {name!r}"
        near = suggest_word(name, [*classes, *kinds])
        raise input_error("model.hf", finding, near or "Use a class such as `LlamaForCausalLM`.")
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
    except (ImportError, AttributeError) as error:
        raise input_error(
            "model.hf",
            f"Transformers cannot load {name}: {_one_line_message(error)}",
            "Install the package that the error names.",
        ) from error


def _build_config(named: Any, model: HuggingFaceModel) -> Any:
    """Build the class's config from the spec's fields.

    Raises:
        SpecError: with all faults: fields that the class does not have, and values that it rejects.
    """
    kind, chosen = named.config_class, select_fields(named, model.config)
    faults, fields = [*chosen.faults], {**chosen.fields}
    attention, _ = _KINDS[_choose_attention(named, model)]
    own = {_ATTENTION: attention, **_experts_field(fields.get(EXPERTS)), **_FIXED}
    while True:  # each attempt names one field, which the next leaves out
        try:
            with convert_exceptions(lambda error: _rejected_value_fault(kind, error, fields)):
                config = kind(**{**fields, **own})
            break
        except SpecError as error:
            faults += error.faults
            field = error.faults[0].place.removeprefix("model.config").removeprefix(".")
            if field not in fields:
                break
            # Without the rejected field, the next attempt finds the next fault, so that all are
            # reported at once.
            del fields[field]
    if faults:
        raise SpecError(*faults)
    return config


def _rejected_value_fault(kind: type, error: BaseException, fields: Mapping[str, object]) -> Fault:
    """Return the fault of a value that a config rejects, at the field that the error names."""
    fault = _config_field_fault(f"{kind.__name__} rejects it: {_one_line_message(error)}")
    named = _FIELD.search(_one_line_message(error))
    if named is None or named[1] not in fields:
        return fault
    return fault._replace(place=f"{fault.place}.{named[1]}")


def _experts_field(given: object) -> dict[str, object]:
    """Return the config field for the implementation of experts; {} for older versions."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
    except ImportError:
        return {}
    return experts_setting(ALL_EXPERTS_FUNCTIONS.register, grouped_mm_experts_forward, given)


def _one_line_message(error: BaseException) -> str:
    """Return an error's message on one line, or its class name."""
    return " ".join(str(error).split()) or type(error).__name__


INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of an element
# Tensors without floating-point values are no weights, and keep their dtype in files.
_OTHERS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "C64": torch.complex64,
}
_ALL_WIDTHS = {**WIDTHS, **{name: dtype.itemsize for name, dtype in _OTHERS.items()}}
MOST_MAPPED = 2**24  # bytes of a file that are mapped at once
POSITIONS = "positions.weight"
_PLACE = "model.pretrained"
_AS_IT_IS = "Remove the size keys of the model, or use a folder with weights of these sizes."
# A bare name, so that an index cannot make ptrain read files outside of its folder.
_BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_PREFIXES = ("model.", "transformer.")
# Tables that older versions saved; they are computed, not learned.
_TABLES = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
_MOST_INDEX = 2**28  # bytes of an index; a 405B model's has 10^5


def _folder_error(folder: Path, finding: str, remedy: str = "") -> Exception:
    usual = "Use a folder of safetensors files that Transformers loads."
    return input_error(_PLACE, f"{folder}: {finding}", remedy or usual)


class PretrainedFolder:
    """The tensors of a folder by name, each with its file. `prefixes`: name prefixes that a bare
    base model lacks. Raises SpecError for files that are missing, damaged or outside the folder,
    and for tensors that occur twice."""

    def __init__(self, folder: Path, prefixes: Sequence[str] = ()) -> None:
        self.folder, self._prefixes = folder, prefixes
        safetensors = _import_safetensors()
        self._open, self._error = safetensors.safe_open, safetensors.SafetensorError
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.file_of: dict[str, str] = {}
        self.bytes_read = 0  # of tensors, not of headers
        listed = self._read_index()
        for file in dict.fromkeys(listed.values()) if listed else [WHOLE]:
            self._read_header(file)
        for name, file in (listed or {}).items():
            if self.file_of.get(name) != file:
                elsewhere = self.file_of.get(name)
                has = f"it is in {elsewhere}" if elsewhere else "no file contains it"
                raise _folder_error(folder, f"{INDEX} lists {name} in {file}, but {has}")

    def find_name(self, name: str) -> str | None:
        """Return a tensor's name in this folder, or None if it is missing."""
        bare = (name.removeprefix(prefix) for prefix in self._prefixes)
        return next((name for name in (name, *bare) if name in self.file_of), None)

    def read_piece(self, piece: StoredPiece, *dtypes: torch.dtype) -> None:
        """Write a window of a tensor to its target, rounded to each of `dtypes` in turn; a 0-d
        tensor is one row. The file is mapped again for every MOST_MAPPED bytes, since mapped pages
        count as memory of the process. A window of columns maps full rows."""
        place = torch.atleast_1d(piece.place)
        if not place.numel():
            return
        shape = self.shapes[piece.name]
        most = MOST_MAPPED // _ALL_WIDTHS[self.dtypes[piece.name]]
        for sizes, target in split_window(piece.window, place, shape, most):
            with self._open(self.folder / self.file_of[piece.name], "pt") as file:
                part = file.get_slice(piece.name)[tuple(slice(a, a + n) for a, n in sizes)]
                self.bytes_read += part.nbytes
                for dtype in dtypes:
                    part = part.to(dtype)
                target.copy_(part)

    def require_tensor(
        self, name: str, expected: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> None:
        """Raise SpecError unless a tensor has this name and shape, in a dtype of weights, or in
        `dtype` if that is no floating-point type."""
        if name not in self.file_of:
            raise _folder_error(self.folder, f"the tensor {name} is missing", _AS_IT_IS)
        if self.shapes[name] != expected:
            raise _folder_error(
                self.folder,
                f"{name} is {list(self.shapes[name])}, but the model of the spec has {expected}",
                _AS_IT_IS,
            )
        if not dtype.is_floating_point:
            if _OTHERS.get(self.dtypes[name]) != dtype:
                raise _folder_error(
                    self.folder,
                    f"{name} is {self.dtypes[name]}, but the model has {str(dtype)[6:]}",
                    "Save it in the dtype of the model.",
                )
        elif self.dtypes[name] not in WIDTHS:
            raise _folder_error(
                self.folder, f"{name} is {self.dtypes[name]}; weights must be {', '.join(WIDTHS)}"
            )

    def reject_unused(self, others: Iterable[str]) -> None:
        """Raise SpecError for tensors that the model does not use, except computed tables."""
        if surplus := sorted(name for name in others if not _TABLES.fullmatch(name)):
            raise _folder_error(
                self.folder,
                f"{len(surplus)} tensors do not belong to this model, for example {surplus[0]}",
                _AS_IT_IS,
            )

    def _read_index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        if not path.exists():
            return None
        try:
            require_file(path, _MOST_INDEX)
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _folder_error(
                self.folder, f"{INDEX} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(files, dict) or not files:
            raise _folder_error(self.folder, f"{INDEX} lists no tensors")
        for name, file in files.items():
            if not isinstance(file, str) or not _BARE.fullmatch(file):
                raise _folder_error(
                    self.folder,
                    f"{INDEX} lists {name} in {file!r}, which is not a file name in its folder",
                    "Download the folder again from a source that you trust.",
                )
        return {**files}

    def _read_header(self, file: str) -> None:
        path = self.folder / file
        if path.is_symlink() and not path.exists():
            raise _folder_error(self.folder, f"{file} is a broken link")
        if not path.is_file():
            raise _folder_error(self.folder, f"there is no {file}")
        try:
            with self._open(path, "pt") as opened:
                for name in sorted(opened.keys()):
                    if name in self.file_of:
                        raise _folder_error(
                            self.folder, f"{self.file_of[name]} and {file} both contain {name}"
                        )
                    part = opened.get_slice(name)
                    self.file_of[name] = file
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = str(part.get_dtype())
        except (OSError, ValueError, self._error) as error:
            raise _folder_error(
                self.folder, f"{file} is not a valid safetensors file: {error}"
            ) from error


class PretrainedWeights:
    """The initial parameters of a built-in model, from a folder. Raises SpecError if the folder
    does not match the model."""

    def __init__(self, shape: ModelShape) -> None:
        assert shape.pretrained is not None, "the spec has a folder"
        self._shape, self._folder = shape, PretrainedFolder(Path(shape.pretrained), _PREFIXES)
        self._kind = kind_of(Path(shape.pretrained))

    def require_parameters(self, parameters: Mapping[str, tuple[int, ...]]) -> None:
        """Raise SpecError unless the folder has exactly these parameters, by ptrain's names."""
        used: set[str] = set()
        for name, shape in parameters.items():
            of_files = self._stored_tensor(name)
            for theirs in map(self._file_name, of_files.names):
                used.add(theirs)
                expected = _file_shape(shape, of_files)
                if name == POSITIONS:
                    expected = self._with_file_positions(theirs, expected)
                elif name in OF_VOCABULARY:  # files have no padding
                    expected = (self._shape.vocab, *expected[1:])
                self._folder.require_tensor(theirs, expected)
        self._folder.reject_unused(self._folder.file_of.keys() - used - {"lm_head.weight"})

    def read_window(
        self, name: str, shape: Sequence[int], window: Window, part: Tensor, dtype: torch.dtype
    ) -> None:
        """Write a window of a parameter to `part`, rounded to `dtype`. Only the first positions are
        read, as many as a sample has; others are not trained. Rows that pad the vocabulary are
        zero."""
        if name in OF_VOCABULARY:
            (first, rows), *others = window
            count = min(max(self._shape.vocab - first, 0), rows)
            part[count:] = 0
            if not count:
                return
            window, part = ((first, count), *others), part[:count]
        for piece in self._stored_tensor(name).window_pieces(part, window):
            self._folder.read_piece(piece._replace(name=self._file_name(piece.name)), dtype)

    @property
    def bytes_read(self) -> int:
        """The bytes of tensors that this process has read."""
        return self._folder.bytes_read

    def _stored_tensor(self, name: str) -> StoredTensor:
        return stored_tensor(self._kind, name, self._shape)

    def _file_name(self, theirs: str) -> str:
        """Return a tensor's name in this folder, or its standard name if it is missing."""
        return self._folder.find_name(theirs) or theirs

    def _with_file_positions(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...]:
        """Return the expected shape with as many positions as the folder has; raise SpecError for
        fewer than a sample needs."""
        there = self._folder.shapes.get(name, expected)
        if there[1:] == expected[1:] and there[0] < expected[0]:
            raise _folder_error(
                self._folder.folder,
                f"it has {there[0]} positions, but a sample has {expected[0]} tokens",
                f"Use `batch.sequence={there[0]}` or less.",
            )
        return (*there[:1], *expected[1:])


def _file_shape(shape: tuple[int, ...], of_files: StoredTensor) -> tuple[int, ...]:
    """Return the shape in files of a parameter with this shape."""
    if of_files.is_stacked:
        return shape[1:]
    if of_files.section is not None:
        shape = (of_files.section.total, *shape[1:])
    return shape[::-1] if of_files.is_transposed else shape


@lru_cache(maxsize=4)
def weights_of(shape: ModelShape) -> PretrainedWeights:
    """Return the initial weights of a shape; raise SpecError as `PretrainedFolder`."""
    return PretrainedWeights(shape)


def require_weights(module: nn.Module, shape: ModelShape) -> None:
    """Raise SpecError unless a shape's folder has exactly the tensors of `module`."""
    weights_of(shape).require_parameters(
        {n: tuple(p.shape) for n, p in module.named_parameters() if not is_of_adapter(n)}
    )


def _import_safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise input_error(
            _PLACE,
            "reading its files needs the safetensors library, which is not installed",
            "Run `pip install safetensors`.",
        ) from error
    return safetensors


def kind_of(folder: Path) -> str:
    """Return the model type in a folder's config, which must have been checked before."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return str(config["model_type"])
