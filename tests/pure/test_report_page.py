"""`ptrain report`: the answer comes first, the page stands alone, and names are escaped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ptrain.charts.page import PageSubject, answer_of
from ptrain.cli.main import main

OLD_RUN = Path(__file__).parents[1] / "fixtures" / "5a419e96" / "zero3"
VOID = {"meta", "br"}
MOST_BYTES, MOST_SECONDS = 2_000_000, 20.0
WIDTHS = (390, 820, 1440)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
KILLED = "error: rank 1 was killed by SIGKILL (by a user, or by the kernel)\n  last <script> lines"
FULL = "error: rank 0 raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


class Page(HTMLParser):
    """The tags, attributes and texts of a page; raises if tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.values: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [value or "" for name, value in attrs if name != "xmlns"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def first_answer(text: str) -> list[str]:
    """Return the texts of a page's first answer: the name, the headline, then its lines."""
    answer = re.search(r'<main><h1>[^<]*</h1><div class="answer \w+">(.*?)</div>', text, re.S)
    return [unescape(part) for part in re.split(r"<[^>]*>", answer[1]) if part]


def report(tmp_path: Path, *words: str) -> tuple[str, Page]:
    out = tmp_path / "page.html"
    assert main(["report", *words, "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    return text, Page(text)


def failed_run(tmp_path: Path, error: str, name: str = "run", spec: str = "") -> str:
    """Return a run without a result whose launcher recorded an error."""
    folder = tmp_path / name
    shutil.copytree(OLD_RUN, folder, ignore=shutil.ignore_patterns("summary.json"))
    row = {"time": "2026-11-30 12:00:00", "error": error}
    (folder / "failures.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    if spec:
        (folder / "spec.resolved.yaml").write_text(spec, encoding="utf-8")
    return str(folder)


def test_the_page_of_an_older_commits_run_begins_with_its_verdict(tmp_path):
    text, _ = report(tmp_path, str(OLD_RUN))
    assert "verdict: holds" in first_answer(text)[1]
    assert 'class="answer good"' in text
    for part in ("loss", "tokens per second", "predicted and measured", "placement on 2 ranks"):
        assert part in text
    assert "step-00000002" in text


def test_a_page_needs_no_script_and_no_network_and_closes_its_tags(tmp_path):
    text, page = report(tmp_path, "pp-1f1b", str(OLD_RUN))
    assert not {"script", "link", "img", "iframe"} & {*page.tags}
    assert not [value for value in page.values if "//" in value]
    assert "@import" not in text and "url(" not in text


def test_several_specs_are_compared_before_each_has_its_part(tmp_path):
    text, _ = report(tmp_path, "8b-ddp", "8b-zero3")
    assert first_answer(text)[1].startswith("Does not fit by 14.79 GiB")
    assert text.index("Fits: ") < text.index("<h3>Comparison</h3>") < text.index("<h2>8b-ddp</h2>")
    assert "usable memory 74.12 GiB" in text


def test_a_failed_run_begins_with_the_cause_and_the_command_that_continues(tmp_path):
    text, _ = report(tmp_path, failed_run(tmp_path, KILLED))
    first, *others = first_answer(text)[1:]
    assert first.startswith("Failed after step 3 of ")
    assert "rank 1 was killed by SIGKILL" in first
    assert any("Continue: ptrain train " in text for text in others)


def test_a_run_without_memory_names_the_cheapest_change_that_fits(tmp_path):
    spec = "name: ddp\nmodel: {preset: llama3-8b}\nmesh: {dp_replicate: 8}\nplacement: ddp\n"
    spec += "batch: {global: 8, micro: 1, sequence: 4096}\ncluster: {preset: h100-8}\n"
    text, _ = report(tmp_path, failed_run(tmp_path, FULL, spec=spec))
    assert first_answer(text)[1].startswith("Out of memory on rank 0 after step ")
    answer = text[text.index('class="answer bad"') : text.index("<h3>")]
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in answer
    assert "Does not fit by " in answer and "changes that fit" in answer


def test_a_page_needs_neither_torch_nor_matplotlib(tmp_path):
    words = ["report", "zero3", str(OLD_RUN), "--out", str(tmp_path / "page.html")]
    code = f"import sys; from ptrain.cli.main import main; main({words!r})"
    code += "; print({'torch', 'matplotlib', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_names_and_messages_are_escaped(tmp_path):
    name = "<script>alert(1)</script>".replace("/", "")
    text, page = report(tmp_path, failed_run(tmp_path, KILLED, name))
    assert "<script" not in text and "script" not in page.tags
    assert escape(name) in text and "last &lt;script&gt; lines" in text


def test_a_run_whose_code_may_not_be_imported_still_has_its_answer(tmp_path):
    spec = "name: own\nmodel: {target: 'my.module:make', vocabulary: 10}\nmesh: {dp_replicate: 2}\n"
    text, _ = report(tmp_path, failed_run(tmp_path, KILLED, spec=spec))
    assert "rank 1 was killed" in first_answer(text)[1]


def test_seven_specs_take_less_than_two_megabytes_and_a_few_seconds(tmp_path):
    names = ("ddp", "zero1", "zero2", "zero3", "tp", "tp-sp", "tp-zero3")
    start = time.monotonic()
    text, _ = report(tmp_path, *(f"8b-{name}" for name in names))
    seconds = time.monotonic() - start
    assert len(text.encode()) < MOST_BYTES
    assert seconds < MOST_SECONDS
    print(f"{len(text.encode()) / 1000:.0f} kB in {seconds:.1f} s")


def test_wrong_words_are_rejected(tmp_path, capsys):
    for words, finding in (
        ([], "SPEC is missing"),
        (["zero3", "--out", str(tmp_path)], "cannot write: Is a directory"),
        ([str(OLD_RUN), "mesh.tp=2"], "overrides apply to specs"),
    ):
        assert main(["report", *words]) == 2
        assert finding in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_one_width_of_each_picture_and_nothing_beyond_the_edge(tmp_path, width):
    text, _ = report(tmp_path, "8b-zero3", str(OLD_RUN))
    measure = (
        "f.onload=()=>{const d=f.contentDocument,r=d.documentElement;"
        "const s=[...d.querySelectorAll('svg')].filter(e=>e.getBoundingClientRect().width);"
        "const w=s.map(e=>e.getBoundingClientRect().right);"
        "document.body.dataset.found=[r.scrollWidth,s.length,Math.max(...w)].join(' ')}"
    )
    frame = f'<iframe id="f" width="{width}" height="900" style="border:0" srcdoc="{escape(text)}">'
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(f"<body>{frame}</iframe><script>{measure}</script>", encoding="utf-8")
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "dump-dom")
    flags += ("disable-background-networking", "disable-component-update", "disable-sync")
    command = [CHROMIUM, *(f"--{flag}" for flag in flags), "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", wrapper.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = dom.partition('data-found="')[2].partition('"')[0]
    page_width, drawn, right = map(float, found.split())
    assert page_width <= width
    assert drawn == text.count("<svg") / 2
    assert right <= width


def test_a_run_whose_spec_cannot_be_predicted_says_why_and_counts_its_steps_only() -> None:
    rows = [{"step": 3, "loss": 1.0}]
    run = PageSubject(name="r", is_run=True, reason="error: step.target: not imported", rows=rows)
    answer = answer_of(run)
    assert answer.headline == "Not finished: step 3 is done"
    assert answer.lines[-1] == "Not predicted: error: step.target: not imported"


def test_a_folder_that_is_no_run_and_a_file_that_is_no_page_get_a_message(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "this folder is no run" in capsys.readouterr().err
    assert main(["report", "zero3", "--out", str(tmp_path / "a.pdf")]) == 2
    assert "Use `--out a.html`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
