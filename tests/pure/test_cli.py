"""The command line: imports, rejections, and exit codes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import SUPPRESS
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ptrain
from ptrain.calibration import write as calibration
from ptrain.cli import main as dispatcher
from ptrain.cli.arguments import CommandParser
from ptrain.cli.main import VERBS, WRONG_INPUT, main
from ptrain.cli.select import _THRESHOLDS as THRESHOLDS
from ptrain.commands import COMMANDS
from ptrain.errors import RankFailed, TrainingStopped, VerdictFailed
from ptrain.report.selection import TOP
from ptrain.selection.ranking import SearchGoal
from ptrain.spec.load import split_arguments
from ptrain.spec.names import load_names
from ptrain.train import options as train_options
from ptrain.train import rank_start
from ptrain.verification import options as verify_options

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "transformers", "matplotlib", "pandas")
NEEDLESS = {  # to predict; the parts of ptrain belong to other verbs
    *("rich", "asyncio", "subprocess", "multiprocessing", "concurrent.futures", "http"),
    *("ptrain.train", "ptrain.charts", "ptrain.verification", "ptrain.simulation"),
    *("ptrain.interpreter", "ptrain.models", "ptrain.meters", "ptrain.data"),
    *(
        "ptrain.report.record",
        "ptrain.report.sweep",
        "ptrain.report.sweep",
        "importlib.metadata",
        "difflib",
    ),
}
MOST_PARTS, MOST_MODULES = 225, 340  # that a prediction imports: of ptrain, and in all
TORCH_FREE = (
    [],
    ["--help"],
    ["--version"],
    ["predict", "70b-zero3"],
    ["predict", "70b-dp", "--json"],
    ["predict", "zero3", "ddp"],
    ["predict", "8b-tp-sp", "8b-tp-zero3"],
    ["compare", "zero2", "zero3"],
    ["plan", "hsdp"],
    ["plan", "cp-hybrid"],
    ["specs"],
    ["specs", "show", "zero1"],
    ["schema"],
    ["help"],
    ["help", "dials"],
    ["help", "launch"],
    ["help", "train"],
    ["simulate", "--help"],
    ["completion", "bash"],
    ["predict", "llama3-8b", "--cluster", "h100-8"],
    ["train", "--nproc", "4"],
    ["predict", "no-such-spec"],
    ["train", "no-such-spec"],
    ["validate", "no-such-spec"],
    ["verify", "no-such-spec"],
)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", TORCH_FREE, ids=" ".join)
def test_neither_torch_nor_numpy_is_imported(arguments):
    code = (
        "import sys\nfrom ptrain.cli.main import main\nmain(sys.argv[1:])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ended = python(code, *arguments)
    assert ended.returncode == 0, ended.stderr


def test_predict_imports_nothing_that_it_does_not_need():
    """More than half of what it takes are imports."""
    code = (
        "import sys\nbefore = {*sys.modules}\n"
        "from ptrain.cli.main import main\nmain(sys.argv[1:])\n"
        "print(*({*sys.modules} - before), file=sys.stderr)"
    )
    ended = python(code, "predict", "70b-zero3")
    assert ended.returncode == 0, ended.stderr
    imported = set(ended.stderr.split())
    packages = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert not NEEDLESS & imported
    assert {name for name in packages if "cython" not in name} == {"ptrain", "yaml"}
    assert sum(name.startswith("ptrain.") for name in imported) <= MOST_PARTS
    assert len(imported) <= MOST_MODULES


@pytest.mark.parametrize("module", ["ptrain", "ptrain.cli.main"])
def test_the_command_runs_as_a_module(module):
    words = [sys.executable, "-m", module, "nothing-like-it"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == WRONG_INPUT and "unknown command" in ended.stderr


@pytest.mark.parametrize("call", ["main()", "main(sys.argv[1:])"])
def test_garbage_collection_skips_imports_and_restores_the_callers_settings(call):
    """A full collection would visit 35,000 imported objects; `main(words)` is a call among others
    of a process, whose garbage is not its business."""
    code = f"import gc, sys\nfrom ptrain.cli.main import main\n{call}\n"
    ended = python(f"{code}print(gc.get_freeze_count(), file=sys.stderr)", "predict", "zero3")
    assert (int(ended.stderr) > 10_000) is (call == "main()")


def test_importing_ptrain_imports_nothing_of_weight():
    code = "import sys, ptrain; sys.exit(any(n in sys.modules for n in ('numpy', 'torch')))"
    assert python(code).returncode == 0


def test_the_packages_names_are_found_on_first_use():
    assert ptrain.load("zero3").spec.world_size == 2
    assert ptrain.derive(ptrain.load("zero3").spec).exact.memory
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ptrain.nothing


def test_help_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_module_and_a_help_text(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: ptrain {verb}" in capsys.readouterr().out


def test_the_help_of_a_command_has_groups_examples_and_topics(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for verb, command in COMMANDS.items():
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        text = capsys.readouterr().out
        assert f"\n{VERBS[verb]}.\n" in text
        assert all(f"\n{title}:\n" in text for title in (*command.groups, "Examples"))
        assert all(f"\n  {example}\n" in text for example in command.examples)
        assert max(map(len, text.partition("Examples:")[0].splitlines())) <= 80


def options() -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Yield command, names and definition of every option and argument that help shows."""
    for verb, command in COMMANDS.items():
        for group in command.groups.values():
            for item in group:
                for found, how in item if isinstance(item, list) else (item,):
                    if how["help"] != SUPPRESS:
                        yield verb, found, how


