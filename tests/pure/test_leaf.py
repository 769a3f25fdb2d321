"""Each kind of value at its limits, and the message for the first value beyond them."""

from __future__ import annotations

import math

import pytest

from ptrain.spec.activations import ActivationModeText, ModesByBlock, blocks_of
from ptrain.spec.leaf import (
    Boolean,
    Choice,
    Either,
    FreeMapping,
    Integer,
    Leaf,
    ModeText,
    Numbers,
    Real,
    RejectedValue,
    Size,
    Text,
)
from ptrain.spec.slips import (
    did_you_mean,
    find_by_part,
    normalize_mode,
    suggest_quotes,
    suggest_size,
    suggest_unit,
    suggest_unquoted,
    with_article,
)


def message_of(leaf: Leaf, value: object) -> tuple[str, str]:
    """Return finding and fix of a rejected value."""
    with pytest.raises(RejectedValue) as caught:
        leaf.check(value)
    assert str(caught.value) == caught.value.finding
    return caught.value.finding, caught.value.remedy


@pytest.mark.parametrize(
    ("leaf", "value", "stored"),
    [
        (Integer("", 2, 9), 2, 2),
        (Integer("", 2, 9), 9, 9),
        (Integer("", words=("auto",)), "auto", "auto"),
        (Integer(""), 1, 1),
        (Integer(""), 10**9, 10**9),
        (Real("", 0.5, 2), 0.5, 0.5),
        (Real("", 0.5, 2), 2, 2.0),
        (Real("", 0.5, excludes_low=True), 0.6, 0.6),
        (Real("", accepts_null=True), None, None),
        (Real(""), 0, 0.0),
        (Real(""), 9.9e299, 9.9e299),
        (Boolean(""), False, False),
        (Choice("", {"on": "", "off": ""}), "off", "off"),
        (Text(""), "a", "a"),
        (Text(""), "a" * 500, "a" * 500),
        (Text("", accepts_null=True), None, None),
        (Size("", low=1024, high=2**20), 1024, 1024),
        (Size("", low=1024, high=2**20), "1 MiB", 2**20),
        (Size(""), 1, 1),
        (Size(""), 10**18, 10**18),
        (Size("", rate=True), "2 GB/s", 2 * 10**9),
        (Size("", words=("whole",)), "whole", "whole"),
        (Numbers(""), [0, 1], (0.0, 1.0)),
        (Numbers("", 1, 9, is_integer=True), 9, (9,)),
        (Numbers("", 1, 9, count=2, is_integer=True), [1, 9], (1, 9)),
        (FreeMapping(""), {"a": [1]}, {"a": [1]}),
        (FreeMapping("", values=Integer("")), {"a": 1}, {"a": 1}),
        (Either("", "a number or a truth", (Integer(""), Boolean(""))), True, True),
        (ModesByBlock("", values=Integer("")), {"0-7": 1, "8-": 2}, {"0-7": 1, "8-": 2}),
        (ModesByBlock("", values=Integer("")), {"3-3": 1, "4": 2}, {"3-3": 1, "4": 2}),
    ],
)
def test_the_limits_are_accepted(leaf, value, stored):
    taken = leaf.check(value)
    assert (taken, type(taken)) == (stored, type(stored))


SWITCH = Choice("", {"on": ""}, slips={"true": "on", "false": "off"})
WHOLE_2_TO_9 = "must be an integer in 2..9"
SIZE = "must be a size like 80 GiB in 1024..2048 bytes"
UNITS = (
    "Use a number of bytes, or a number with a unit: kB, MB, GB, TB (powers of 1000), "
    "KiB, MiB, GiB or TiB."
)
A_MODE = "must be a mode: R, S, S*, M or O, or with a tier (R@host, S@file)"
AT_LEAST_A_HALF = "must be a finite number >= 0.5"


