"""A checkpoint as a folder that transformers loads: safetensors, a config.json, and the files of
the tokenizer that the model came with; of a model of the user's own, safetensors with its own
names. Of the checkpoint no more is read at a time than one file holds; the folder appears whole or
not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ptrain.convert.adapters import Adapters, write_adapters
from ptrain.convert.form import FileForm, Stored, form_of
from ptrain.convert.saved import SavedModel
from ptrain.convert.vocabulary import token_origin
from ptrain.errors import refused
from ptrain.models.pretrained import INDEX, WHOLE
from ptrain.spec.resolve_sections import CONFIG
from ptrain.spec.spec import Spec

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
        raise refused("--to", f"{to} is there already", "name a folder that is not")
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
        raise refused("--to", f"{to} cannot be written: {error}", "name another folder") from error
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
        return f"{gone}, which the model began with, is there no more"
    if base:
        return f"{base}, which the model began with, is no folder with tokenizer files"
    return "the run names no folder with tokenizer files"


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
    by_names: dict[tuple[str, ...], Group] = {}
    for name in saved:
        of_files = form.stored(name)
        by_names.setdefault(of_files.names, []).append((name, of_files))
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
    safetensors = _safetensors()
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        finding = "the folder's files are safetensors, and the library is not installed"
        raise refused("ptrain export", finding, "pip install safetensors") from error
    return safetensors
