"""A rank is killed at a random moment, and the run ends with the bits of an undisturbed one."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from tests.support.loops.restarted import STARTERS, ended_well, read, started
from tests.support.until import until

KILLS, STEPS, SECONDS = 20, 30, 5.0


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_moments(tmp_path, starter):
    undisturbed = tmp_path / "undisturbed"
    ended_well(started(undisturbed, starter, "--nproc-per-node=2", steps=STEPS))
    drawn, began_again = random.Random(0), 0
    for number in range(KILLS):
        out = tmp_path / str(number)
        run = started(out, starter, "--nproc-per-node=2", "--max-restarts=3", steps=STEPS)
        until((out / "pid-1").exists)
        time.sleep(drawn.uniform(0, SECONDS))
        with suppress(ProcessLookupError):
            os.kill(int(read(out, f"pid-{drawn.randrange(2)}")), signal.SIGKILL)
        ended_well(run)
        assert read(out, "digest") == read(undisturbed, "digest"), number
        began_again += "1" in read(out, "attempts")
    assert began_again > KILLS // 2
