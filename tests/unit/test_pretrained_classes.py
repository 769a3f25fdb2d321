"""Folders of user models: a transformers class or a user's function starts from the files and
exports them unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ptrain.convert.export import export_checkpoint
from ptrain.convert.saved import TextGenerator
from ptrain.data.vocabulary import ByteVocabulary
from ptrain.errors import SpecError
from ptrain.interpreter.look import build_module, build_module_on_meta
from ptrain.interpreter.program import interpret
from ptrain.models import initialize
from ptrain.models.initialize import stored_rows
from ptrain.models.window import full_window, narrow_to_window
from ptrain.runtime.world import World
from ptrain.verification.reference import ReferenceTraining
from tests.published_folders import CLASSES, save_folder, tensors
from tests.unit.test_pretrained import logits, run_of, spec_of, tokens
from tests.unit.test_windows_of_weights import random_window

transformers = pytest.importorskip("transformers")
_AT_NIGHT = ("phi", "olmo2", "granite", "mixtral", "gpt_oss", "granitemoe", "qwen2_moe")
BY_NIGHT = [
    pytest.param(case, marks=pytest.mark.nightly) if case in _AT_NIGHT else case for case in CLASSES
]
OWN = ", target: tests.models_with_odd_state:build, arguments: {width: 8}"


def load_model(case: str, folder: Path, *more: str) -> nn.Module:
    spec = spec_of(folder, "attention=eager", *more, beside=f", hf: {case}")
    return interpret(spec, world=World()).model.eval()


def tokens_of_text(text: str) -> torch.Tensor:
    return torch.tensor([ByteVocabulary().tokens(text)])


def output_of(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = module(tokens())
    return result


@pytest.mark.parametrize("case", BY_NIGHT)
def test_a_class_begins_with_a_folder_and_is_exported_as_it_was(case: str, tmp_path: Path) -> None:
    folder = save_folder(case, tmp_path / "in")
    expected = logits(folder)
    assert torch.equal(output_of(load_model(case, folder)), expected)
    run = run_of(folder, tmp_path / "run", beside=f", hf: {case}")
    exported = export_checkpoint(run, tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and exported.tensors == len(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert exported.copied == ("generation_config.json",)
    assert torch.equal(logits(tmp_path / "out"), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [exported.architecture] and config["use_cache"]


def test_only_the_needed_windows_of_stacked_experts_are_read(tmp_path: Path) -> None:
    folder = save_folder("phimoe", tmp_path / "in")
    module, weights = build_module_on_meta(spec_of(folder, beside=", hf: phimoe"))
    assert all(parameter.is_meta for parameter in module.parameters())
    random = Random(0)
    for name, tensor in load_model("phimoe", folder).named_parameters():
        sizes = tuple(tensor.shape)
        for window in (full_window(sizes), *(random_window(random, sizes) for _ in range(6))):
            part, before = torch.empty([size for _, size in window]), weights.bytes_read
            weights.read_window(name, sizes, window, part, part.dtype)
            assert torch.equal(part, narrow_to_window(tensor, window)), (name, window)
            assert weights.bytes_read - before == part.nbytes


def test_randomly_initialized_parameters_are_exported(tmp_path: Path) -> None:
    folder = save_folder("phimoe", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    fields = {name: config[name] for name in CLASSES["phimoe"][1]}
    words = ("model.pretrained=null", f"model.config={json.dumps(fields)}", "attention=eager")
    run = run_of(folder, tmp_path / "run", *words, beside=", hf: phimoe")
    export_checkpoint(run, tmp_path / "out")
    assert tensors(folder).keys() == tensors(tmp_path / "out").keys()
    drawn = build_module(spec_of(folder, *words, beside=", hf: phimoe"))
    assert torch.equal(output_of(drawn.eval()), logits(tmp_path / "out"))


def test_keys_written_with_a_folder_override_its_config(tmp_path: Path) -> None:
    folder = save_folder("starcoder2", tmp_path / "in")
    words = ("model.config={rope_parameters: {rope_type: default, rope_theta: 500.0}}",)
    plain, turned = load_model("starcoder2", folder), load_model("starcoder2", folder, *words)
    assert not torch.equal(output_of(plain), output_of(turned))
    run = run_of(folder, tmp_path / "run", "attention=eager", *words, beside=", hf: starcoder2")
    export_checkpoint(run, tmp_path / "out")
    assert torch.equal(output_of(turned), logits(tmp_path / "out"))
    with pytest.raises(SpecError, match="the config of the folder sets this in rope_parameters"):
        load_model("starcoder2", folder, "model.config={rope_theta: 500.0}")


def test_bare_names_16_bit_weights_and_a_stored_tied_head_are_read(tmp_path: Path) -> None:
    folder = save_folder("gemma3_text", tmp_path / "in")
    halves = {
        name.removeprefix("model."): tensor.bfloat16() for name, tensor in tensors(folder).items()
    }
    halves["lm_head.weight"] = halves["embed_tokens.weight"] + 0
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    module = load_model("gemma3_text", folder, "precision.layout=bf16")
    state = module.state_dict()
    assert {tensor.dtype for tensor in module.parameters()} == {torch.bfloat16}
    assert torch.equal(state["model.embed_tokens.weight"], halves["embed_tokens.weight"])


def test_the_reference_begins_as_ranks_do(tmp_path: Path) -> None:
    folder = save_folder("starcoder2", tmp_path / "in")
    spec = spec_of(folder, beside=", hf: starcoder2")
    reference = ReferenceTraining(spec).module
    for name, tensor in interpret(spec, world=World()).model.named_parameters():
        assert torch.equal(tensor, reference.get_parameter(name)), name


def test_a_trained_class_writes_as_transformers_does(tmp_path: Path) -> None:
    folder = save_folder("deepseek_v3", tmp_path / "in")
    run = run_of(folder, tmp_path / "run", "attention=eager", beside=", hf: deepseek_v3")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    begun_with = ByteVocabulary().tokens("Once")
    text = TextGenerator(run).generate("Once", tokens=8, temperature=0, generator=torch.Generator())
    there = theirs.generate(
        torch.tensor([begun_with]), max_new_tokens=8, do_sample=False, eos_token_id=257
    )
    assert text == ByteVocabulary().text(there[0, len(begun_with) :].tolist())
    shutil.rmtree(folder)
    for use in (TextGenerator, lambda run: export_checkpoint(run, tmp_path / "out")):
        with pytest.raises(SpecError, match="does not exist any more, but the model needs"):
            use(run)
    assert not (tmp_path / "out").exists()


def test_a_run_whose_folder_is_gone_is_exported(tmp_path: Path) -> None:
    folder = save_folder("starcoder2", tmp_path / "in")
    run = run_of(folder, tmp_path / "run", beside=", hf: starcoder2")
    before, expected = tensors(folder), logits(folder)
    shutil.rmtree(folder)
    assert export_checkpoint(run, tmp_path / "out").copied == ()
    assert before.keys() == tensors(tmp_path / "out").keys()
    assert torch.equal(logits(tmp_path / "out"), expected)


def test_a_user_model_is_exported_and_starts_from_the_export(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    weights = {"embed.weight": torch.randn(259, 8)}
    for number in range(2):
        weights |= {
            f"layers.{number}.weight": torch.randn(8, 8),
            f"layers.{number}.bias": torch.randn(8),
        }
    save_file(weights, folder / "model.safetensors")
    run = run_of(folder, tmp_path / "run", beside=OWN)
    exported = export_checkpoint(run, tmp_path / "out")
    assert exported.architecture == "tests.models_with_odd_state:build"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"}
    after = tensors(tmp_path / "out")
    assert after.keys() == weights.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights.items())
    again = build_module(spec_of(tmp_path / "out", beside=OWN), allow_import=True)
    assert torch.equal(again.get_parameter("layers.1.bias"), weights["layers.1.bias"])
    written = TextGenerator(run, allow_import=True).score("one and one")
    expected = nn.functional.cross_entropy(
        again(tokens_of_text("one and one"))[0, :-1], tokens_of_text("one and one")[0, 1:]
    )
    assert written.loss == pytest.approx(expected.item(), rel=1e-5)
    save_file(weights | {"scale": torch.full((8,), 0.25)}, folder / "model.safetensors")
    scaled = build_module(spec_of(folder, beside=OWN), allow_import=True)
    assert torch.equal(scaled.get_buffer("scale"), torch.full((8,), 0.25))


def config(**fields: Any) -> Any:
    def broken(folder: Path) -> None:
        read = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(read | fields))

    return broken


def weights(change: Any) -> Any:
    def broken(folder: Path) -> None:
        there = tensors(folder)
        change(there)
        save_file(there, folder / "model.safetensors")

    return broken


NORM = "model.norm.weight"
BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    "code of its own": (config(auto_map={"AutoModel": "x.Y"}), "auto_map: .* never runs"),
    "quantized": (config(quantization_config={"bits": 4}), "quantization_config: "),
    "another class": (config(model_type="llama"), "'llama', but Starcoder2ForCausalLM has"),
    "more layers": (config(num_hidden_layers=3), "the tensor model.layers.2"),
    "fewer layers": (config(num_hidden_layers=1), "16 tensors do not belong to"),
    "another width": (config(vocab_size=260), r"is \[259, 32\], but the model of the spec has"),
    "a tensor too few": (weights(lambda w: w.pop(NORM)), f"the tensor {NORM} is missing"),
    "a tensor too many": (weights(lambda w: w.update(more=w[NORM] + 0)), "for example more"),
    "whole numbers": (weights(lambda w: w.update({NORM: w[NORM].long()})), "norm.weight is I64"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.saf"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder("starcoder2", tmp_path_factory.mktemp("published") / "in")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_or_hostile_folder_is_rejected(case: str, sound: Path, tmp_path: Path) -> None:
    damage, finding = BROKEN[case]
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises(SpecError, match=finding) as raised:
        load_model("starcoder2", tmp_path)
    (fault,) = raised.value.faults
    assert fault.place.startswith("model.") and fault.remedy


@pytest.mark.parametrize(
    "other",
    [
        lambda state: {name: rows.flip(0) for name, rows in state.items()},
        lambda state: {name: rows[:1] for name, rows in state.items()},
    ],
    ids=["turned", "lacking"],
)
def test_tensors_that_files_have_in_no_known_form_are_rejected(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models_with_odd_state import build

    monkeypatch.setattr(initialize, "is_of_transformers", lambda module: True)
    monkeypatch.setattr(initialize, "as_saved", lambda module, state: other(state))
    with pytest.raises(SpecError, match=r"files contain embed\.weight of Recurrent neither as one"):
        stored_rows(build(8))
