"""Export a checkpoint as a folder that transformers loads: safetensors, config.json, and the
tokenizer files that the model came with. A user's own model is exported as safetensors with its
own names.

At most one file's tensors are in memory at a time, and the folder appears complete or not at all.

A model with peft's adapters is exported with the adapters merged into their layers, as a folder of
transformers, or as the adapters alone, as one of peft.
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
from ptrain.errors import PtrainError, SpecError, library, refused
from ptrain.models.initialize import StoredParts, holds_buffers, kept_buffers, stored_rows
from ptrain.models.pretrained import INDEX, WHOLE, PretrainedFolder, config_of_class, unreal
from ptrain.models.published_config import StoredTensor, stored
from ptrain.report.heading import model_name
from ptrain.spec.block import BlockOptions
from ptrain.spec.model import Attention, ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.published import config_of, kinds, read_config
from ptrain.spec.resolve_sections import ARCHITECTURES, CONFIG, shape_of
from ptrain.spec.spec import Spec
from ptrain.spec.write import keys_of_shape
from ptrain.units import grouped

_CONFIG = "peft_config"  # peft leaves it on the module that it puts adapters into
_ADAPTER = "default"  # its name of the adapter where nobody gives one
_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."  # as PeftModel saves them


class Adapters(StrEnum):
    MERGED = "merged"
    ALONE = "alone"


def write_adapters(
    saved: SavedModel, to: Path, how: Adapters, *, allow_import: bool
) -> tuple[str, int, int, str]:
    """Write a checkpoint's model to the folder `to`, which is there; return the class that its
    adapters were put into, how many tensors were written, and of how many bytes, and the folder or
    hub name that the class was loaded from, if any. The whole model is in memory. Raises SpecError
    for a model without adapters, and what `SavedModel.built` raises."""
    module, _ = saved.built(allow_import=allow_import)
    module.load_state_dict(saved.load(saved.parameters), strict=False)
    adapted = _adapted(module)
    write = _write_merged if how is Adapters.MERGED else _write_alone
    tensors = [*write(adapted, to)]
    size = sum(tensor.nbytes for tensor in tensors)
    base = getattr(adapted, "name_or_path", None)  # what transformers' from_pretrained was given
    return type(adapted).__name__, len(tensors), size, str(base or "")


def _adapted(module: nn.Module) -> nn.Module:
    """Return what peft put adapters into."""
    for part in module.modules():
        if isinstance(getattr(part, _CONFIG, None), dict):
            return part
    raise _refused(f"{type(module).__name__} has no PEFT adapters")


@torch.no_grad()
def _write_merged(adapted: Any, to: Path) -> Iterator[torch.Tensor]:
    """Write the class, in whose layers the adapters are; yield its parameters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not hasattr(adapted, "save_pretrained"):
        raise _refused(f"{type(adapted).__name__} is not a class of Transformers")
    for name, layer in list(adapted.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            path, _, attribute = name.rpartition(".")
            setattr(adapted.get_submodule(path), attribute, layer.get_base_layer())
    delattr(adapted, _CONFIG)
    adapted.save_pretrained(to)
    yield from adapted.parameters()


def _write_alone(adapted: Any, to: Path) -> Iterator[torch.Tensor]:
    """Write the adapters and their config; yield their tensors."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = getattr(adapted, _CONFIG)
    if set(config) != {_ADAPTER}:
        raise _refused(
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


def _refused(finding: str) -> SpecError:
    return refused("--adapters", finding, "Remove `--adapters` to write all parameters.")


# What a training does beside what the model computes afterwards, in the words of a shape.
_OF_TRAINING = ("aux_loss", "z_loss", "capacity_factor", "document_start", "document_end")
_DROPOUTS = ("dropout", "embedding_dropout", "attention_dropout", "hidden_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """What is written. `kind`: one of spec.published. `unsaid`: keys of the spec that no config of
    this kind can say, and that change what the model computes."""

    kind: str
    config: dict[str, Any]
    unsaid: tuple[str, ...]


def published_config(model: ModelShape, *, sequence: int) -> PublishedConfig:
    """Return the config of a model that was trained on samples of so many tokens. What it begins
    with has a config of its own, whose other fields stay. Raises SpecError for a model that no
    class of transformers is known to be."""
    before = _before(model)
    first = str(before.get("model_type", ""))
    shape, keys = _of_weights(model), keys_of_shape(model)
    for kind in sorted(kinds(), key=lambda name: name != first):
        config = {**before, **config_of(kind, keys)}
        if _is_same(config, shape):
            size = "n_positions" if kind == "gpt2" else "max_position_embeddings"
            longest = 0 if kind == "gpt2" else int(before.get(size, 0))  # of what it began with
            config[size] = max(sequence, longest)
            unsaid = tuple(name for name in _OF_TRAINING[2:] if getattr(model, name) is not None)
            return PublishedConfig(kind=kind, config=config, unsaid=unsaid)
    raise refused(
        "model",
        "no class of Transformers known to ptrain matches this model",
        f"Supported: models like {', '.join(kinds())}.",
    )


def _is_same(config: dict[str, Any], shape: ModelShape) -> bool:
    """Return whether a config says all that a shape does."""
    published = read_config(config)
    read = None if published.faults else shape_of(published.keys)
    return read is not None and _of_weights(read) == shape


def _of_weights(shape: ModelShape) -> ModelShape:
    """Return a shape without what training alone needs, and with each thing said in one way."""
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


def _before(shape: ModelShape) -> dict[str, Any]:
    """Return the config of the folder that a model begins with, without rotations, of which newer
    files have one field and older ones two. Raises PtrainError where it cannot be read any more."""
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
    """`architecture`: the class, or the function of a model that no class is, whose `config` is
    empty. `stored`: how files have a parameter, by its name. `buffers` belong to the files, and no
    checkpoint has them. `unsaid`: keys of the spec that the config cannot say."""

    architecture: str
    config: dict[str, Any]
    stored: Callable[[str], Stored]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()


def form_of(saved: SavedModel, *, allow_import: bool) -> FileForm:
    """Return the form of a trained model. Raises SpecError for one that no class of transformers is
    known to be, and for one of the user's own that must be built, without leave."""
    match saved.spec.model:
        case ModelShape() as shape:
            published = published_config(shape, sequence=saved.spec.batch.sequence)
            return FileForm(
                architecture=published.config[ARCHITECTURES][0],
                config=published.config,
                stored=partial(stored, published.kind, shape=shape),
                unsaid=published.unsaid,
            )
        case ExternalModel() as model:
            return FileForm(
                architecture=model_name(saved.spec),
                config={},
                stored=lambda name: StoredTensor(names=(name,)),
                buffers=_own_buffers(model, saved, allow_import=allow_import),
            )
        case HuggingFaceModel() as model:
            return _of_class(model, saved)
        case other:
            assert_never(other)


def _own_buffers(
    model: ExternalModel, saved: SavedModel, *, allow_import: bool
) -> dict[str, Tensor]:
    """Return the buffers that a model of the user's own has of its folder. It is built, which runs
    its code, only where the folder has, or may have had, more than what is trained."""
    if saved.gone is None:
        folder = model.pretrained
        if folder is None or not (
            PretrainedFolder(Path(folder)).file_of.keys() - saved.parameters.keys()
        ):
            return {}
    _, buffers = saved.built(allow_import=allow_import)
    # One may be a view, or of another's memory, which a file cannot have.
    return {
        name: buffer.clone(memory_format=torch.contiguous_format)
        for name, buffer in buffers.items()
    }


def _of_class(model: HuggingFaceModel, saved: SavedModel) -> FileForm:
    module, config = unreal(model), config_of_class(model)
    rows = stored_rows(module)
    saved.require_folder(needed=holds_buffers(module))
    return FileForm(
        architecture=config[ARCHITECTURES][0],
        config=config,
        stored=lambda name: StoredParts(tuple(rows[name])),
        buffers=kept_buffers(module, model.pretrained) if model.pretrained else {},
    )


FILE_BYTES = 4 * 2**30  # of weights in one file: what is read at a time
# Any of these files has a vocabulary; the others refine the tokenizer.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER = (
    *_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "merges.txt", "chat_template.jinja",
)  # fmt: skip
_ANSWERS = "generation_config.json"  # of the model, and not of its tokenizer
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: of which step, to which folder, as which class (or the user's function);
    how many tensors and bytes of weights; the `copied` files; keys of the spec that its config
    could not say; the folder that the model began with, if it is `gone`; and the reason why the
    folder has no tokenizer, "" if it has one."""

    step: int
    folder: Path
    architecture: str
    tensors: int
    size: int
    copied: tuple[str, ...]
    unsaid: tuple[str, ...]
    gone: Path | None
    no_tokenizer: str


def export(
    run: Path,
    to: Path,
    step: int | None = None,
    *,
    allow_import: bool = False,
    adapters: Adapters | None = None,
) -> Exported:
    """Write the newest checkpoint of a run, or that of `step`, to the new folder `to`; of a model
    with peft's `adapters` merged into its layers, or these alone. Raises
    PtrainError for a run without one that is sound, for a folder that is there already, where it
    cannot be written, and for a model whose code must run first, without leave."""
    if os.path.lexists(to):
        raise refused("--to", f"{to} already exists", "Use the name of a new folder.")
    saved = SavedModel(run, step)
    spec = saved.spec
    unsaid: tuple[str, ...] = ()
    if adapters is None:
        form = form_of(saved, allow_import=allow_import)
        unsaid, write = form.unsaid, partial(_write_model, saved, form)
    else:
        write = partial(write_adapters, saved, how=adapters, allow_import=allow_import)
    unfinished = to.with_name(f".{to.name}.tmp-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        architecture, tensors, size, base = write(unfinished)
        copied = tuple(_copy_tokenizer(spec, base, unfinished))
        unfinished.rename(to)
    except OSError as error:
        raise refused("--to", f"{to} cannot be written: {error}", "Use another folder.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(
        step=saved.step,
        folder=to,
        architecture=architecture,
        tensors=tensors,
        size=size,
        copied=copied,
        unsaid=unsaid,
        gone=saved.gone,
        no_tokenizer="" if {*_VOCABULARIES} & {*copied} else _reason(saved.gone, base),
    )


def _reason(gone: Path | None, base: str) -> str:
    """Return the reason why no tokenizer was copied."""
    if gone is not None:
        return f"{gone}, the folder of the pretrained weights, does not exist any more"
    if base:
        return f"{base}, the source of the pretrained weights, is not a folder with tokenizer files"
    return "the spec of the run has no folder with tokenizer files"


def _write_model(saved: SavedModel, form: FileForm, to: Path) -> tuple[str, int, int, str]:
    """Return the class that was written, how many tensors, of how many bytes, and no base."""
    files = [*_by_file(_groups(saved.parameters, form))]
    file_of: dict[str, str] = {}
    size, dtypes = 0, set[torch.dtype]()
    for number, group in enumerate(files, 1):
        name = WHOLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = _published(saved.load(ours for ours, _ in group), group)
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


Group = list[tuple[str, Stored]]  # parameters by name that stand in the same of theirs


def _groups(saved: Mapping[str, TensorStorageMetadata], form: FileForm) -> list[tuple[Group, int]]:
    """Return what has to be read together, with its bytes."""
    stored = ((name, form.stored(name)) for name in saved)
    by_names = grouped((of_files.names, (name, of_files)) for name, of_files in stored)
    return [(group, sum(_bytes(saved[name]) for name, _ in group)) for group in by_names.values()]


def _bytes(entry: TensorStorageMetadata) -> int:
    size: int = entry.size.numel() * entry.properties.dtype.itemsize
    return size


def _by_file(groups: Iterable[tuple[Group, int]]) -> Iterator[Group]:
    """Yield what stands in each file, as much as it may hold."""
    file, size = Group(), 0
    for group, more in groups:
        if file and size + more > FILE_BYTES:
            yield file
            file, size = [], 0
        file, size = [*file, *group], size + more
    yield file


def _published(tensors: Mapping[str, torch.Tensor], group: Group) -> dict[str, torch.Tensor]:
    """Return theirs by name, sections side by side."""
    written: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    dims: dict[str, int] = {}
    for name, of_files in group:
        for theirs, tensor in of_files.write(tensors[name]).items():
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
    """Copy the tokenizer of the folder that the model began with, or else of the folder that its
    token files were made with; yield the names of the files."""
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
    """The library tells of a full disk by an error of its own."""
    use = "writing the files needs the safetensors library"
    safetensors = library("safetensors.torch", "ptrain export", use)
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
