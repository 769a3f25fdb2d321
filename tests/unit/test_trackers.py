"""W&B, MLflow and TensorBoard behind one interface, without a network: logged values, failures, and
the logged environment."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from socket import socket
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from ptrain.errors import SpecError
from ptrain.spec.job import LogSpec
from ptrain.spec.leaf import section_keys
from ptrain.train import journal
from ptrain.train import tracker as tracker_module
from ptrain.train.folder import RunFolder
from ptrain.train.journal import LOG, TRACKERS, Trackers
from ptrain.train.tracker import Prometheus, TrackedRun, continued_run_id, require_trackers

SPEC = {"name": "small", "train": {"steps": 2, "seed": 0}, "tensor": {"plan": {"blocks.*.up": "x"}}}
ROWS = ((1, {"loss": 5.5, "lr": 1e-3}), (2, {"loss": 5.25}))
CANARIES = {
    "WANDB_API_KEY": "canary0key1of2forty3characters4in5all678",
    "MLFLOW_TRACKING_PASSWORD": "canary-password",
    "PRIVATE_TOKEN": "canary-token",
}


def track_run(folder: Path, **words: Any) -> TrackedRun:
    figures = {"peak_bytes": 2048, "sent_bytes": 512}
    return TrackedRun(name="small-1", folder=folder, spec=SPEC, figures=figures, **words)


def follow(runs: Mapping[str, TrackedRun]) -> Trackers:
    """A training of two steps."""
    with Trackers(runs) as trackers:
        for step, figures in ROWS:
            trackers.log(step, figures)
        trackers.conclude("holds (3 of 3)")
    return trackers


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines(logging.WARNING)
    LOG.addHandler(handler)
    yield lines
    LOG.removeHandler(handler)


class Recorded:
    """A tracker of the tests: what it was given, and a failure of one of its methods."""

    def __init__(self, fails: str = "", fault: Callable[[], object] = lambda: None) -> None:
        self.calls: list[object] = []
        self._fails, self._fault = fails, fault

    def _take(self, name: str, *given: object) -> None:
        if name == self._fails:
            self._fault()
        self.calls.append((name, *given))

    def begin(self, run: TrackedRun) -> str:
        self._take("begin", run.name)
        return run.identity or "new"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._take("log", step, dict(figures))

    def conclude(self, verdict: str) -> None:
        self._take("conclude", verdict)

    def close(self, *, has_failed: bool) -> None:
        self._take("close", has_failed)


ALL = [
    ("begin", "small-1"),
    *[("log", step, figures) for step, figures in ROWS],
    ("conclude", "holds (3 of 3)"),
    ("close", False),
]


def use(monkeypatch: pytest.MonkeyPatch, **trackers: Recorded) -> None:
    for name, recorded in trackers.items():
        monkeypatch.setitem(TRACKERS, name, lambda recorded=recorded: recorded)


def refuse_all(message: str = "no route to host") -> object:
    raise OSError(message)


def test_the_key_names_the_trackers_that_there_are():
    (_, words) = section_keys(LogSpec)["trackers"]
    assert [*words.words] == [*TRACKERS]


def test_a_tracker_is_given_everything_in_order_and_its_identity_is_kept(tmp_path, monkeypatch):
    recorded = Recorded()
    use(monkeypatch, wandb=recorded)
    follow({"wandb": track_run(tmp_path)})
    assert recorded.calls == ALL
    kept = RunFolder(tmp_path).identity("wandb")
    assert kept.read_text() == "new\n" and kept.stat().st_mode & 0o777 == 0o600
    assert continued_run_id(RunFolder(tmp_path), "wandb", None, "small") == "new"


def test_a_training_that_fails_is_closed_as_failed(tmp_path, monkeypatch):
    recorded = Recorded()
    use(monkeypatch, mlflow=recorded)
    with pytest.raises(ZeroDivisionError), Trackers({"mlflow": track_run(tmp_path)}):
        raise ZeroDivisionError
    assert recorded.calls[-1] == ("close", True)


@pytest.mark.parametrize("method", ["begin", "log", "conclude", "close"])
@pytest.mark.parametrize("fault", [refuse_all, sys.exit], ids=["raises", "exits"])
def test_a_failing_tracker_is_one_warning_and_the_others_continue(
    tmp_path, monkeypatch, warnings, method, fault
):
    broken, sound = Recorded(method, fault), Recorded()
    use(monkeypatch, wandb=broken, mlflow=sound)
    follow({"wandb": track_run(tmp_path), "mlflow": track_run(tmp_path)})
    assert sound.calls == ALL
    (line,) = warnings
    assert line.startswith("warning: wandb failed and is disabled: ")


@pytest.mark.parametrize("password", ["canary", "p@canary", "p:@@canary"])
def test_a_password_in_an_address_is_not_repeated(tmp_path, monkeypatch, warnings, password):
    address = f"https://somebody:{password}@tracking.example:5000/api"
    use(monkeypatch, mlflow=Recorded("begin", lambda: refuse_all(address)))
    follow({"mlflow": track_run(tmp_path)})
    (line,) = warnings
    assert "tracking.example" in line and "canary" not in line


def test_a_tracker_that_hangs_is_left_when_its_time_is_over(tmp_path, monkeypatch, warnings):
    release = threading.Event()
    hanging, sound = Recorded("log", release.wait), Recorded()
    use(monkeypatch, wandb=hanging, mlflow=sound)
    monkeypatch.setattr(journal, "PATIENCE", 0.2)
    follow({"wandb": track_run(tmp_path), "mlflow": track_run(tmp_path)})
    assert hanging.calls == ALL[:1] and sound.calls == ALL
    (line,) = warnings
    assert "wandb" in line and "0.2 s" in line
    release.set()


def test_unread_rows_do_not_fill_the_memory(tmp_path, monkeypatch, warnings):
    release = threading.Event()
    use(monkeypatch, wandb=Recorded("begin", release.wait))
    monkeypatch.setattr(journal, "MOST_CALLS", 4)
    with Trackers({"wandb": track_run(tmp_path)}) as trackers:
        for step in range(50):
            trackers.log(step, {})
    (line,) = warnings
    assert "4 rows are waiting" in line
    release.set()


def test_a_continuation_has_the_identity_of_the_run_that_it_continues(tmp_path):
    before, after = RunFolder(tmp_path / "before"), RunFolder(tmp_path / "after")
    saved = before.checkpoints / "step-00000004"
    for folder in (saved, before.identity("wandb").parent, after.path):
        folder.mkdir(parents=True)
    before.identity("wandb").write_text("abc\n")
    before.resolved.write_text("name: 'small'\nmodel: {}\n")
    for source in (before.path, before.checkpoints, saved):
        assert continued_run_id(after, "wandb", str(source), "small") == "abc"
        assert continued_run_id(after, "mlflow", str(source), "small") == ""
        assert continued_run_id(after, "wandb", str(source), "other") == "", "a run of its own"
    assert continued_run_id(after, "wandb", "auto", "small") == ""


def test_a_package_that_is_not_installed_is_rejected_with_the_fix(monkeypatch):
    """MLflow is not there, and of TensorBoard a folder of that name."""
    packages = {"wandb": "wandb/__init__.py", "tensorboard": None}
    specs = {name: SimpleNamespace(origin=origin) for name, origin in packages.items()}
    monkeypatch.setattr(tracker_module, "find_spec", specs.get)
    require_trackers(["wandb"])
    with pytest.raises(
        SpecError, match=r"mlflow needs .*\n  remedy: Run `pip install 'ptrain\[mlflow"
    ) as e:
        require_trackers(["wandb", "mlflow", "tensorboard"])
    assert len(e.value.faults) == 2 and e.value.exit_code == 2


# -- what is called of the libraries, of stand-ins


class Calls:
    """Whatever is called, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def record(self, name: str, answer: object = None) -> Callable[..., Any]:
        def call(*given: object, **named: object) -> Any:
            self.calls.append((name, given, named))
            return answer

        return call

    def all(self, name: str) -> list[tuple[tuple[object, ...], dict[str, object]]]:
        return [call[1:] for call in self.calls if call[0] == name]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    stand_in = ModuleType(name)
    vars(stand_in).update(members)
    monkeypatch.setitem(sys.modules, name, stand_in)


