"""The rows of `bench.train`: who trains, how, and beside whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini.units import GIB

STATE_BYTES = 16  # of a parameter: bf16 weight and gradient, fp32 master, exp_avg and exp_avg_sq
QUARTER = GIB // 4


@dataclass(frozen=True)
class Row:
    """`group`: rows that take turns of some steps, because they are compared with each other."""

    name: str
    peer: str
    group: str
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1


def rows(device: str, budgets: Sequence[str]) -> tuple[Row, ...]:
    """All of them, in the order of the table. `budgets`: of the device, for `ours/auto`."""
    cuda = device != "cpu"
    hsdp, tp2 = {"mesh": {"replicate": 2, "shard": 2}}, {"mesh": {"dp": 1, "tp": 2}}
    dp2_tp2 = {"mesh": {"dp": 2, "tp": 2}}
    plain, fsdp2, deepspeed, ours = "torch_adamw", "fsdp2", "deepspeed_zero", "ours"
    accelerate, trainer, lightning = "accelerate_loop", "trainer_loop", "lightning_fit"
    offload = {"offload": True}
    return (
        Row("torch/adamw-bf16", plain, "resident", {"autocast": False}),
        Row("torch/adamw-autocast", plain, "resident", {"autocast": True}),
        Row("fsdp2/w1", fsdp2, "resident"),
        *([Row("fsdp2/w1-offload", fsdp2, "offload", offload)] if cuda else []),
        Row("fsdp2/w2", fsdp2, "ranks", world_size=2),
        Row("fsdp2/w2-keep", fsdp2, "ranks", {"keep": True}, 2),
        *([Row("fsdp2/w2-offload", fsdp2, "ranks", offload, 2)] if cuda else []),
        Row("ddp/zero1", "ddp_zero", "ranks", world_size=2),
        Row("deepspeed/zero3", deepspeed, "resident"),
        Row("deepspeed/zero3-cpu", deepspeed, "offload", {"offload": "cpu"}),
        Row("deepspeed/zero3-nvme", deepspeed, "offload", {"offload": "nvme"}),
        Row("ours/resident", ours, "resident"),
        *([Row("ours/host", ours, "offload", {"host": True})] if cuda else []),
        Row("ours/half-nvme", ours, "offload", {"nvme_fraction": 0.5}),
        Row("ours/nvme", ours, "offload", {"nvme_fraction": 1.0}),
        Row("ours/nvme-tail", ours, "offload", {"nvme_fraction": 1.0, "update": "tail"}),
        Row("ours/resident-8bit", ours, "resident", {"state": "8bit"}),
        *(
            Row(
                f"ours/nvme-{kind}{update}",
                ours,
                "offload",
                {"nvme_fraction": 1.0, "state": kind, **({"update": "tail"} if update else {})},
            )
            for kind in ("bf16", "8bit")
            for update in ("", "-tail")
        ),
        Row("ours/w2", ours, "ranks", world_size=2),
        *(Row(f"ours/zero{n}", ours, "ranks", {"stage": n}, 2) for n in (1, 2, 3)),
        *(
            Row(f"ours/auto-{budget}", ours, "offload", {"device_budget": budget})
            for budget in budgets
        ),
        Row("torch/accelerate", accelerate, "trainers", {"ours": False}),
        Row("ours/accelerate", accelerate, "trainers", {"ours": True}),
        Row("torch/trainer", trainer, "trainers", {"ours": False}),
        Row("ours/trainer", trainer, "trainers", {"ours": True}),
        Row("torch/lightning", lightning, "resident", {"strategy": "auto"}),
        Row("ours/lightning", lightning, "resident", {"strategy": "gemini"}),
        Row("fsdp2/mesh-hsdp2x2", fsdp2, "hsdp", hsdp, 4),
        Row("ours/mesh-hsdp2x2", ours, "hsdp", hsdp, 4),
        Row("fsdp2/mesh-tp2", fsdp2, "tp2", tp2, 2),
        Row("ours/mesh-tp2", ours, "tp2", tp2, 2),
        Row("fsdp2/mesh-dp2tp2", fsdp2, "dp2tp2", dp2_tp2, 4),
        Row("ours/mesh-dp2tp2", ours, "dp2tp2", dp2_tp2, 4),
        Row("fsdp2/mesh-tp2pp2", "fsdp2_stages", "four", {"mesh": {"pp": 2, "dp": 1, "tp": 2}}, 4),
        Row("ours/mesh-tp2pp2", "boosted", "four", {"mesh": {"pp": 2, "tp": 2}}, 4),
        *(
            Row(f"ours/mesh-{name}4", "boosted", "four", {"mesh": {"cp": 4}, "mode": mode}, 4)
            for name, mode in (("ulysses", "all_to_all"), ("ring", "ring_attn"))
        ),
    )


def default_budgets(numel: int) -> tuple[str, ...]:
    """A quarter more and a quarter less than model data takes, in quarters of a GiB."""
    quarters = (max(1, round(numel * STATE_BYTES * part / QUARTER)) for part in (1.25, 0.75))
    return tuple(dict.fromkeys(f"{count / 4:g}GiB" for count in quarters))


def chosen(every: Sequence[Row], names: Sequence[str] | None) -> tuple[Row, ...]:
    """Those with one of these names, or else whose names begin so (`deepspeed`, `ours/auto`).

    None is all. Those on meshes take four ranks, and models like Llama: only `mesh` in a name asks
    for them. Raises ValueError for a name that no row has.
    """
    usual = [row for row in every if "mesh" not in row.options]
    if names is None:
        return tuple(usual)
    wanted: set[str] = set()
    for name in names:
        exact = {row.name for row in every if row.name == name}
        found = exact or {
            row.name
            for row in (every if "mesh" in name else usual)
            if row.name.startswith((name + "/", name + "-"))
        }
        if not found:
            known = ", ".join(row.name for row in every)
            raise ValueError(f"no row {name!r}; expected some of {known}, or torch, ours, ...")
        wanted |= found
    return tuple(row for row in every if row.name in wanted)
