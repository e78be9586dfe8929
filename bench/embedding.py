"""`python -m bench.embedding`: misses and bytes of cached rows beside LRU's, on Zipf-drawn ids.

Counts alone: no verdict depends on the machine. `--rows`, `--dim`, `--cache` and `--batch` are of
the table, of its rows, of the cache and of a batch; `--home nvme` takes `--folder`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from typing import Any

import torch

import gemini
from gemini.embedding import LazyAdam, RowAdagrad, RowSGD
from gemini.embedding.rules import RowRule

RULES: dict[str, RowRule] = {"sgd": RowSGD(), "adagrad": RowAdagrad(), "adam": LazyAdam()}


def zipf(
    num_rows: int, count: int, size: int, exponent: float, seed: int = 0
) -> list[torch.Tensor]:
    """Batches of ids whose frequencies fall as 1 / rank ** exponent."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    drawn = torch.rand(count, size, generator=generator, dtype=torch.float64) * weights[-1]
    return list(torch.searchsorted(weights, drawn).clamp(max=num_rows - 1))


def run(args: argparse.Namespace, folder: str, lookahead: int | None) -> dict[str, Any]:
    """Steps of one cache; lookahead None: without a loader that it knows."""
    home: dict[str, Any] = {"home": "nvme", "nvme_dir": folder} if args.home == "nvme" else {}
    emb = gemini.CachedEmbedding(
        args.rows,
        args.dim,
        cache_rows=args.cache,
        rule=RULES[args.rule],
        lookahead=lookahead or 0,
        name=f"lookahead-{lookahead}",
        **home,
    )
    begin = emb.report()
    loader = zipf(args.rows, args.steps, args.batch, args.exponent)
    touched = sum(len(torch.unique(ids)) for ids in loader)
    for ids in loader if lookahead is None else emb.prefetch(loader, ids=lambda batch: batch):
        emb(ids).square().sum().backward()
        emb.step()
    report = emb.report()
    emb.close()
    record = 4 * (args.dim + RULES[args.rule].state_numel(args.dim))
    moved = report.read_bytes + report.written_bytes - begin.read_bytes - begin.written_bytes
    shares = {"miss_share": report.misses / touched, "bytes_of_touched": moved / (touched * record)}
    return {**asdict(report), "touched": touched, **shares}


def main(argv: list[str] | None = None) -> int:
    """Print one line for LRU, and one for each lookahead."""
    parser = argparse.ArgumentParser(prog="python -m bench.embedding", description=__doc__)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cache", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--rule", choices=list(RULES), default="adagrad")
    parser.add_argument("--home", choices=("host", "nvme"), default="host")
    parser.add_argument("--folder", help="parent of the folder of files; a temporary one if absent")
    parser.add_argument("--lookahead", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        lru = run(args, folder, None)
        print(f"lru: {lru['misses']} misses of {lru['touched']} touched rows")
        for lookahead in args.lookahead:
            found = run(args, folder, lookahead)
            print(
                f"lookahead {lookahead}: {found['misses']} misses, "
                f"{found['misses'] / lru['misses']:.3f} "
                f"of lru; bytes {found['bytes_of_touched']:.2f} x touched records"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
