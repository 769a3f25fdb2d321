"""Folders of published models: what is read computes what transformers' class does, what is
exported is what was read, and what is broken is refused with its place."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.convert.export import export
from ptrain.errors import PtrainError, SpecError
from ptrain.interpreter.program import interpret
from ptrain.models import pretrained
from ptrain.models.build import build
from ptrain.models.initialize import initialize
from ptrain.rooms.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.train import checkpoint
from ptrain.train.exchange import Exchange
from tests.published_folders import CASES, saved, tensors

transformers = pytest.importorskip("transformers")
SEQUENCE = 16
SECONDS = 2.0  # in which a folder is refused


def spec_of(folder: Path, *more: str) -> Spec:
    batch = f"batch={{global: 2, micro: 1, sequence: {SEQUENCE}}}"
    words = (f"model={{pretrained: {folder}}}", "mesh={}", "placement={}", batch, *more)
    return load("ddp", words).spec


def logits(folder: Path) -> torch.Tensor:
    """Return what transformers' class gives."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        result: torch.Tensor = model.eval()(tokens(), use_cache=False).logits
    return result


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 259, (2, SEQUENCE), generator=generator)


def run_of(folder: Path, run: Path, *more: str) -> Path:
    """A run folder with a checkpoint of a model that has just begun, on one rank."""
    spec = spec_of(folder, *more)
    program = interpret(spec, world=World())
    run.mkdir()
    (run / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
    checkpoint.save(program, run / "checkpoints", 1, Exchange(World()))
    return run


@pytest.mark.parametrize("case", CASES)
def test_a_published_folder_is_read_and_exported_as_it_was(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path / "in")
    spec = spec_of(folder)
    module = build(spec.model, sequence=SEQUENCE)
    initialize(module, seed=0)
    expected = logits(folder)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), expected, rtol=1e-5, atol=1e-5)
    exported = export(run_of(folder, tmp_path / "run"), tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and exported.tensors == len(after)
    for name, tensor in before.items():
        rows = after[name] if name != "transformer.wpe.weight" else tensor[:SEQUENCE]
        assert torch.equal(tensor[: len(rows)], after[name]), name
    assert torch.equal(logits(tmp_path / "out"), expected)


def test_files_of_an_index_are_read_and_written(tmp_path: Path, monkeypatch: Any) -> None:
    folder = saved("qwen3_moe", tmp_path / "in", max_shard_size="40KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    monkeypatch.setattr("ptrain.convert.export.FILE_BYTES", 30_000)
    export(run_of(folder, tmp_path / "run"), tmp_path / "out")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_bare_names_and_sixteen_bits_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = saved("gpt2", tmp_path / "in")
    bare = {name.removeprefix("transformer."): x for name, x in tensors(folder).items()}
    halves = {name: tensor.bfloat16() for name, tensor in bare.items()}
    mask = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": halves["wte.weight"] + 0}
    save_file(halves | mask, folder / "model.safetensors", metadata={"format": "pt"})
    module = build(spec_of(folder).model, sequence=SEQUENCE)
    initialize(module, seed=0)
    embedding = dict(module.named_parameters())["embed.weight"]
    assert torch.equal(embedding, halves["wte.weight"].float())


def test_a_run_is_exported_in_its_own_dtype_with_the_tokenizer_it_came_with(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in")
    (folder / "tokenizer.json").write_text("{}")
    run = run_of(folder, tmp_path / "run", "precision.layout=bf16", "model.dropout=0.1")
    exported = export(run, tmp_path / "out", step=1)
    assert set(exported.copied) == {"tokenizer.json", "generation_config.json"}
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["max_position_embeddings"] == 2048


def test_what_has_never_been_pretrained_is_exported_too(tmp_path: Path) -> None:
    spec = spec_of(saved("llama", tmp_path / "in"))
    run = run_of(tmp_path / "in", tmp_path / "run", "model.pretrained=null", *SHAPE)
    assert export(run, tmp_path / "out").architecture == "LlamaForCausalLM"
    module = build(load(str(run / "spec.resolved.yaml")).spec.model, sequence=SEQUENCE)
    initialize(module, seed=spec.train.seed)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), logits(tmp_path / "out"))


@pytest.mark.parametrize(
    "words", [("model.rope_base=500.0",), ("model.rope_scaling=linear", "model.rope_factor=4")]
)
def test_what_is_written_beside_a_folder_is_exported_in_place_of_what_it_says(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    run = run_of(saved("llama", tmp_path / "in"), tmp_path / "run", *words)
    export(run, tmp_path / "out")
    module = build(spec_of(tmp_path / "in", *words).model, sequence=SEQUENCE)
    initialize(module, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), logits(tmp_path / "out"), rtol=1e-5, atol=1e-5)


def test_a_field_that_a_file_leaves_out_is_what_its_class_has(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_experts_per_tok", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    module = build(spec_of(folder).model, sequence=SEQUENCE)
    initialize(module, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), logits(folder), rtol=1e-5, atol=1e-5)


def test_a_single_expert_is_read_and_exported(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "in", num_local_experts=1, num_experts_per_tok=1)
    export(run_of(folder, tmp_path / "run"), tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


SHAPE = ("model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn=48", "model.vocab=259")


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (("--to there already",), "is there already"),
        (("step 7",), "has not a checkpoint of step 7; it has 1"),
        (("no run",), "no run folder"),
        (("model.residual_scale=0.5",), "no class of transformers"),
        (("model.rope_scaling=yarn",), "no class of transformers"),
        (("--to too long",), "cannot be written: .*File name too long"),
    ],
    ids=str,
)
def test_an_export_that_cannot_be_leaves_nothing(
    words: tuple[str, ...], finding: str, tmp_path: Path
) -> None:
    (word,) = words
    more = (word, *(["model.rope_factor=4"] if "yarn" in word else [])) if "=" in word else ()
    run = run_of(saved("llama", tmp_path / "in"), tmp_path / "run", *more)
    to = tmp_path / {"--to there already": "run", "--to too long": "x" * 300}.get(word, "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PtrainError, match=finding):
        export(
            tmp_path if word == "no run" else run, to, step=7 if word.startswith("step") else None
        )
    assert sorted(tmp_path.rglob("*")) == before


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


def replaced(change: Callable[[dict[str, Any]], object]) -> Break:
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
    "no JSON": (text("config.json", "{"), "config.json: is no JSON"),
    "no mapping": (text("config.json", "[]"), "config.json: is no mapping"),
    "no end": (text("config.json", "[" * 200_000), "config.json: is no JSON"),
    "no text": (text("config.json", b"\xff\xfe{}"), "config.json: is no JSON"),
    "no model type": (text("config.json", "{}"), "model_type 'None' is not read"),
    "another model type": (field(model_type="t5"), "model_type 't5' is not read"),
    "code of its own": (field(auto_map={"AutoModel": "x.Y"}), "auto_map: .* never runs"),
    "quantized": (field(quantization_config={"bits": 4}), "quantization_config: "),
    "another activation": (field(hidden_act="relu"), "hidden_act is 'relu'"),
    "windows of some layers": (
        field(layer_types=["full_attention", "sliding_attention"]),
        "layer_types: layer 1 is 'sliding_attention', and built here is 'full_attention'",
    ),
    "heads that turn in part": (
        field(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor: ",
    ),
    "biases": (field(attention_bias=True), "attention_bias is True"),
    "rotations of another kind": (
        field(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "rotations of the kind 'longrope'",
    ),
    "rotations without a base": (
        field(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "a field is missing or no number: 'factor'",
    ),
    "negative layers": (field(num_hidden_layers=-2), "layers"),
    "layers in words": (field(num_hidden_layers="two"), "layers"),
    "no heads": (field(num_attention_heads=0), "missing or no number|heads"),
    "an absurd width": (field(hidden_size=2**40), "hidden"),
    "more layers than weights": (field(num_hidden_layers=3), "there is no tensor model.layers.2"),
    "fewer layers than weights": (field(num_hidden_layers=1), "9 tensors are of no part"),
    "another width": (field(hidden_size=64), r"is \[259, 32\], and the spec's model has"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there is no model.safetensors"),
    "a folder for weights": (folder_for_file, "there is no model.safetensors"),
    "a link to nothing": (link_to_nothing, "is a link to nothing"),
    "an empty file": (text("model.safetensors", b""), "no sound safetensors file"),
    "a header without end": (
        text("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
        "no sound safetensors file",
    ),
    "a header that is no JSON": (
        text("model.safetensors", struct.pack("<Q", 4) + b"\x80\x04K\x01"),
        "no sound safetensors file",
    ),
    "a pickle": (text("model.safetensors", b"\x80\x04\x95" + b"\x00" * 64), "no sound"),
    "half a file": (cut, "no sound safetensors file"),
    "offsets that overlap": (
        header(lambda h: h[NORM].update(data_offsets=[0, 128])),
        "no sound safetensors file",
    ),
    "offsets behind the end": (
        header(lambda h: h[NORM].update(data_offsets=[2**40, 2**40 + 128])),
        "no sound safetensors file",
    ),
    "a shape of more bytes": (
        header(lambda h: h[NORM].update(shape=[2**20])),
        "no sound safetensors file",
    ),
    "a dtype that is none": (
        header(lambda h: h[NORM].update(dtype="F99")),
        "no sound safetensors file",
    ),
    "whole numbers": (
        replaced(lambda w: w.update({NORM: w[NORM].to(torch.int64)})),
        "model.norm.weight is I64",
    ),
    "64 bits": (replaced(lambda w: w.update({NORM: w[NORM].double()})), "is F64; weights are F32"),
    "a tensor too few": (replaced(lambda w: w.pop(NORM)), "there is no tensor model.norm.weight"),
    "no head": (replaced(lambda w: w.pop(HEAD)), "there is no tensor lm_head.weight"),
    "a tensor too many": (
        replaced(lambda w: w.update(surplus=torch.ones(2))),
        "1 tensors are of no part of this model, as surplus",
    ),
    "a tensor turned": (
        replaced(lambda w: w.update({HEAD: w[HEAD].T.contiguous()})),
        r"lm_head.weight is \[32, 259\]",
    ),
    "an index that is no JSON": (text(INDEX, "{"), "index.json cannot be read: JSONDecodeError"),
    "an index of nothing": (text(INDEX, '{"weight_map": {}}'), "lists no tensors"),
    "an index without map": (text(INDEX, "{}"), "index.json cannot be read: KeyError"),
    "an index that is a list": (text(INDEX, "[]"), "index.json cannot be read: TypeError"),
    "an index without end": (text(INDEX, "[" * 200_000), "index.json cannot be read: Recursion"),
    "a file above": (index(lambda f: f.update({NORM: "../b.safetensors"})), "no file beside it"),
    "a file elsewhere": (index(lambda f: f.update({NORM: "/etc/passwd"})), "no file beside it"),
    "a file that is no name": (index(lambda f: f.update({NORM: 3})), "no file beside it"),
    "a file that is not there": (
        index(lambda f: f.update({NORM: "c.safetensors"})),
        "there is no c.safetensors",
    ),
    "a tensor in another file": (
        index(lambda f: f.update({HEAD: "b.safetensors"})),
        "says that lm_head.weight is in b.safetensors, and it is in a.safetensors",
    ),
    "a tensor in no file": (
        index(lambda f: f.update({"more": "a.safetensors"})),
        "says that more is in a.safetensors, and no file has it",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("published") / "in")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_or_hostile_folder_is_refused_with_what_is_wrong(
    case: str, sound: Path, tmp_path: Path
) -> None:
    damage, finding = BROKEN[case]
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    pretrained.weights_of.cache_clear()
    start = time.perf_counter()
    with pytest.raises(SpecError, match=finding) as raised:
        build(spec_of(tmp_path).model, sequence=SEQUENCE)
    assert time.perf_counter() - start < SECONDS
    (fault,) = raised.value.faults
    assert fault.place == "model.pretrained" and fault.remedy


def test_more_tokens_than_learned_positions_are_refused(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "in")
    spec = spec_of(folder, "batch.sequence=65")
    with pytest.raises(SpecError, match="it has 64 positions, and a sample 65 tokens"):
        build(spec.model, sequence=65)
