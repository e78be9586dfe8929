"""Runs a module in this process, which has the stub preloaded; Triton launches nothing."""

from __future__ import annotations

import runpy
import sys

from bench.host import launches

if __name__ == "__main__":
    launches.install()
    del sys.argv[0]
    sys.orig_argv[1:] = ["-m", "tests.cuda_stub", *sys.argv]  # as it was typed; results name it
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
