from __future__ import annotations

import math

import pytest

from ortlab import units
from ortlab.errors import OptionError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (671_088_640, "640 MiB"),
        (1024**3, "1.00 GiB"),
        (1024**3 - 1, "1.00 GiB"),  # not "1,024 MiB"
        (1.5 * 1024**5, "1,536 TiB"),
        (-3 * 1024**2, "-3.00 MiB"),
    ],
)
def test_size_is_1024_based_and_keeps_three_digits(value, text):
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.0421, "0.042 ms"),
        (0.5, "0.500 ms"),
        (12.34, "12.3 ms"),
        (999.4, "999 ms"),
        (999.7, "1.00 s"),  # not "1,000 ms"
        (1234, "1.23 s"),
        (59_940, "59.9 s"),
        (59_960, "1 min 00 s"),  # not "60.0 s"
        (125_000, "2 min 05 s"),
    ],
)
def test_duration_picks_its_unit_after_rounding(value, text):
    assert units.duration(value) == text


def test_ratio_with_its_interval():
    assert units.ratio(0.834) == "0.83x"
    assert units.ratio(0.0042) == "0.0042x"  # two digits, never "0.00x"
    assert units.ratio_interval(0.83, 0.8, 0.86) == "0.83x [0.80, 0.86]"
    assert units.ratio_interval(0.83, math.nan, math.nan) == "0.83x"


def test_percent_count_loss_and_difference():
    assert units.percent(0.125) == "12.5 %"
    assert units.count(12345) == "12,345"
    assert units.loss(6.5) == "6.5000"
    assert units.loss(math.nan) == "nan"  # a diverged loss is a result
    assert units.difference(1.234e-7) == "1.2e-07"
    assert units.difference(0.0) == "0"


@pytest.mark.parametrize(
    "write", [units.size, units.duration, units.ratio, units.percent, units.count, units.difference]
)
@pytest.mark.parametrize("value", [None, math.nan])
def test_a_missing_number_is_said_to_be_missing(write, value):
    assert write(value) == "n/a"


def test_fold_leaves_the_middle_out_and_keeps_the_limit():
    assert units.fold("short", 10) == "short"
    folded = units.fold("a" * 5000 + "end", 40)
    assert len(folded) == 40
    assert folded.startswith("aaa")
    assert folded.endswith("aend")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("6 GiB", 6 * 2**30),
        ("6GiB", 6 * 2**30),
        ("  512 mib ", 512 * 2**20),
        ("1.5 KiB", 1536),
        (".5 MiB", 2**19),
        ("6 GB", 6_000_000_000),
        ("1_000 B", 1000),
        ("2 TiB", 2 * 2**40),
        (4096, 4096),
    ],
)
def test_a_size_is_read_in_bytes(written: object, expected: int) -> None:
    assert units.read_size(written) == expected


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("0 GiB", "above zero"),
        (0, "above zero"),
        ("-6 GiB", "above zero"),
        (-1, "above zero"),
        ("0.1 B", "above zero"),
        ("9999999999999 TiB", "below 8 EiB"),
        (2**20000, "below 8 EiB"),
        ("9" * 6000 + " GiB", "cannot be read"),
        ("6 GigaFlop", "'gigaflop'"),
        ("6 G", "'g'"),
        ("6", "no unit"),
        ("GiB", "cannot be read"),
        ("", "cannot be read"),
        ("6,5 GiB", "cannot be read"),
        ("6 GiB 3", "cannot be read"),
        ("nan GiB", "cannot be read"),
        (6.0, "not float"),
        (True, "not bool"),
        (None, "not NoneType"),
        ("<b>" * 100, "…"),
    ],
    ids=lambda given: ascii(given)[:20] if isinstance(given, str) else type(given).__name__,
)
def test_what_is_no_size_is_refused_with_what_to_write(written: object, says: str) -> None:
    with pytest.raises(OptionError) as refusal:
        units.read_size(written, name="budget")
    assert says in str(refusal.value)
    assert "budget" in refusal.value.what
    assert "6 GiB" in refusal.value.fix
