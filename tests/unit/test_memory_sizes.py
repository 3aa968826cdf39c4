"""Sizes as users write them."""

import pytest

from ortlab.errors import OptionError
from ortlab.memory.sizes import read_size


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
    assert read_size(written) == expected


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
        read_size(written, name="budget")
    assert says in str(refusal.value)
    assert "budget" in refusal.value.what
    assert "6 GiB" in refusal.value.fix