def test_wandb_is_given_the_spec_the_figures_by_step_and_the_verdict(tmp_path, monkeypatch):
    calls, summary = Calls(), {}
    names = ("log", "finish", "define_metric")
    run = SimpleNamespace(summary=summary, **{name: calls.record(name) for name in names})
    module(monkeypatch, "wandb", Settings=dict, init=calls.record("init", run))
    follow({"wandb": track_run(tmp_path)})
    (begun,) = [named for _, named in calls.all("init")]
    assert begun["config"] == {**SPEC, "predicted": {"peak_bytes": 2048, "sent_bytes": 512}}
    assert (begun["name"], begun["resume"], begun["dir"]) == ("small-1", "allow", str(tmp_path))
    assert begun["settings"]["console"] == "off" and begun["settings"]["silent"]
    assert calls.all("log") == [(({"step": step, **row},), {}) for step, row in ROWS]
    assert summary == {"verdict": "holds (3 of 3)"}
    assert calls.all("finish") == [((), {"exit_code": 0})]
    follow({"wandb": track_run(tmp_path, identity=str(begun["id"]))})
    again = calls.all("init")[1][1]
    assert (again["id"], again["name"]) == (begun["id"], None)


def test_mlflow_is_given_parameters_once_metrics_by_step_and_the_verdict(tmp_path, monkeypatch):
    calls = Calls()
    names = ("log_params", "log_metrics", "set_tag", "end_run")
    active = SimpleNamespace(info=SimpleNamespace(run_id="xyz"))
    members = {name: calls.record(name) for name in names}
    module(monkeypatch, "mlflow", start_run=calls.record("start_run", active), **members)
    follow({"mlflow": track_run(tmp_path)})
    follow({"mlflow": track_run(tmp_path, identity="xyz")})
    (parameters,) = [given[0] for given, _ in calls.all("log_params")]
    assert parameters["train.steps"] == "2" and parameters["predicted.peak_bytes"] == "2048"
    assert parameters["tensor.plan.blocks._.up"] == "x", "no key of MLflow's has a star"
    runs = [named["run_id"] for _, named in calls.all("start_run")]
    assert runs == [None, "xyz"]
    assert calls.all("log_metrics")[:2] == [((row,), {"step": step}) for step, row in ROWS]
    assert calls.all("set_tag")[0] == (("verdict", "holds (3 of 3)"), {})
    assert calls.all("end_run") == 2 * [(("FINISHED",), {})]


