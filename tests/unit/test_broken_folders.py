"""Broken or hostile folders of published models are rejected with the reason."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.errors import SpecError
from ptrain.models import pretrained
from ptrain.models.initialize import build_model
from ptrain.spec.load import load
from tests.published_folders import save_folder, tensors
from tests.unit.test_pretrained import SEQUENCE, spec_of

pytest.importorskip("transformers")
SECONDS = 2.0  # in which a folder is refused

Break = Callable[[Path], None]


def field(**fields: Any) -> Break:
    """Other fields of the config."""

    def broken(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return broken


def text(name: str, content: str | bytes) -> Break:
    """Another text in a file."""

    def broken(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return broken


def header(change: Callable[[dict[str, Any]], object]) -> Break:
    """Another header of the weights' file."""

    def broken(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + size])
        change(entries)
        said = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(said)) + said + content[8 + size :])

    return broken


def replace_tensors(change: Callable[[dict[str, Any]], object]) -> Break:
    """Other tensors in the weights' file."""

    def broken(folder: Path) -> None:
        from safetensors.torch import save_file

        weights = tensors(folder)
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return broken


def index(change: Callable[[dict[str, str]], object]) -> Break:
    """An index over two files, changed."""

    def broken(folder: Path) -> None:
        from safetensors.torch import save_file

        weights = tensors(folder)
        names = sorted(weights)
        files = {name: f"{'ab'[n % 2]}.safetensors" for n, name in enumerate(names)}
        for file in ("a.safetensors", "b.safetensors"):
            own = {name: weights[name] for name in names if files[name] == file}
            save_file(own, folder / file)
        (folder / "model.safetensors").unlink()
        change(files)
        whole = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(whole))

    return broken


def folder_for_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def link_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])