def test_every_option_states_effect_values_and_default():
    for verb, found, how in options():
        what, text = f"{verb} {found[0]}", how["help"]
        assert text[0].isupper() and text.endswith("."), what
        assert all(str(word) in text for word in how.get("choices", ())), what
        if found[0].startswith("-") and how.get("action") not in ("store_true", "store_false"):
            assert how["metavar"].partition(".")[0].isupper(), what
            assert any(word in text for word in ("Default: ", "Required", "Format: ")), what
        default = how.get("default")
        if default not in (None, False, "", [], SUPPRESS):
            assert f"Default: {default:g}" if isinstance(default, float) else str(default) in text


def test_the_defaults_of_options_are_those_of_the_program():
    assert train_options.parse_options([]) == train_options.Options(spec=load_names().default)
    assert verify_options.parse_options([]) == verify_options.VerifyOptions(
        spec=load_names().default
    )
    assert calibration.parse_options([]) == calibration.CalibrationOptions()
    args = CommandParser("select").parse_words([])
    assert args.thresholds == THRESHOLDS and SearchGoal(args.objective) is SearchGoal.TIME
    texts = {(verb, name): how["help"] for verb, found, how in options() for name in found}
    assert f"Default: {TOP}," in texts["select", "--top"]
    assert f"at least {verify_options.LEAST_STEPS}" in texts["verify", "--steps"]
    choices = {verb: how["choices"] for verb, found, how in options() if found == ("--objective",)}
    assert choices == {"select": tuple(SearchGoal)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "unknown command 'trian'. Did you mean `train`?"),
        ("launch", "unknown command 'launch'. Did you mean `train`?"),
        ("qqqq", "unknown command 'qqqq'. `ptrain --help` lists the commands."),
        ("--strict train", "unknown command '--strict'. Options follow the command: "),
        (
            "train --nproc 4 zero3",
            "unknown option --nproc. The number of ranks is the mesh: use `mesh.dp_shard=4`.",
        ),
        ("train zero3 --lr 0.1", "unknown option --lr. Use the key `optimizer.lr=0.1`."),
        ("verify --device=cpu", "unknown option --device. Use the key `device=cpu`."),
        ("plan zero3 --cluster h100-8", "Use the key `cluster.preset=h100-8`."),
        ("train --gradient-checkpointing true", "Use `activations=M`."),
        ("train --batch-size 8", "batch.micro"),
        (
            "predict zero3 --quick",
            "unknown option --quick. --quick is an option of `ptrain verify`.",
        ),
        ("verify zero3 --step 5", "unknown option --step. Did you mean `--steps`?"),
        ("export --too x runs/latest", "Did you mean `--to`?"),
        ("cache --qqq", "unknown option --qqq. Run `ptrain cache --help`."),
        ("cache old", "unknown argument old. Run `ptrain cache --help`."),
        ("predict zero3 --sort size", "--sort takes one of states, peak, sent, calls, time."),
        ("select llama3-8b --devices 0", "--devices: must be an integer of 1 or more; got '0'"),
        ("sample runs/x --temperature nan", "--temperature: must be a number of 0 or more"),
        ("export", "missing --to. Run `ptrain export --help`."),
        ("completion tcsh", "SHELL takes one of bash, zsh, fish."),
    ],
)
def test_a_mistake_is_one_message_without_the_usage(words, message, capsys):
    assert main(words.split()) == WRONG_INPUT
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err
    assert captured.err.startswith("ptrain") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "words", ["train --dev cpu", "verify --every zero3", "predict --res zero3"]
)
def test_an_option_is_written_in_full(words, capsys):
    assert main(words.split()) == WRONG_INPUT
    assert "unknown option --" in capsys.readouterr().err
    for parse in (train_options.parse_options, verify_options.parse_options):
        with pytest.raises(SystemExit):
            parse(["--allow"])


def test_predict_takes_a_model_as_select_does(capsys):
    words = ["predict", "llama3-8b", "--cluster", "h100-8"]
    assert main([*words, "--devices", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["spec"], record["world_size"]) == ("fsdp-mixed", 4)
    assert main([*words, "batch.sequence=8192"]) == 0
    *_, assumed, _, last = capsys.readouterr().out.splitlines()
    assert last == "Next: ptrain select llama3-8b --cluster h100-8 --devices 8"
    command = shlex.split(assumed.partition("`")[2].rpartition("`")[0])
    assert assumed.startswith("Assumed: fully sharded, bf16 mixed precision, as in `ptrain predict")
    assert "batch.sequence=8192" in command and "batch.sequence=4096" not in command
    assert main(command[1:]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("llama3-8b", "Use `ptrain predict llama3-8b --cluster h100-8`."),
        ("llama3-8b zero3 --cluster h100-8", "is a model, which is predicted alone"),
        ("zero3 --devices 8", "Use `mesh.dp_shard=8`."),
    ],
)
def test_predict_lists_the_missing_keys_of_a_model_or_spec(words, message, capsys):
    assert main(["predict", *words.split()]) == WRONG_INPUT
    assert message in capsys.readouterr().err


