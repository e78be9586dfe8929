"""`python -m bench.support.warm`: compile the kernels of `bench.adam`, as many at once as there are
cores, into Triton's cache, where all that runs behind it finds them."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

import torch

from bench.adam import CUDA_ROWS, Tensors, cuda_variants, shape

MOST_PROCESSES = 12  # each has a context of the device
NUMEL = 1 << 14
Job = tuple[str, str, tuple[int, int] | None]  # device, name of a row, launch


def compile_row(job: Job) -> str:
    """Run one row over a few elements; which it was."""
    device, name, launch = job
    there = torch.device(device)
    for run in cuda_variants(Tensors(NUMEL, there), there, launch, [name]).values():
        run()
    if there.type == "cuda":
        torch.cuda.synchronize(there)
    return f"{name}, {launch or 'as chosen'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--launch", type=shape, nargs="*", default=[], metavar="BLOCK/WARPS")
    args = parser.parse_args()
    jobs = [(args.device, name, launch) for launch in (None, *args.launch) for name in CUDA_ROWS]
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(jobs))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done in pool.imap_unordered(compile_row, jobs):
            print(done, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
