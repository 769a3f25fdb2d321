"""A rank that keeps a part of a published tensor reads only that part."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ptrain.axes.data.run.flat_target import LocalRowWriter, ParameterMembers
from ptrain.models import pretrained
from ptrain.models.initialize import InitialValues, build_model
from ptrain.models.pretrained import weights_of
from ptrain.models.window import Window, full_window, narrow_to_window
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from tests.published_folders import save_folder

pytest.importorskip("transformers")
SEQUENCE = 16
# All names as they are; outputs first and parts of a tensor; experts that are stacked.
CASES = ("llama", "gpt2", "phi3", "mixtral")


def shape_of(folder: Path) -> ModelShape:
    batch = f"batch={{global: 2, micro: 1, sequence: {SEQUENCE}}}"
    words = (f"model={{pretrained: {folder}}}", "mesh={}", "placement={}", batch)
    return load("ddp", words).spec.model


def random_window(random: Random, shape: tuple[int, ...]) -> Window:
    """Any window, an empty one too."""
    window = []
    for size in shape:
        first, behind = sorted((random.randint(0, size), random.randint(0, size)))
        window.append((first, behind - first))
    return tuple(window)


@pytest.mark.parametrize("mapped", [64, 2**24], ids=["row by row", "at once"])
@pytest.mark.parametrize("case", CASES)
def test_any_window_of_a_tensor_equals_the_full_tensors_window(
    case: str, mapped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MOST_MAPPED", mapped)
    shape = shape_of(save_folder(case, tmp_path / "in"))
    module = build_model(shape, sequence=SEQUENCE)
    values, random = InitialValues(module=module, seed=0), Random(0)
    for name, parameter in module.named_parameters():
        sizes = tuple(parameter.shape)
        everything = torch.full(sizes, math.nan)
        values.write_window(name, sizes, full_window(sizes), everything)
        assert not everything.isnan().any(), name
        for window in (random_window(random, sizes) for _ in range(4)):
            part = torch.full([size for _, size in window], math.nan)
            before = weights_of(shape).bytes_read
            values.write_window(name, sizes, window, part)
            assert torch.equal(part, narrow_to_window(everything, window)), (name, window)
            assert weights_of(shape).bytes_read - before == part.nbytes


def test_a_master_copy_starts_with_the_computed_values(tmp_path: Path) -> None:
    shape = shape_of(save_folder("llama", tmp_path / "in"))
    module = build_model(shape, sequence=SEQUENCE)
    name, sizes = "embed.weight", tuple(module.embed.weight.shape)
    parts = [torch.empty(sizes) for _ in range(2)]
    for part, dtype in zip(parts, (torch.float32, torch.bfloat16), strict=True):
        InitialValues(module=module, seed=0, dtype=dtype).write_window(
            name, sizes, full_window(sizes), part
        )
    assert torch.equal(parts[1], parts[0].bfloat16().float()) and not torch.equal(*parts)


def test_a_drawn_tensor_has_the_same_windows() -> None:
    module = build_model(load("ddp").spec.model, sequence=SEQUENCE)
    values, sizes = InitialValues(module=module, seed=3), tuple(module.embed.weight.shape)
    everything, part = torch.empty(sizes), torch.empty(5, 3)
    values.write_window("embed.weight", sizes, full_window(sizes), everything)
    values.write_window("embed.weight", sizes, ((7, 5), (2, 3)), part)
    assert torch.equal(part, everything[7:12, 2:5])


def unit(shapes: list[tuple[int, ...]], values: LocalRowWriter) -> tuple[torch.Tensor, Any]:
    """A flat buffer of ones that parameters without memory have adopted, and its members."""
    named = []
    for number, shape in enumerate(shapes):
        parameter = torch.nn.Parameter(torch.empty(shape))
        parameter.untyped_storage().resize_(0)
        named.append((f"p{number}", parameter))
    members = ParameterMembers(named)
    members.values = values
    buffer = torch.full([sum(map(math.prod, shapes)) + 3], -1.0)  # and its padding
    members.bind_views(buffer)
    return buffer, members


@pytest.mark.parametrize("seed", range(20))
def test_of_a_flat_unit_the_rows_that_its_shard_reaches_are_written_and_no_others(
    seed: int,
) -> None:
    random = Random(seed)
    shapes = [(random.randint(1, 5), random.randint(1, 4)), (7,), (2, 3, 2), (1, 9)]
    numel = sum(map(math.prod, shapes))
    start = random.randint(0, numel)
    stretches = [(start, random.randint(start, numel + 3)), (0, random.randint(0, start))]
    taken: list[str] = []

    def write(name: str, parameter: Any, first: int, part: torch.Tensor) -> None:
        taken.extend(f"{name}[{first + row}]" for row in range(len(part)))
        part.copy_(torch.full_like(part, float(name[1:])))

    buffer, members = unit(shapes, LocalRowWriter(write, stretches))
    kept = {place for begin, end in stretches for place in range(begin, min(end, numel))}
    place, expected = 0, []
    for number, shape in enumerate(shapes):
        row = math.prod(shape[1:])
        for index in range(shape[0]):
            elements = range(place, place + row)
            if kept.intersection(elements):
                expected.append(f"p{number}[{index}]")
                assert (buffer[place : place + row] == number).all()
            else:
                assert (buffer[place : place + row] == -1).all()
            place += row
    assert sorted(set(taken)) == sorted(expected)
    for (_, parameter), piece in zip(members.named, members.pieces(buffer), strict=True):
        assert parameter.data_ptr() == piece.data_ptr(), "a parameter is a view of the buffer"
