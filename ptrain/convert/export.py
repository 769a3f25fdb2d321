"""Export of a checkpoint to a folder that Transformers loads.

The folder has safetensors, config.json, and the tokenizer files of the model. A model of user code
is exported as safetensors with the names of its parameters.

At most one file's tensors are in memory at a time, and the folder appears atomically.

A model with PEFT adapters is exported with the adapters merged into their layers, as a Transformers
folder, or the adapters alone are exported, as a PEFT folder. Both need the full model in memory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ptrain.convert.saved import SavedModel, token_origin
from ptrain.errors import PtrainError, SpecError, input_error, library
from ptrain.facts.parameters import OF_VOCABULARY
from ptrain.files import missing_space, user_mode
from ptrain.models.initialize import StoredParts, holds_buffers, kept_buffers, stored_rows
from ptrain.models.pretrained import (
    INDEX,
    WHOLE,
    PretrainedFolder,
    build_meta_module,
    config_of_class,
)
from ptrain.models.published_config import StoredTensor, stored_tensor
from ptrain.report.table import model_name
from ptrain.spec.block import BlockOptions
from ptrain.spec.model import Attention, ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.published import config_of, load_kinds, read_config
from ptrain.spec.resolve_sections import ARCHITECTURES, CONFIG, shape_of
from ptrain.spec.spec import Spec
from ptrain.spec.write import keys_of_shape
from ptrain.units import group_by_key

_CONFIG = "peft_config"  # attribute that peft sets on a module with adapters
_ADAPTER = "default"  # peft's default name of an adapter
_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."  # as PeftModel saves them


class Adapters(StrEnum):
    """The form in which adapters are exported."""

    MERGED = "merged"
    ALONE = "alone"


def write_adapters(
    saved: SavedModel, to: Path, how: Adapters, *, allow_import: bool
) -> tuple[str, int, int, str]:
    """Write a model with adapters to a folder. The full model is in memory.

    Args:
        saved: The checkpoint.
        to: An existing folder.
        how: The form of the adapters.
        allow_import: Allow user code to run, which builds the model.

    Returns:
        The class that contains the adapters, the number of tensors written, their bytes, and the
        folder or hub name that the class was loaded from ("" if unknown).

    Raises:
        SpecError: The model has no adapters, or cannot be built (`SavedModel.build`).
    """
    module, _ = saved.build(allow_import=allow_import)
    values = {name: saved.load_parameter(module, name) for name in saved.parameters}
    module.load_state_dict(values, strict=False)
    adapted = _find_adapted_module(module)
    write = _write_merged if how is Adapters.MERGED else _write_adapters_only
    tensors = [*write(adapted, to)]
    size = sum(tensor.nbytes for tensor in tensors)
    base = getattr(adapted, "name_or_path", None)  # what transformers' from_pretrained was given
    return type(adapted).__name__, len(tensors), size, str(base or "")


def _find_adapted_module(module: nn.Module) -> nn.Module:
    """Return the module that contains PEFT adapters. Raises SpecError without one."""
    for part in module.modules():
        if isinstance(getattr(part, _CONFIG, None), dict):
            return part
    raise _adapters_error(f"{type(module).__name__} has no PEFT adapters")


@torch.no_grad()
def _write_merged(adapted: Any, to: Path) -> Iterator[torch.Tensor]:
    """Merge the adapters, write the model, and yield its parameters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not hasattr(adapted, "save_pretrained"):
        raise _adapters_error(f"{type(adapted).__name__} is not a class of Transformers")
    for name, layer in list(adapted.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            path, _, attribute = name.rpartition(".")
            # The layer of PEFT is replaced by the layer in it, so that names and classes are the
            # published ones.
            setattr(adapted.get_submodule(path), attribute, layer.get_base_layer())
    delattr(adapted, _CONFIG)
    adapted.save_pretrained(to)
    yield from adapted.parameters()


def _write_adapters_only(adapted: Any, to: Path) -> Iterator[torch.Tensor]:
    """Write the adapters and their config, and yield their tensors."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = getattr(adapted, _CONFIG)
    if set(config) != {_ADAPTER}:
        raise _adapters_error(
            f"the model has the adapters {', '.join(config)}; only one named "
            f"{_ADAPTER} is supported"
        )
    tensors = {
        f"{_PREFIX}{name}": tensor.detach().contiguous()
        for name, tensor in get_peft_model_state_dict(adapted).items()
    }
    save_file(tensors, to / _WEIGHTS, metadata={"format": "pt"})
    config[_ADAPTER].save_pretrained(to)
    yield from tensors.values()


def _adapters_error(finding: str) -> SpecError:
    """Return the error of the option `--adapters`."""
    return input_error("--adapters", finding, "Remove `--adapters` to write all parameters.")


# Shape fields that affect the training but not the exported model.
_OF_TRAINING = (
    "vocab_multiple", "aux_loss", "z_loss", "capacity_factor", "document_start", "document_end",
)  # fmt: skip
_DROPOUTS = ("dropout", "embedding_dropout", "attention_dropout", "hidden_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """The config of a published architecture.

    Attributes:
        kind: The architecture, a key of `spec.published.load_kinds()`.
        config: The content of config.json.
        unsaid: Keys of the spec that change the computation and that this config cannot express.
    """

    kind: str
    config: dict[str, Any]
    unsaid: tuple[str, ...]


def published_config(model: ModelShape, *, sequence: int) -> PublishedConfig:
    """Return the config of a built-in model.

    A pretrained model keeps the other fields of the config that it was loaded with.

    Args:
        model: The model.
        sequence: The length of its training samples, in tokens.

    Raises:
        SpecError: No known class of Transformers computes this model.
    """
    before = _pretrained_config(model)
    first = str(before.get("model_type", ""))
    shape, keys = _canonical_shape(model), keys_of_shape(model)
    for kind in sorted(load_kinds(), key=lambda name: name != first):
        config = {**before, **config_of(kind, keys)}
        if _is_same(config, shape):
            size = "n_positions" if kind == "gpt2" else "max_position_embeddings"
            longest = 0 if kind == "gpt2" else int(before.get(size, 0))  # of the starting folder
            config[size] = max(sequence, longest)
            unsaid = tuple(name for name in _OF_TRAINING[3:] if getattr(model, name) is not None)
            return PublishedConfig(kind=kind, config=config, unsaid=unsaid)
    raise input_error(
        "model",
        "no class of Transformers known to ptrain matches this model",
        f"Supported: models like {', '.join(load_kinds())}.",
    )


def _is_same(config: dict[str, Any], shape: ModelShape) -> bool:
    """Return True if a config describes this shape."""
    published = read_config(config)
    read = None if published.faults else shape_of(published.keys)
    return read is not None and _canonical_shape(read) == shape


def _canonical_shape(shape: ModelShape) -> ModelShape:
    """Return a shape in canonical form, without settings that only training uses."""
    usual = {spot.name: spot.default for spot in fields(BlockOptions)}
    changes: dict[str, Any] = {name: usual[name] for name in (*_OF_TRAINING, *_DROPOUTS)}
    scale = shape.attention_scale
    return replace(
        shape,
        **changes,
        own_head_dim=shape.head_dim,
        attention=Attention.SDPA,
        pretrained=None,
        attention_scale=shape.head_dim**-0.5 if scale is None else round(scale, 12),
        expert_ffn=shape.width_of_expert if shape.experts else None,
    )


def _pretrained_config(shape: ModelShape) -> dict[str, Any]:
    """Return the config of the model's pretrained folder without `rope_parameters`; {} without one.

    Old files have two fields for rotary embeddings, new ones have `rope_parameters`.

    Raises:
        PtrainError: The config can no longer be read.
    """
    if shape.pretrained is None:
        return {}
    try:
        config = json.loads((Path(shape.pretrained) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PtrainError(f"error: {shape.pretrained} is no longer readable: {error}") from error
    return {name: value for name, value in config.items() if name != "rope_parameters"}


Stored = StoredTensor | StoredParts


@dataclass(frozen=True, slots=True, kw_only=True)
class FileForm:
    """The form of an exported model.

    Attributes:
        architecture: The class, or the user function of a model that is no known class.
        config: The content of config.json; empty for a user function.
        stored: Returns the form of a parameter in files, by its name.
        buffers: Buffers of the pretrained files, which checkpoints do not contain.
        unsaid: Keys of the spec that the config cannot express.
        rows: The number of rows to write of a parameter, by its name; its other rows are padding.
    """

    architecture: str
    config: dict[str, Any]
    stored: Callable[[str], Stored]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)


def export_form(saved: SavedModel, *, allow_import: bool) -> FileForm:
    """Return the form in which a model is exported.

    Args:
        saved: The checkpoint, whose parameters are not loaded.
        allow_import: Allow user code to run, which finds the buffers of a custom model.

    Raises:
        SpecError: No known class of Transformers computes the model, or user code must run and
            `allow_import` is False.
    """
    match saved.spec.model:
        case ModelShape() as shape:
            published = published_config(shape, sequence=saved.spec.batch.sequence)
            return FileForm(
                architecture=published.config[ARCHITECTURES][0],
                config=published.config,
                stored=partial(stored_tensor, published.kind, shape=shape),
                unsaid=published.unsaid,
                rows=dict.fromkeys(OF_VOCABULARY, shape.vocab),
            )
        case ExternalModel() as model:
            return FileForm(
                architecture=model_name(saved.spec),
                config={},
                stored=lambda name: StoredTensor(names=(name,)),
                buffers=_pretrained_buffers(model, saved, allow_import=allow_import),
            )
        case HuggingFaceModel() as model:
            return _class_form(model, saved)
        case other:
            assert_never(other)


def _pretrained_buffers(
    model: ExternalModel, saved: SavedModel, *, allow_import: bool
) -> dict[str, Tensor]:
    """Return the buffers that a model of user code has from its pretrained folder.

    The model is built, which runs its code, only if the folder has tensors that the checkpoint
    lacks, or no longer exists.
    """
    if saved.gone is None:
        folder = model.pretrained
        if folder is None or not (
            PretrainedFolder(Path(folder)).file_of.keys() - saved.parameters.keys()
        ):
            return {}
    _, buffers = saved.build(allow_import=allow_import)
    # One may be a view, or of another's memory, which a file cannot have.
    return {
        name: buffer.clone(memory_format=torch.contiguous_format)
        for name, buffer in buffers.items()
    }


def _class_form(model: HuggingFaceModel, saved: SavedModel) -> FileForm:
    """Return the form of a class of Transformers."""
    module, config = build_meta_module(model), config_of_class(model)
    rows = stored_rows(module)
    saved.require_folder(needed=holds_buffers(module))
    return FileForm(
        architecture=config[ARCHITECTURES][0],
        config=config,
        stored=lambda name: StoredParts(tuple(rows[name])),
        buffers=kept_buffers(module, model.pretrained) if model.pretrained else {},
    )


FILE_BYTES = 4 * 2**30  # maximum size of a weight file, and of one read
# Any of these files has a vocabulary; the others refine the tokenizer.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER = (
    *_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "merges.txt", "chat_template.jinja",
)  # fmt: skip
_ANSWERS = "generation_config.json"  # of the model, and not of its tokenizer
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export.

    Attributes:
        step: The step of the checkpoint.
        folder: The folder.
        architecture: The class, or the user function.
        tensors: The number of tensors.
        size: Their bytes.
        copied: The names of the copied tokenizer files.
        unsaid: Keys of the spec that the config cannot express.
        gone: The pretrained folder, if it no longer exists.
        no_tokenizer: The reason why the folder has no tokenizer, "" if it has one.
    """

    step: int
    folder: Path
    architecture: str
    tensors: int
    size: int
    copied: tuple[str, ...]
    unsaid: tuple[str, ...]
    gone: Path | None
    no_tokenizer: str


def export_checkpoint(
    run: Path,
    to: Path,
    step: int | None = None,
    *,
    allow_import: bool = False,
    adapters: Adapters | None = None,
) -> ExportResult:
    """Export a checkpoint to a new folder.

    Args:
        run: The run folder.
        to: The folder to create.
        step: The step of the checkpoint. None: the newest.
        allow_import: Allow user code to run.
        adapters: The form of PEFT adapters. None: write all parameters under the model's names.

    Raises:
        PtrainError: The run has no sound checkpoint, the folder exists or cannot be written, or
            user code must run and `allow_import` is False.
    """
    if os.path.lexists(to):
        raise input_error("--to", f"{to} already exists", "Use the name of a new folder.")
    saved = SavedModel(run, step)
    spec = saved.spec
    unsaid: tuple[str, ...] = ()
    if isinstance(spec.model, ModelShape) and spec.model.lora_rank is not None:
        finding = "not supported yet: exporting the adapters of a built-in model"
        raise input_error("model.lora_rank", finding, "Use a function with adapters of peft.")
    if adapters is None and spec.frozen.dtype is not None:
        finding = f"not supported yet: exporting a base that is stored in {spec.frozen.dtype}"
        remedy = "Use `--adapters alone`, or `--adapters merged`."
        raise input_error("frozen.dtype", finding, remedy)
    if adapters is None:
        form = export_form(saved, allow_import=allow_import)
        unsaid, write = form.unsaid, partial(_write_model, saved, form)
    else:
        write = partial(write_adapters, saved, how=adapters, allow_import=allow_import)
    # In the same folder, because a rename across file systems is not atomic.
    unfinished = to.with_name(f".{to.name}.tmp-{secrets.token_hex(4)}")
    needed = sum(map(_tensor_bytes, saved.parameters.values()))
    try:
        if adapters is not Adapters.ALONE and (problem := missing_space(to, needed)):
            raise OSError(problem)
        unfinished.mkdir(parents=True)
        architecture, tensors, size, base = write(unfinished)
        copied = tuple(_copy_tokenizer(spec, base, unfinished))
        for file in unfinished.iterdir():  # safetensors writes files that only the user reads
            file.chmod(user_mode())
        # Last, so that a folder with this name is complete.
        unfinished.rename(to)
    except OSError as error:
        raise input_error(
            "--to", f"{to} cannot be written: {error}", "Use another folder."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ExportResult(
        step=saved.step,
        folder=to,
        architecture=architecture,
        tensors=tensors,
        size=size,
        copied=copied,
        unsaid=unsaid,
        gone=saved.gone,
        no_tokenizer=""
        if {*_VOCABULARIES} & {*copied}
        else _missing_tokenizer_reason(saved.gone, base),
    )


def _missing_tokenizer_reason(gone: Path | None, base: str) -> str:
    """Return the reason why no tokenizer was copied."""
    if gone is not None:
        return f"{gone}, the folder of the pretrained weights, does not exist any more"
    if base:
        return f"{base}, the source of the pretrained weights, is not a folder with tokenizer files"
    return "the spec of the run has no folder with tokenizer files"


def _write_model(saved: SavedModel, form: FileForm, to: Path) -> tuple[str, int, int, str]:
    """Write all weights and the config to a folder.

    Returns:
        The class, the number of tensors, their bytes, and "" as the source of a pretrained class.
    """
    files = [*_split_into_files(_read_groups(saved.parameters, form))]
    file_of: dict[str, str] = {}
    size, dtypes = 0, set[torch.dtype]()
    for number, group in enumerate(files, 1):
        name = WHOLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        loaded = saved.load(ours for ours, _ in group)
        own = {n: x[: form.rows[n]] if n in form.rows else x for n, x in loaded.items()}
        tensors = _published_tensors(own, group)
        dtypes |= {tensor.dtype for tensor in tensors.values()}
        tensors |= form.buffers if number == 1 else {}
        _write_tensors(to / name, tensors)
        file_of |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        _write_json(to / INDEX, {"metadata": {"total_size": size}, "weight_map": file_of})
    if form.config:
        (dtype,) = dtypes
        said = {key: value for key, value in form.config.items() if key != "torch_dtype"}
        _write_json(to / CONFIG, {**said, "dtype": _DTYPES.get(dtype, str(dtype)[6:])})
    return form.architecture, len(file_of), size, ""


Group = list[tuple[str, Stored]]  # parameters by name that share a stored tensor


def _read_groups(
    saved: Mapping[str, TensorStorageMetadata], form: FileForm
) -> list[tuple[Group, int]]:
    """Return the parameters that must be read together, with their bytes.

    Parameters that share tensors in the files belong together.
    """
    stored = ((name, form.stored(name)) for name in saved)
    by_names = group_by_key((of_files.names, (name, of_files)) for name, of_files in stored)
    return [
        (group, sum(_tensor_bytes(saved[name]) for name, _ in group)) for group in by_names.values()
    ]


def _tensor_bytes(entry: TensorStorageMetadata) -> int:
    """Return the bytes of a parameter."""
    size: int = entry.size.numel() * entry.properties.dtype.itemsize
    return size


def _split_into_files(groups: Iterable[tuple[Group, int]]) -> Iterator[Group]:
    """Yield the parameters of each file, up to FILE_BYTES per file."""
    file, size = Group(), 0
    for group, more in groups:
        if file and size + more > FILE_BYTES:
            yield file
            file, size = [], 0
        file, size = [*file, *group], size + more
    yield file


def _published_tensors(
    tensors: Mapping[str, torch.Tensor], group: Group
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, with the sections of a tensor concatenated."""
    written: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    dims: dict[str, int] = {}
    for name, of_files in group:
        for theirs, tensor in of_files.to_file_tensors(tensors[name]).items():
            if of_files.section is None:
                written[theirs] = tensor.contiguous()
            else:
                parts.setdefault(theirs, {})[of_files.section.number] = tensor
                dims[theirs] = -1 if of_files.is_transposed else 0
    for theirs, by_number in parts.items():
        sections = [by_number[number] for number in sorted(by_number)]
        written[theirs] = torch.cat(sections, dim=dims[theirs])
    return written


def _copy_tokenizer(spec: Spec, base: str, to: Path) -> Iterator[str]:
    """Copy the tokenizer files and yield their names.

    They come from the pretrained folder, else from the folder of the tokenizer of the token files.
    """
    began = [Path(folder) for folder in (spec.model.pretrained, base) if folder]
    origin = token_origin(spec.data)
    is_usable = origin is not None and not origin.is_of_bytes and not origin.has_changed
    folders = [*began, *([Path(origin.tokenizer).parent] if origin and is_usable else [])]
    for names, places in ((_TOKENIZER, folders), ((_ANSWERS,), began)):
        needed = _VOCABULARIES if names is _TOKENIZER else names
        having = (place for place in places if any((place / name).is_file() for name in needed))
        for source in (folder / name for folder in [*having][:1] for name in names):
            if source.is_file():
                shutil.copyfile(source, to / source.name)
                yield source.name


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file. Errors of the library (a full disk) are raised as OSError."""
    use = "writing the files needs the safetensors library"
    safetensors = library("safetensors.torch", "ptrain export", use)
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
