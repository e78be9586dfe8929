"""Kills at every call on a disk: parameters and masters of one step are whole."""

import itertools

from tests.support.disks.killing import left_by_kill


def test_a_kill_at_every_call_of_two_steps_leaves_one_step_whole_in_all_files(tmp_path):
    found = []
    for number in itertools.count():
        step = left_by_kill(tmp_path / str(number), number)
        if step is None:
            break
        found.append(step)
    assert {1, 2} <= set(found) and found == sorted(found)