NORM, HEAD = "model.norm.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"
BROKEN: dict[str, tuple[Break, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    "no JSON": (text("config.json", "{"), "config.json: is not valid JSON"),
    "no mapping": (text("config.json", "[]"), "config.json: does not contain a mapping"),
    "no end": (text("config.json", "[" * 200_000), "config.json: is not valid JSON"),
    "no text": (text("config.json", b"\xff\xfe{}"), "config.json: is not valid JSON"),
    "no model type": (text("config.json", "{}"), "model_type 'None' is not a built-in model"),
    "another model type": (field(model_type="t5"), "model_type 't5' is not a built-in model"),
    "code of its own": (field(auto_map={"AutoModel": "x.Y"}), "auto_map: .* never runs"),
    "quantized": (field(quantization_config={"bits": 4}), "quantization_config: "),
    "another activation": (field(hidden_act="relu"), "hidden_act is 'relu'"),
    "windows of some layers": (
        field(layer_types=["full_attention", "sliding_attention"]),
        (
            "layer_types: layer 1 is 'sliding_attention'; the built-in model supports "
            "'full_attention'"
        ),
    ),
    "heads that turn in part": (
        field(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor: ",
    ),
    "biases": (field(attention_bias=True), "attention_bias is True"),
    "rotations of another kind": (
        field(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "rotary scaling 'longrope' is not supported",
    ),
    "rotations without a base": (
        field(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "the rotary scaling has no factor",
    ),
    "negative layers": (field(num_hidden_layers=-2), "layers"),
    "layers in words": (field(num_hidden_layers="two"), "layers"),
    "no heads": (field(num_attention_heads=0), "missing or has a value of another type|heads"),
    "an absurd width": (field(hidden_size=2**40), "hidden"),
    "more layers than weights": (field(num_hidden_layers=3), "the tensor model.layers.2"),
    "fewer layers than weights": (field(num_hidden_layers=1), "9 tensors do not belong to"),
    "another width": (field(hidden_size=64), r"is \[259, 32\], but the model of the spec has"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there is no model.safetensors"),
    "a folder for weights": (folder_for_file, "there is no model.safetensors"),
    "a link to nothing": (link_to_nothing, "is a broken link"),
    "an empty file": (text("model.safetensors", b""), "is not a valid safetensors file"),
    "a header without end": (
        text("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
        "is not a valid safetensors file",
    ),
    "a header that is no JSON": (
        text("model.safetensors", struct.pack("<Q", 4) + b"\x80\x04K\x01"),
        "is not a valid safetensors file",
    ),
    "a pickle": (text("model.safetensors", b"\x80\x04\x95" + b"\x00" * 64), "is not a valid"),
    "half a file": (cut, "is not a valid safetensors file"),
    "offsets that overlap": (
        header(lambda h: h[NORM].update(data_offsets=[0, 128])),
        "is not a valid safetensors file",
    ),
    "offsets behind the end": (
        header(lambda h: h[NORM].update(data_offsets=[2**40, 2**40 + 128])),
        "is not a valid safetensors file",
    ),
    "a shape of more bytes": (
        header(lambda h: h[NORM].update(shape=[2**20])),
        "is not a valid safetensors file",
    ),
    "a dtype that is none": (
        header(lambda h: h[NORM].update(dtype="F99")),
        "is not a valid safetensors file",
    ),
    "whole numbers": (
        replace_tensors(lambda w: w.update({NORM: w[NORM].to(torch.int64)})),
        "model.norm.weight is I64",
    ),
    "64 bits": (
        replace_tensors(lambda w: w.update({NORM: w[NORM].double()})),
        "is F64; weights must be F32",
    ),
    "a tensor too few": (
        replace_tensors(lambda w: w.pop(NORM)),
        "the tensor model.norm.weight is missing",
    ),
    "no head": (replace_tensors(lambda w: w.pop(HEAD)), "the tensor lm_head.weight is missing"),
    "a tensor too many": (
        replace_tensors(lambda w: w.update(surplus=torch.ones(2))),
        "1 tensors do not belong to this model, for example surplus",
    ),
    "a tensor turned": (
        replace_tensors(lambda w: w.update({HEAD: w[HEAD].T.contiguous()})),
        r"lm_head.weight is \[32, 259\]",
    ),
    "an index that is no JSON": (text(INDEX, "{"), "index.json cannot be read: JSONDecodeError"),
    "an index of nothing": (text(INDEX, '{"weight_map": {}}'), "lists no tensors"),
    "an index without map": (text(INDEX, "{}"), "index.json cannot be read: KeyError"),
    "an index that is a list": (text(INDEX, "[]"), "index.json cannot be read: TypeError"),
    "an index without end": (text(INDEX, "[" * 200_000), "index.json cannot be read: Recursion"),
    "a file above": (
        index(lambda f: f.update({NORM: "../b.safetensors"})),
        "not a file name in its folder",
    ),
    "a file elsewhere": (
        index(lambda f: f.update({NORM: "/etc/passwd"})),
        "not a file name in its folder",
    ),
    "a file that is no name": (
        index(lambda f: f.update({NORM: 3})),
        "not a file name in its folder",
    ),
    "a file that is not there": (
        index(lambda f: f.update({NORM: "c.safetensors"})),
        "there is no c.safetensors",
    ),
    "a tensor in another file": (
        index(lambda f: f.update({HEAD: "b.safetensors"})),
        "lists lm_head.weight in b.safetensors, but it is in a.safetensors",
    ),
    "a tensor in no file": (
        index(lambda f: f.update({"more": "a.safetensors"})),
        "lists more in a.safetensors, but no file contains it",
    ),
}


@pytest.mark.parametrize("name", ["a\0b", "", "x" * 300, "x\ny"])
def test_a_name_that_no_folder_can_have_is_rejected(name: str) -> None:
    with pytest.raises(SpecError, match="pretrained"):
        load({"model": {"pretrained": name}})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder("llama", tmp_path_factory.mktemp("published") / "in")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_or_hostile_folder_is_rejected_with_the_reason(
    case: str, sound: Path, tmp_path: Path
) -> None:
    damage, finding = BROKEN[case]
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    pretrained.weights_of.cache_clear()
    start = time.perf_counter()
    with pytest.raises(SpecError, match=finding) as raised:
        build_model(spec_of(tmp_path).model, sequence=SEQUENCE)
    assert time.perf_counter() - start < SECONDS
    (fault,) = raised.value.faults
    assert fault.place == "model.pretrained" and fault.remedy