@pytest.mark.parametrize(
    ("leaf", "value", "finding", "remedy"),
    [
        (Integer("", 2, 9), 1, f"{WHOLE_2_TO_9}; got the number 1", ""),
        (Integer("", 2, 9), 10, f"{WHOLE_2_TO_9}; got the number 10", ""),
        (Integer("", 2, 9), True, f"{WHOLE_2_TO_9}; got the boolean true", ""),
        (Integer("", 2, 9), "3", f"{WHOLE_2_TO_9}; got the string '3'",
         "Use `3` without quotes or underscores."),
        (Integer("", 2, 9, words=("a", "b")), [], f"{WHOLE_2_TO_9} or a or b; got a list", ""),
        (Real("", 0.5), 0.4, f"{AT_LEAST_A_HALF}; got the number 0.4", ""),
        (Real("", 0.5), math.inf, f"{AT_LEAST_A_HALF}; got the number inf", ""),
        (Real("", 0.5), 10**300, f"{AT_LEAST_A_HALF}; got the number {10**300}", ""),
        (Real("", 0.5), True, f"{AT_LEAST_A_HALF}; got the boolean true", ""),
        (Real("", 0.5), None, f"{AT_LEAST_A_HALF}; got nothing", ""),
        (Real("", 0.5, 2), 2.1, f"{AT_LEAST_A_HALF} and <= 2; got the number 2.1", ""),
        (Real("", 0.5, excludes_low=True), 0.5,
         "must be a finite number > 0.5; got the number 0.5", ""),
        (Real("", 0.5, accepts_null=True), {}, f"{AT_LEAST_A_HALF}, or null; got a mapping", ""),
        (Boolean(""), 1, "must be true or false; got the number 1", "Use `true` or `false`."),
        (Choice("", {"on": "", "off": ""}), "of", "must be one of on, off; got the string 'of'",
         "Did you mean 'off'?"),
        (SWITCH, True, "must be one of on; got the boolean true", "Did you mean 'on'?"),
        (SWITCH, False, "must be one of on; got the boolean false", ""),
        (Choice("", {"on": ""}), 3, "must be one of on; got the number 3", ""),
        (Text(""), "", "must be a text; got the string ''", ""),
        (Text(""), "a" * 501, f"must be a text; got the string {'a' * 57 + '...'!r}", ""),
        (Text("", "[a]+", "letters"), "a" * 60 + "b",
         f"must be letters; got the string {'a' * 57 + '...'!r}", ""),
        (Text("", "[a]+", "letters"), "a" * 59 + "b",
         f"must be letters; got the string {'a' * 59 + 'b'!r}", ""),
        (Text(""), None, "must be a text; got nothing", ""),
        (Text("", accepts_null=True), 3, "must be a text; got the number 3",
         "Put it in quotes to make it a string."),
        (Text(""), [], "must be a text; got a list", ""),
        (Size("", low=1024, high=2048), 2049, f"{SIZE}; got the number 2049", UNITS),
        (Size("", low=1024, high=2048), "3 KiB", f"{SIZE}; got the string '3 KiB'", UNITS),
        (Size("", low=1024, high=2048), "2 KiB/s", f"{SIZE}; got the string '2 KiB/s'", UNITS),
        (Size("", low=1024, high=2048), 1023, f"{SIZE}; got the number 1023",
         "Did you mean `1023 MiB`?"),
        (Size("", low=1024, high=2048), True, f"{SIZE}; got the boolean true", UNITS),
        (Size("", low=1024, high=2048), math.inf, f"{SIZE}; got the number inf", UNITS),
        (Size("", low=1, high=2048, rate=True), [],
         "must be a size like 450 GB/s in 1..2048 bytes; got a list", UNITS),
        (Size("", low=1024, high=2048, words=("whole", "half")), "hole",
         "must be whole, half, or a size like 80 GiB in 1024..2048 bytes; got the string 'hole'",
         "Did you mean 'whole'?"),
        (Numbers(""), [2], "must be a list of numbers in 0..1; got [2]", ""),
        (Numbers(""), 1, "must be a list of numbers in 0..1; got the number 1", ""),
        (Numbers("", 1, 9, is_integer=True), [1.5],
         "must be a list of whole numbers in 1..9, or one; got [1.5]", ""),
        (Numbers("", count=2), [1], "must be a list of 2 numbers in 0..1; got [1]", ""),
        (FreeMapping(""), 3, "must be a mapping; got the number 3", ""),
        (FreeMapping("", values=Integer("", 2, 9)), {"a": "3"},
         f"a: {WHOLE_2_TO_9}; got the string '3'",
         "Use `3` without quotes or underscores."),
        (Either("", "a number or an a", (Integer(""), Choice("", {"aaaa": ""}))), "aaab",
         "must be a number or an a; got the string 'aaab'", "Did you mean 'aaaa'?"),
        (Either("", "a number", (Integer(""),), hint=lambda value: f"not {value}"), "x",
         "must be a number; got the string 'x'", "not x"),
        (Either("", "a mapping", (Integer(""), FreeMapping("", values=Integer("", 2, 9)))),
         {"a": 1},
         f"a: {WHOLE_2_TO_9}; got the number 1", ""),
        (ModesByBlock("", values=Integer("")), {"0-7": 1, "7-": 1},
         "the block ranges '0-7' and '7-' overlap",
         "Give each block one mode. Blocks without a range are `R`."),
        (ModesByBlock("", values=Integer("")), {"0-": 1, "3": 1}, ("the block ranges '0-' and "
                                                                "'3' overlap"),
         "Give each block one mode. Blocks without a range are `R`."),
        (ModesByBlock("", values=Integer("")), {"3-2": 1}, "the range '3-2' ends before it starts",
         "Use `\"2-3\"`."),
        (ModesByBlock("", values=Integer("")), {"all": 1}, "'all' is not a range of blocks",
         "Use `first-last`, counted from 0: `{\"0-7\": M, \"8-\": R}`."),
        (ModeText(""), "M@host", f"{A_MODE}; got the string 'M@host'", ""),
        (ModeText(""), False, f"{A_MODE}; got the boolean false",
         "Put it in quotes to make it a string."),
        (ActivationModeText(""), "Offload", f"{A_MODE}; got the string 'Offload'",
         "Did you mean `O`?"),
    ],
)  # fmt: skip
def test_beyond_them_the_range_and_the_value_are_named(leaf, value, finding, remedy):
    assert message_of(leaf, value) == (finding, remedy)