def test_a_large_spec_goes_to_mlflow_in_requests_that_it_takes(tmp_path, monkeypatch):
    calls = Calls()
    active = SimpleNamespace(info=SimpleNamespace(run_id="xyz"))
    members = {name: calls.record(name) for name in ("log_params", "end_run")}
    module(monkeypatch, "mlflow", start_run=calls.record("start_run", active), **members)
    spec = {f"key{number}": "x" * 1000 for number in range(205)}
    run = TrackedRun(name="large", folder=tmp_path, spec=spec, figures={})
    with Trackers({"mlflow": run}):
        pass
    requests = [given[0] for given, _ in calls.all("log_params")]
    assert [len(request) for request in requests] == [100, 100, 5]
    assert {len(value) for request in requests for value in request.values()} == {500}


def test_tensorboard_is_given_scalars_by_step_and_hides_steps_done_again(tmp_path, monkeypatch):
    calls = Calls()
    names = ("add_scalar", "add_text", "close")
    writer = SimpleNamespace(**{name: calls.record(name) for name in names})
    constructor = calls.record("SummaryWriter", writer)
    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=constructor)
    follow({"tensorboard": track_run(tmp_path)})
    follow({"tensorboard": track_run(tmp_path, first=4)})
    writers = [named for _, named in calls.all("SummaryWriter")]
    assert [named["purge_step"] for named in writers] == [None, 5]
    assert {named["log_dir"] for named in writers} == {str(tmp_path / "events")}
    scalars = [("loss", 5.5, 1), ("lr", 1e-3, 1), ("loss", 5.25, 2)]
    assert [given for given, _ in calls.all("add_scalar")][:3] == scalars
    texts = dict(given for given, _ in calls.all("add_text"))
    assert "| train.steps | 2 |" in texts["run"] and texts["verdict"] == "holds (3 of 3)"
    assert len(calls.all("close")) == 2


