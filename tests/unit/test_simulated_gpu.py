"""CUDA kernels are queried without a GPU in a process with a stub driver; if that is impossible, it
is reported."""

from __future__ import annotations

import ctypes
import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.cli import simulate
from ptrain.commands import add_arguments
from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.runtime import simulated_gpu
from ptrain.simulation.execute import fake_device
from ptrain.spec.load import load
from ptrain.traces import attention_kernels
from tests.torch_release import is_since

FOR_GPUS = "cluster.preset=h100-8"
LACKING = simulated_gpu.missing_requirement()
believing = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
SMALL = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=2",
    "model.kv_heads=2",
    "model.ffn=96",
    "batch={global: 4, micro: 1, sequence: 64}",
)
BF16 = "precision.layout=fsdp-mixed"


def parse_arguments(*words: str) -> Any:
    parser = ArgumentParser()
    add_arguments(parser, "simulate")
    return parser.parse_intermixed_args(list(words))


def test_cached_kernel_facts_are_recomputed_in_the_other_process() -> None:
    words = ("zero3", "model.layers=2", "--rank", "1", "--rank", "3", "--chart", "x.png")
    args = parse_arguments(*words, "--every-block", "--json", "--allow-import")
    assert parse_arguments(*simulate._typed_arguments(args)) == args


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((FOR_GPUS,), 90),
        (("cluster.preset=a100-8",), 80),
        ((FOR_GPUS, "cluster.sm=100"), 100),
        ((FOR_GPUS, "device=cpu"), None),
        (("device=cuda",), None),  # nobody says which
        (("cluster.preset=laptop",), None),
    ],
)
def test_which_gpu_is_believed_in_is_the_clusters(
    overrides: tuple[str, ...], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_gpu, "missing_requirement", lambda: None)
    assert simulate._gpu_capability([load("ddp", overrides).spec]) == expected
    monkeypatch.setattr(simulated_gpu, "missing_requirement", lambda: "no compiler")
    assert simulate._gpu_capability([load("ddp", overrides).spec]) is None


def test_specs_for_several_kinds_of_gpu_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_gpu, "missing_requirement", lambda: None)
    specs = [load("ddp", [f"cluster.preset={name}"]).spec for name in ("h100-8", "a100-8")]
    assert simulate._gpu_capability(specs) is None


def test_a_build_without_cuda_is_reported_with_an_alternative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "Install a CUDA build; no GPU is needed" in str(simulated_gpu.missing_requirement())


