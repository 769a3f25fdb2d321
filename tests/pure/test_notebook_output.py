"""Notebooks show predictions with their answer and a picture, and rows as DataFrames."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import ptrain
from ptrain.errors import SpecError
from ptrain.report.record import Check, CheckTable
from ptrain.wording import answer_html


@pytest.fixture
def derivation() -> ptrain.derive:
    return ptrain.derive(ptrain.load("8b-ddp").spec)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a pandas whose DataFrame is the list of its rows."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))


def html_text(html: str) -> str:
    texts: list[str] = []
    parser = HTMLParser()
    parser.handle_data = texts.append  # type: ignore[method-assign]
    parser.feed(html)
    return "".join(texts)


def test_a_prediction_begins_with_its_answer_and_has_a_picture_and_the_printed_text(derivation):
    html = derivation._repr_html_()
    text = html_text(html)
    assert text.startswith("Does not fit by 14.79 GiB")
    assert html.count("<svg") == html.count("</svg>") == 1
    assert text.endswith(str(derivation))


def test_a_spec_an_estimate_and_a_plan_show_their_printed_text(derivation):
    for value in (derivation.spec, derivation.exact, derivation.plan):
        assert html_text(value._repr_html_()) == str(value)


def test_markup_is_escaped():
    html = answer_html("<b>x", "<i>y")
    assert "&lt;b&gt;x" in html and "&lt;i&gt;y" in html and "<i>" not in html


def test_the_rows_of_an_estimate_add_up_to_its_figures(derivation, rows):
    exact = derivation.exact
    assert max(row["device_bytes"] for row in exact.to_pandas("peak")) == exact.peak_bytes()
    states = {row["state"] for row in exact.to_pandas() if row["rank"] == 0}
    assert {"parameters", "optimizer", "gradients"} <= states
    sent = sum(row["sent_bytes"] for row in exact.to_pandas("traffic"))
    assert sent == sum(row.sent_bytes for row in exact.traffic) > 0


def test_an_unknown_kind_of_rows_is_rejected(derivation):
    with pytest.raises(SpecError, match="`memory`, `peak` or `traffic`"):
        derivation.exact.to_pandas("time")


def test_checks_are_rows(rows):
    class Checked(CheckTable):
        checks = (Check(name="peak", predicted=2, measured=1, tolerance=0.0, holds=False),)

    (row,) = Checked().to_pandas()
    assert (row["name"], row["predicted"], row["measured"], row["holds"]) == ("peak", 2, 1, False)


@pytest.mark.nightly
def test_the_rows_of_a_selection_are_in_its_order(rows):
    selection = ptrain.select("llama3-8b", cluster="h100-8")
    table = selection.to_pandas()
    assert [row["peak_bytes"] for row in table] == [row.peak_bytes for row in selection.ranking]
    assert html_text(selection._repr_html_()) == str(selection)


def test_without_pandas_the_message_names_the_package(derivation, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SpecError, match="pip install pandas"):
        derivation.exact.to_pandas()
