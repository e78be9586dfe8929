import pytest

from gemini.units import GIB, align_up, format_bytes, parse_bytes


def test_parse_bytes_reads_binary_and_decimal_units():
    assert parse_bytes("8GiB") == 8 * GIB
    assert parse_bytes("1TB") == 10**12
    assert parse_bytes(" 1.5 kib ") == 1536
    assert parse_bytes(4096) == parse_bytes("4096") == 4096
    assert parse_bytes("24G") == parse_bytes("24gb") == parse_bytes("24 GB") == 24 * 10**9
    assert parse_bytes(0) == 0 and parse_bytes("6B") == 6


@pytest.mark.parametrize("bad", ["8 apples", "-1GiB", "", "GiB", -1, 1.5, True, None])
def test_parse_bytes_refuses_what_is_no_size(bad):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(bad)


@pytest.mark.parametrize("size", [6, "6", " 6 ", "6.0"])
def test_a_few_bytes_without_a_unit_are_taken_for_a_unit_that_was_forgotten(size):
    with pytest.raises(ValueError, match="size 6 is 6 bytes; did you mean '6GiB'"):
        parse_bytes(size)


def test_format_bytes_is_read_back_within_its_digits():
    for nbytes in (0, 1, 1023, 1024, 5 * GIB // 3):
        assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.005)


def test_align_up():
    assert [align_up(v, 64) for v in (0, 1, 64, 65)] == [0, 64, 64, 128]
