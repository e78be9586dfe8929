"""First planning of a run: measured and agreed on by all ranks, before there is an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gemini.chunk.layout import ChunkLayout
from gemini.comm.communicator import Communicator
from gemini.memtracer.trace import (
    Trace,
    reduce_traces,
    sequential_trace,
)
from gemini.placement.fit import (
    assume,
    assumed_state,
    first_inputs,
)
from gemini.placement.homes.budgets import resolve
from gemini.placement.plan import UpdatePath
from gemini.placement.planner import PlanInputs
from gemini.placement.policy import (
    AutoPlacement,
    Placement,
    StaticPlacement,
    has_budgets,
)
from gemini.placement.sizes import (
    UNLIMITED,
    Budgets,
    least_budgets,
    wider_chunks,
)
from gemini.placement.speeds import agreed
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import Backend
from gemini.runtime.memory.machine import look_at_machine, ranks_here

from .planning import Planning


def begin_planning(
    layout: ChunkLayout,
    policy: Placement,
    backend: Backend,
    comm: Communicator,
    *,
    master_weights: bool,
    keep_originals: bool,
    itemsizes: Sequence[int],
    max_prefetch: int,
    update: str,
    trace: Trace | None,
    ranks_per_node: int | None = None,
    canonical: bool = False,
) -> Planning:
    """Measure, agree, and plan the homes of parameters for an optimizer that is yet to come.

    master_weights, keep_originals: of `PrecisionPolicy`. itemsizes: bytes of an element of every
    parameter as it came, in registration order. trace: of this model. ranks_per_node: None where
    `comm` has all ranks. Raises BudgetError for budgets that cannot hold the model.
    """
    with_originals = wider_chunks(layout, itemsizes, trained=master_weights, frozen=keep_originals)
    folder = policy.nvme_dir if isinstance(policy, AutoPlacement) else None
    machine = look_at_machine(backend, ranks_per_node or ranks_here(comm), folder)
    budgets = resolve(policy, machine)
    traces, limits, found = zip(*comm.gather_objects((trace, budgets, machine.speeds)), strict=True)
    without = [rank for rank, given in enumerate(traces) if given is None]
    if 0 < len(without) < comm.world_size:
        raise ValueError(f"ranks {without} have no trace= and others do; expected all or none")
    budgets, machine = least_budgets(limits), replace(machine, speeds=agreed(found))
    fixed = None
    if backend.shards_start_on_host and not has_budgets(policy):
        fixed, budgets = tuple(Tier.HOST for _ in layout.chunks), Budgets()
        if not isinstance(policy, StaticPlacement):
            policy = StaticPlacement()
    if without:
        used = sequential_trace(layout.params, overlap=budgets.device < UNLIMITED)
    else:
        used = reduce_traces(traces)
    updates_on_host = backend.has_host_tier and not backend.updates_by_triton
    inputs = PlanInputs(
        layout=layout, trace=used, state=assumed_state(layout, master_weights=master_weights),
        budgets=budgets, bandwidths=machine.speeds.links,
        has_host_tier=backend.has_host_tier, max_prefetch=max_prefetch,
        off_device=UpdatePath.CPU if updates_on_host else UpdatePath.STREAM, fixed_params=fixed,
        with_originals=with_originals,
    )  # fmt: skip
    inputs = first_inputs(inputs, policy, update=update, canonical=canonical)
    if trace is None:
        inputs = assume(inputs, policy)
    return Planning(comm, policy, inputs, trace is not None, machine)