@pytest.mark.parametrize(
    ("version", "files", "is_taken"),
    [
        (13000, ("driver_types.h", "crt/host_defines.h"), True),
        (12080, ("driver_types.h", "crt/host_defines.h"), False),  # triton's beside a torch for 13
        (13000, ("driver_types.h",), False),  # a wheel's, whose crt is in another
    ],
)
def test_headers_are_those_of_torchs_cuda_and_whole(
    version: int,
    files: tuple[str, ...],
    is_taken: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    headers = tmp_path / "include"
    (headers / "crt").mkdir(parents=True)
    (headers / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    for name in files:
        (headers / name).touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(simulated_gpu, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert simulated_gpu._cuda_headers() == (headers if is_taken else None)


def test_a_process_that_does_not_believe_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTRAIN_SM", "90")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not simulated_gpu.is_on()
    assert "does not detect" in str(simulated_gpu.missing_requirement())
    assert simulate._gpu_capability([load("ddp", [FOR_GPUS]).spec]) is None


def test_a_folder_that_no_library_is_loaded_from_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    assert "Set TMPDIR" in str(simulated_gpu.missing_requirement())


@pytest.mark.skipif(not simulated_gpu._compiler_command(), reason="there is no C compiler")
def test_the_stub_driver_is_compiled_and_has_no_context(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(simulated_gpu._compile_library("driver", tmp_path / "libcuda.so.1")))
    flags, is_active = ctypes.c_uint(7), ctypes.c_int(7)
    state = library.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active))
    assert (state, flags.value, is_active.value) == (0, 0, 0)


def test_a_compiler_that_rejects_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false --of-no-use")
    with pytest.raises(simulated_gpu.StubsNotCompiled, match="does not compile"):
        simulated_gpu._compile_library("driver", tmp_path / "libcuda.so.1")


def test_where_nothing_compiles_kernels_are_a_cpus(
    ptrain: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(words: list[str], sm: int) -> int:
        raise simulated_gpu.StubsNotCompiled("runtime.c does not compile")

    monkeypatch.setattr(simulated_gpu, "missing_requirement", lambda: None)
    monkeypatch.setattr(simulated_gpu, "run_python", refuse)
    output = ptrain("simulate", "ddp", FOR_GPUS, *SMALL)
    assert "kernels  a CPU's: runtime.c does not compile" in output


def test_without_cuda_kernels_the_cpus_are_used_with_a_note(
    ptrain: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_gpu, "missing_requirement", lambda: "no compiler")
    assert fake_device(load("ddp", [FOR_GPUS]).spec) == torch.device("cpu")
    output = ptrain("simulate", "ddp", FOR_GPUS, *SMALL)
    assert "kernels  a CPU's: no compiler" in output


@pytest.fixture
def simulate_with_gpu(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs `ptrain simulate` in a process that believes in a GPU of compute capability `sm` -> of
    rank 0 what the record says."""

    def run(sm: int, *words: str) -> dict[str, Any]:
        is_built_in = not any(word.startswith("model={") for word in words)
        asked = [
            "-m",
            "ptrain",
            "simulate",
            words[0],
            *(SMALL if is_built_in else ()),
            *words[1:],
            f"cluster={{preset: h100-8, sm: {sm}}}",
            "--json",
        ]
        assert simulated_gpu.run_python(asked, sm) == 0
        rank: dict[str, Any] = json.loads(capfd.readouterr().out)["simulation"]["ranks"][0]
        return rank

    yield run


@believing
@pytest.mark.parametrize(
    ("sm", "changes", "kernel"),
    [
        (90, (BF16,), "cudnn_attention"),
        (80, (BF16,), "flash_attention"),
        (90, (), "efficient_attention"),  # of fp32
        (
            90,
            (BF16, "model.preset=gpt-tiny", "model.dropout=0.1"),
            "flash_attention" if is_since("2.12") else "cudnn_attention",
        ),
    ],
)
def test_attention_is_the_kernel_that_torch_takes_there(
    sm: int, changes: tuple[str, ...], kernel: str, simulate_with_gpu: Callable[..., dict[str, Any]]
) -> None:
    assert simulate_with_gpu(sm, "zero3", *changes)["kernels"].endswith(f"confirmed: {kernel}")


@believing
@pytest.mark.parametrize(
    ("sm", "strategy", "changes"),
    [
        (90, "zero3", ()),
        (80, "ddp", (BF16,)),
        (90, "zero1", (BF16, "activations=M", "recompute=selective")),
        (100, "tp-sp", (BF16,)),
        (90, "pp-1f1b", ("model.layers=4",)),
        (90, "zero3", (BF16, "model.preset=gpt-tiny", "model.dropout=0.1")),
        (90, "zero3", (BF16, "attention=eager")),
        (90, "fsdp-offload", (BF16,)),
    ],
)
def test_the_prediction_equals_the_allocations_of_cuda_kernels(
    sm: int,
    strategy: str,
    changes: tuple[str, ...],
    simulate_with_gpu: Callable[..., dict[str, Any]],
) -> None:
    """40 tokens are no multiple of the 32 rows that a 32-bit kernel keeps."""
    batch = "batch={global: 4, micro: 1, sequence: 40}"
    assert simulate_with_gpu(sm, strategy, batch, *changes)["differing"] == []


GPT2 = "{hf: GPT2LMHeadModel, config: {n_layer: 2, n_embd: 64, n_head: 2, vocab_size: 261}}"
CONFIG = (
    "config: {num_hidden_layers: 2, hidden_size: 64, intermediate_size: 96, vocab_size: 261, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 64}"
)


@believing
@pytest.mark.parametrize(
    ("model", "strategy", "changes"),
    [
        (GPT2, "ddp", (BF16,)),  # LayerNorm in bf16
        (f"{{hf: LlamaForCausalLM, {CONFIG}}}", "ddp", ()),  # fewer heads of keys in fp32
        (f"{{hf: Gemma2ForCausalLM, {CONFIG}}}", "pp-1f1b", (BF16, "attention=eager")),
        ("{target: 'tests.models_external:normed'}", "ddp", (BF16, "--allow-import")),
    ],
)
def test_the_prediction_of_other_models_equals_the_allocations_of_cuda_kernels(
    model: str,
    strategy: str,
    changes: tuple[str, ...],
    simulate_with_gpu: Callable[..., dict[str, Any]],
) -> None:
    """Gemma has a buffer that `torch.tensor` makes, which stages copy."""
    if "hf" in model:
        pytest.importorskip("transformers")
    batch = "batch={global: 4, micro: 1, sequence: 40}"
    assert simulate_with_gpu(90, strategy, f"model={model}", batch, *changes)["differing"] == []


@believing
def test_the_committed_table_has_the_kernels_that_torch_takes() -> None:
    assert attention_kernels.kernel_table() == archive.read_table(TablePart.KERNEL, "attention")
