"""`python -m bench.support.ceilings`: the bandwidths that other benches are compared with."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from .machine import write_result
from .timing import interleaved

COPY_BYTES = 1 << 30


def memory_ceilings(device: torch.device, rounds: int = 7) -> dict[str, float]:
    """GB/s of a large copy (bytes read and written), and of a large sum (bytes read)."""
    numel = COPY_BYTES // 4
    source = torch.ones(numel, device=device)
    target = torch.zeros(numel, device=device)
    seconds = interleaved(
        {"copy": lambda: target.copy_(source), "read": lambda: source.sum()}, rounds, device
    )
    moved = {"copy": 2 * COPY_BYTES, "read": COPY_BYTES}
    return {
        f"{name}_gb_per_s": moved[name] / statistics.median(times) / 1e9
        for name, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = memory_ceilings(torch.device(args.device))
    for name, value in found.items():
        print(f"{name:20s} {value:8.1f}")
    if args.json is not None:
        write_result(args.json, {"ceilings": found})


if __name__ == "__main__":
    main()