def test_prometheus_reads_the_newest_figures_and_the_last_checkpoint(tmp_path, monkeypatch):
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("PTRAIN_METRICS_PORT", str(port))
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    tracker = Prometheus()
    tracker.begin(track_run(tmp_path))
    for step, figures in ROWS:
        tracker.log(step, figures)
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert {"ptrain_loss 5.25", "ptrain_step 2.0", "ptrain_last_checkpoint_step 2.0"} < {*lines}
    assert "# TYPE ptrain_loss gauge" in lines
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"http://127.0.0.1:{port}/")
    tracker.close(has_failed=False)
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_disables_prometheus_and_not_the_training(
    tmp_path, monkeypatch, warnings
):
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("PTRAIN_METRICS_PORT", str(taken.getsockname()[1]))
        follow({"prometheus": track_run(tmp_path)})
    assert len(warnings) == 1 and "prometheus failed and is disabled" in warnings[0]


# -- the libraries themselves, where they are installed


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, and an environment with secrets in it."""
    for name, secret in CANARIES.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.db'}")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def require_no_secret(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        assert not [name for name, secret in CANARIES.items() if secret.encode() in content], path


def test_wandb_writes_an_offline_run_that_resumes_without_secrets(offline, warnings):
    pytest.importorskip("wandb")
    follow({"wandb": track_run(offline)})
    identity = continued_run_id(RunFolder(offline), "wandb", None, "small")
    follow({"wandb": track_run(offline, identity=identity, first=2)})
    written = sorted(offline.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb"))
    assert identity and written and not warnings
    content = written[0].read_bytes()
    assert b"5.25" in content and b"holds (3 of 3)" in content and b"peak_bytes" in content
    require_no_secret(offline)


def test_mlflow_writes_a_run_to_a_file_and_resumes_it(offline, warnings):
    mlflow = pytest.importorskip("mlflow")
    follow({"mlflow": track_run(offline)})
    identity = continued_run_id(RunFolder(offline), "mlflow", None, "small")
    follow({"mlflow": track_run(offline, identity=identity, first=2)})
    assert not warnings
    client = mlflow.MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    (run,) = client.search_runs([client.get_run(identity).info.experiment_id])
    assert (run.info.run_name, run.info.status) == ("small-1", "FINISHED")
    assert run.data.params["predicted.sent_bytes"] == "512"
    assert run.data.tags["verdict"] == "holds (3 of 3)"
    history = [(row.step, row.value) for row in client.get_metric_history(identity, "loss")]
    assert sorted(history) == 2 * [(1, 5.5)] + 2 * [(2, 5.25)]
    require_no_secret(offline.parent)


def test_mlflow_without_its_server_is_a_warning(offline, warnings, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:canary@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    follow({"mlflow": track_run(offline)})
    (line,) = warnings
    assert "mlflow has failed" in line and "canary" not in line


def test_tensorboard_itself_writes_events_that_it_reads(offline, warnings):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow({"tensorboard": track_run(offline)})
    events = EventAccumulator(str(offline / "events"))
    events.Reload()
    assert [(row.step, row.value) for row in events.Scalars("loss")] == [(1, 5.5), (2, 5.25)]
    assert "verdict/text_summary" in events.Tags()["tensors"] and not warnings
    require_no_secret(offline)
