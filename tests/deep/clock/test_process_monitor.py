"""The monitor of a process reads its resident memory, which other tests of the process move."""

import torch

from gemini.memtracer.monitor import ProcessMonitor


def test_process_monitor_sees_what_a_period_touched():
    monitor = ProcessMonitor()
    monitor.start()
    monitor.period()
    torch.ones(16 << 20).sum()  # 64 MiB, freed at once
    first, second = monitor.period(), monitor.period()
    assert 60 << 20 < first < 100 << 20
    assert second < 32 << 20
