import pytest

from optim.rules.state_layout import MASTER, Plane, StateLayout

LAYOUT = StateLayout((Plane("a", "float32"), Plane("b", "bfloat16")))


def test_planes_lie_one_after_the_other_in_a_block():
    assert LAYOUT.bytes_per_element == 6
    assert LAYOUT.offsets(64) == (0, 256)
    assert LAYOUT.block_nbytes(64) == 384


def test_a_master_goes_in_front():
    with_master = LAYOUT.with_master()
    assert [plane.name for plane in with_master.planes] == [MASTER, "a", "b"]
    assert with_master.has_master and not LAYOUT.has_master


def test_names_are_unique():
    with pytest.raises(ValueError, match="not unique"):
        StateLayout((Plane("a", "float32"), Plane("a", "float32")))