def test_the_cluster_of_a_spec_may_be_an_option(capsys):
    assert main(["predict", "zero3", "--cluster", "h100-8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"]["device_memory"] > 80e9


def test_a_wrong_spec_ends_with_its_message_and_2(capsys):
    assert main(["predict", "zero3", "mesh.dp_shrd=4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unknown key 'dp_shrd'" in captured.err
    assert "dp_shard" in captured.err
    assert "Traceback" not in captured.err


def test_a_wrong_spec_with_json_gives_its_faults_as_json(capsys):
    assert main(["predict", "zero3", "mesh.dp_shrd=4", "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert record["exit_code"] == 2
    assert record["faults"][0]["place"] == "mesh.dp_shrd"


def test_predict_without_a_spec_names_the_missing_argument(capsys):
    assert main(["predict"]) == 2
    assert "SPEC is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "spelling",
    [["mesh.dp_shard=4"], ["--mesh.dp_shard=4"], ["--mesh.dp_shard", "4"]],
    ids=" ".join,
)
def test_an_override_may_be_spelled_as_an_option(spelling, capsys):
    assert main(["predict", "--json", *spelling, "zero3"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 4


def test_files_with_an_equals_sign_are_files():
    words = ["a/b=c.yaml", "zero3", "train.steps=4", "placement.dp_shard=S*,S,S,R", "name=x"]
    assert split_arguments(words) == (words[:2], words[2:])


@pytest.mark.parametrize(
    ("error", "code"),
    [(VerdictFailed("v"), 1), (RankFailed("rank 1"), 3), (TrainingStopped("nan"), 4)],
)
def test_every_error_has_its_exit_code(error, code, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(dispatcher, "_dispatch", fail)
    assert main(["predict", "zero3"]) == code
    assert capsys.readouterr().err == f"{error}\n"


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["validate", "zero3"], "a launcher started 2 ranks, but this training starts its"),
        (["verify", "zero3", "--steps", "0"], "a trajectory needs at least 3 steps"),
        (["predict", "no-such-spec"], "no spec named"),
    ],
)
def test_of_the_ranks_of_a_launcher_the_first_alone_rejects(
    words, finding, rank, monkeypatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(rank_start.time, "sleep", lambda seconds: None)
    assert main([*words, "--json"]) == 2
    captured = capsys.readouterr()
    said, record = finding in captured.err, captured.out.startswith('{"error": ')
    assert (said, record) == (rank == "0", rank == "0")
    assert rank == "0" or captured == ("", "")


def test_of_a_mistake_the_first_rank_of_another_node_speaks_too(monkeypatch, capsys):
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["predict", "no-such-spec", "--json"]) == 2
    captured = capsys.readouterr()
    assert "no spec named" in captured.err and captured.out == ""


def test_a_number_of_a_rank_without_a_launcher_is_nobodys(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["predict", "no-such-spec"]) == 2
    assert "no spec named" in capsys.readouterr().err


CLOSED = """
import os, sys
from ptrain.cli.main import main
read, write = os.pipe()
os.close(read)
for descriptor in {descriptors}:
    os.dup2(write, descriptor)
sys.exit(main({arguments}))
"""


def test_an_interrupt_ends_with_130_and_no_traceback(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatcher, "_dispatch", interrupt)
    assert main(["predict", "zero3"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arguments", [[], ["specs"], ["help", "several-nodes"], ["predict", "zero3"]]
)
def test_a_reader_that_leaves_early_is_no_error(arguments: list[str]):
    ended = python(CLOSED.format(descriptors=[1], arguments=arguments))
    assert (ended.returncode, ended.stderr) == (141, "")


def test_help_with_a_closed_pipe_is_no_error():
    ended = python(CLOSED.format(descriptors=[1], arguments=["predict", "--help"]))
    assert ended.returncode in (0, 141)  # argparse drops a text that it cannot write at once
    assert ended.stderr == ""


def test_a_message_to_a_closed_pipe_prints_no_traceback():
    ended = python(CLOSED.format(descriptors=[1, 2], arguments=["predict", "no-such-spec"]))
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_standard_output_that_is_closed_at_the_start_is_no_error():
    command = [sys.executable, "-m", "ptrain.cli.main", "specs"]
    ended = python(f"import os\nos.close(1)\nos.execv({sys.executable!r}, {command})")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_validate_leaves_no_files_for_a_rejected_spec(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["validate", "no-such-spec"]) == 2
    assert "no spec named" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