@pytest.mark.parametrize(
    ("guess", "values", "expected"),
    [
        (suggest_unquoted, ("1_000",), "Use `1000` without quotes or underscores."),
        (suggest_unquoted, ("-1e-5",), "Use `-1e-5` without quotes or underscores."),
        (suggest_unquoted, ("1:30",), ""),
        (suggest_unquoted, ("one",), ""),
        (suggest_unquoted, (3,), ""),
        (suggest_unquoted, ("1, 2",),
         ("Use one number. Only `ptrain predict` and `ptrain validate` "
                             "accept several: `1,2`.")),
        (suggest_quotes, (1.5,), "Put it in quotes to make it a string."),
        (suggest_quotes, ("a",), ""),
        (suggest_quotes, (None,), ""),
        (did_you_mean, ("",), ""),
        (suggest_size, (25, 25, 1024, ()), "Did you mean `25 MiB`?"),
        (suggest_size, ("25.0 B", 25, 1024, ("a", "b"),), ("Did you mean `25 MiB`? Or use `a` "
                                                        "or `b`.")),
        (suggest_size, ("0.5 kB", 500, 1024, ("a",),), "Use at least 1024 bytes or `a`."),
        (suggest_size, (0, 0, 1024, ()), "Use at least 1024 bytes."),
        (suggest_size, (1024, 1024, 1024, ()), ""),
        (suggest_size, (-1, -1, 1024, ()), ""),
        (suggest_size, ("x", None, 1024, ()), ""),
        (suggest_unit, ("2",), "Did you mean '2 blocks'?"),
        (suggest_unit, ("12_Blk",), "Did you mean '12 blocks'?"),
        (suggest_unit, ("0 blocks",), ""),
        (suggest_unit, (True,), ""),
        (suggest_unit, ("models",), "Did you mean 'model'?"),
        (normalize_mode, ("o@FILE",), "S@file"),
        (normalize_mode, ("s@cpu",), "O"),
        (normalize_mode, ("R@cuda",), "R"),
        (normalize_mode, ("r@nvme",), "R@file"),
        (normalize_mode, ("m@x",), "M@x"),
        (find_by_part, ("memory", ("host", "device_memory", "memory_of"),), "device_memory"),
        (find_by_part, ("host", ("ghost", "host_memory"),), "host_memory"),
        (find_by_part, ("x", ("host",),), ""),
        (with_article, ("Embedding",), "an Embedding"),
        (with_article, ("Linear",), "a Linear"),
        (blocks_of, ("0-7",), (0, 7)),
        (blocks_of, ("3",), (3, 3)),
        (blocks_of, ("8-",), (8, None)),
    ],
)  # fmt: skip
def test_a_probable_meaning_is_suggested(guess, values, expected):
    assert guess(*values) == expected
