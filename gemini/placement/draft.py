"""A plan in the making: what it follows from, homes that are chosen, and what follows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from gemini.placement.homes.budget_fill import (
    check_nvme,
    fill,
    host_bytes,
    host_overflows,
    missing_for_everything,
)
from gemini.placement.saved import Spilling, most_room, moves_of_saved, search_number, search_room
from gemini.placement.timetable.allowed import facts_of
from gemini.placement.timetable.gathers import gather_steps
from gemini.placement.timetable.moves import leaving_bytes, moves_of
from gemini.placement.timetable.room import Demand, Vector
from gemini.placement.timetable.steps import (
    GatherSchedule,
    num_uses,
    prefetched_at,
    reductions_of,
    room_ahead,
    schedule_gathers,
)
from gemini.units import ChunkId, Moment

from .cost import bounds
from .plan import Forecast, Plan, Recomputed, SavedHomes, ShardPlan
from .policy import (
    AutoPlacement,
    ConstPlacement,
    Placement,
    StaticPlacement,
    has_budgets,
    never_released,
    recomputes,
)
from .predict import Profile, predict
from .problem import Homes, PlanInputs, static_homes
from .result import PlanResult
from .sizes import UNLIMITED, BudgetError
from .tiers import Tier

# What competes for the device, in every order: parameters, gradients, state
ORDERS = ("psg", "pgs", "spg", "sgp", "gps", "gsp")


class Draft:
    """One run of the planner."""

    def __init__(self, problem: PlanInputs, policy: Placement) -> None:
        self.policy = policy
        self.problem = self._all_stays = self._given = problem
        layout, trace = problem.layout, problem.trace
        chunk_of = layout.chunk_of()
        self.needs = trace.chunk_needs(chunk_of)
        self.calls = trace.calls(chunk_of)
        self.reductions = (
            reductions_of(
                trace,
                chunk_of,
                [chunk.id for chunk in self.problem.chunks if chunk.trainable],
                over_ranks={chunk.id for chunk in self.problem.chunks if chunk.reduces},
            )
            if trace.kind == "train"
            else {}
        )
        stays = isinstance(policy, StaticPlacement) and not policy.shard_grads
        self.unsharded_grads = stays and any(chunk.reduces for chunk in self.problem.chunks)
        if self.unsharded_grads:  # they are reduced by the step
            end = Moment(len(trace.moments))
            self.reductions = {c: replace(r, end=end) for c, r in self.reductions.items()}
        self.never_released = never_released(policy, [c.payload_bytes for c in self.problem.chunks])
        self.prefetched = prefetched_at(self.needs, problem.max_prefetch)
        self._cap = policy.steady_cap_ratio if isinstance(policy, AutoPlacement) else 1.0
        self._layout_digest = layout.digest()  # of a long value: taken once
        # layers of which some may be computed again, if the plan says so
        self.num_layers = len(trace.layers) if recomputes(policy) else 0
        if trace.kind != "train":
            self.num_layers = 0
        self.recompute(trace.recomputed)

    def recompute(self, number: int) -> None:
        """Go on with the first `number` layers computed again in backward."""
        self._all_stays = inputs = self._given.recomputing(number)
        self.saved_bytes = [m.saved_bytes for m in inputs.trace.moments]
        self.spilling: Spilling | None = None  # None: no saved bytes may leave
        if inputs.spilling is not None and isinstance(self.policy, AutoPlacement):
            is_some = max(self.saved_bytes, default=0) > inputs.spilling.least_room
            self.spilling = inputs.spilling if is_some else None
        self._trace_digest = inputs.trace.digest()
        self.keep(None)
        self.compute = inputs.compute_seconds()

    def keep(self, saved: SavedHomes | None) -> None:
        """Go on with these homes of bytes saved for backward; None: all stay."""
        self.problem = self._all_stays
        if saved is not None:
            self.problem = replace(self._all_stays, saved=saved)
        self.non_model = self.problem.trace.non_model_within(
            None if saved is None else saved.room_bytes
        )
        self.demand = self._demand()

    def _demand(self) -> Demand:
        """Demand of the device, with the share of its rest that stays free under the cap."""
        reserved = [0] * len(self.non_model)
        if not isinstance(self.policy, ConstPlacement):
            budget, cap = self.problem.budgets.device, self._cap
            cap = cap if budget < UNLIMITED else 1.0
            reserved = [n + round(max(0, budget - n) * (1 - cap)) for n in self.non_model]
        vector = np.array([*reserved, reserved[-1] if reserved else 0], np.int64)
        return Demand(vector, self.needs, self.reductions, self.prefetched)

    # -- homes --

    def choose_homes(self) -> Homes:
        if isinstance(self.policy, StaticPlacement):
            return static_homes(self.policy, self.problem)
        try:
            return self.best_number(self._fastest)
        except BudgetError as error:
            error.without_frames()
        self.give_up_cap()
        return self.best_number(self._fastest)

    def best_number(self, found_with: Callable[[], tuple[float | None, Homes]]) -> Homes:
        """The best of the homes that are found with every number of layers computed again.

        found_with: homes after their price, if it is known; 0 of none is best. What was measured
        with some layers computed again stays so as long as it fits.
        """
        if not self.num_layers:
            return found_with()[1]
        found: dict[int, tuple[float, Homes, float]] = {}
        refused: list[BudgetError] = []
        cap = self._cap

        def price(number: int) -> float:
            self._cap = cap
            self.recompute(number)
            try:
                known, homes = found_with()
            except BudgetError as error:
                error.recomputed = number
                refused.append(error.without_frames())
                return inf
            homes.recomputed = number
            is_best = known == 0 and not number
            if any(self.compute):
                known = known if is_best else known or self._price(homes)
            else:  # nobody knows what a layer takes: as few as fit
                known = number
            found[number] = known or 0.0, homes, self._cap
            return found[number][0]

        asked = self._given.recomputed
        if asked is None:
            asked = self._given.trace.recomputed or None
        if asked is not None:
            price(min(asked, self.num_layers))
        if not found:
            search_number(self.num_layers, price)
        if not found:
            raise min(refused, key=severity)
        best = min(found, key=lambda number: (found[number][0], number))
        self._cap = found[best][2]
        self.recompute(best)
        return found[best][1]

    def give_up_cap(self) -> None:
        """Give the cap up before a plan fails."""
        self._cap = 1.0
        self.demand = self._demand()

    def _fastest(self) -> tuple[float, Homes]:
        """Price and homes with which an iteration is predicted to be shortest.

        If saved bytes may leave the device, homes are filled beside several rooms for those that
        stay, and what they leave free is for saved bytes too.
        """
        spilling = self.spilling
        self.keep(None)
        if spilling is None:
            price_of_best, _, homes = self._in_best_order(ORDERS)
            return price_of_best, homes
        refused: list[BudgetError] = []
        found: list[tuple[float, str, Homes]] = []

        def tried(saved: SavedHomes | None, orders: Sequence[str]) -> tuple[float, str]:
            self.keep(saved)
            try:
                found.append(self._in_best_order(orders))
            except BudgetError as error:
                error.without_frames()
                if saved is None or not saved.host_bytes:  # else it is this try's own fault
                    refused.append(error)
                return inf, ""
            return found[-1][:2]

        price_of_all, best_order = tried(None, ORDERS)
        if price_of_all > 0:  # not all is on the device
            found += self._all_but_saved(spilling)
            host = int(self.problem.budgets.host) if self.problem.has_host_tier else 0
            most = max(self.saved_bytes)
            on_host: tuple[int, ...] = 0, host
            best = price_of_all, best_order, on_host

            def price(room: int, is_first: bool) -> float:
                nonlocal best
                is_new = is_first or best[0] == inf
                orders, on_hosts = (ORDERS, (0, host)) if is_new else ((best[1],), best[2])
                rooms = {spilling.homes(room, most, n): n for n in on_hosts}
                tries = ((*tried(saved, orders), (n,)) for saved, n in rooms.items())
                least = min(tries)
                if least[0] < best[0]:
                    best = least
                return least[0]

            search_room(spilling.least_room, most, price)
        if not found:
            raise min(refused, key=severity)
        least, _, homes = min(found, key=lambda one: one[0])
        return least, homes

    def _all_but_saved(self, spilling: Spilling) -> Iterator[tuple[float, str, Homes]]:
        """Homes with all model data on the device, and with as many saved bytes as that leaves room
        for; none where that cannot be."""
        self.keep(None)
        missing, everything = self._missing(), Homes.all_on(Tier.DEVICE, self.problem.chunks)
        if missing is None:
            return
        self.keep(spilling.homes(spilling.least_room, max(self.saved_bytes), 0))
        try:
            self.check_room(everything)
            everything.saved = self.saved_beside(everything)
            self.keep(everything.saved)
            check_nvme(self.problem, everything)
        except BudgetError as error:
            error.without_frames()
            return
        if not host_overflows(self.problem, everything):
            yield self._price(everything), ORDERS[0], everything

    def _missing(self) -> int | None:
        """Bytes that the device lacks to hold all model data; None where not all may be there."""
        fixed, ceiling = self.problem.fixed_params, self.problem.ceiling
        rows = [fixed or ()] if ceiling is None else [fixed or (), ceiling.param, *ceiling.state]
        if any(home is not Tier.DEVICE for row in rows for home in row):
            return None
        return missing_for_everything(self.problem, self.demand)

    def _price(self, homes: Homes) -> float:
        """Middle of the bounds of an iteration, times two."""
        uses, compute = num_uses(self.needs, len(self.problem.chunks)), self.compute
        forward = sum(compute[: self.problem.backward])
        return sum(bounds(homes, self.problem, uses, sum(compute), self.reductions, forward))

    def _in_best_order(self, orders: Sequence[str]) -> tuple[float, str, Homes]:
        """Homes filled in the best of these orders, after their price and the order; 0 where all
        is on the device."""
        missing = self._missing() if self.problem.saved is None else None
        everything = Homes.all_on(Tier.DEVICE, self.problem.chunks)
        if missing == 0 and not host_overflows(self.problem, everything):
            check_nvme(self.problem, everything)
            return 0.0, ORDERS[0], everything
        best: tuple[float, str, Homes] | None = None
        failed: BudgetError | None = None
        for order in orders:
            try:
                homes = fill(self.problem, self.demand, order)
                self.check_room(homes)
            except BudgetError as error:
                # The nearest failure is told: its bytes are what the user lacks. A device that is
                # too small fails in every order, as its floor is the same.
                if failed is None or severity(error) < severity(failed):
                    failed = error.without_frames()
                if error.tier is Tier.DEVICE:
                    break
                continue
            if self.problem.saved is not None:
                homes.saved = self.saved_beside(homes)
            price = self._price(homes)
            if best is None or price < best[0]:
                best = price, order, homes
        if best is None:
            assert failed is not None
            if (
                failed.tier is Tier.DEVICE
                and missing is not None
                and missing <= failed.missing_bytes
            ):
                budget = self.problem.budgets.device
                raise BudgetError.missing(
                    Tier.DEVICE, missing, budget, "everything, and buffers to move it take more",
                    "raise device_budget by as much",
                )  # fmt: skip
            raise failed
        return best

    def saved_beside(self, homes: Homes) -> SavedHomes | None:
        """Homes of saved bytes of which as many stay as these leave room for; None: all.

        What is prefetched keeps its room. Raises BudgetError where fewer would have to stay than
        are under way.
        """
        spilling, saved = self.spilling, self.problem.saved
        if spilling is None:
            return None
        gathered = self._gathered(homes)
        left = self._left(homes)
        ahead = [sum(gathered.get(chunk, 0) for chunk in chunks) for chunks in self.prefetched]
        left = np.minimum(left, np.maximum(left - np.array(ahead, np.int64), 0))
        stays = np.array(self.saved_bytes, np.int64)
        if saved is not None:
            stays = np.minimum(stays, saved.room_bytes)
            if self._cap < 1 and self.problem.budgets.device < UNLIMITED:
                # a byte more takes its share of what the cap leaves free; that is rounded
                left = np.where(left > 2, ((left - 2) / self._cap).astype(np.int64), left)
        elif left.min(initial=0) < 0 and not self.problem.has_host_tier:
            left -= spilling.staging_bytes
        room = most_room(left.tolist(), stays.tolist(), self.saved_bytes)
        if room is None:
            return None
        if room < spilling.least_room:
            raise BudgetError.missing(
                Tier.DEVICE, spilling.least_room - room, self.problem.budgets.device,
                "saved bytes that are on their way",
                "raise device_budget by as much, or use a smaller batch",
            )  # fmt: skip
        most, host_left = max(self.saved_bytes), 0
        if self.problem.has_host_tier:
            there = host_bytes(self._all_stays, homes) + homes.host_staging.nbytes
            host_left = self.problem.budgets.host - there - spilling.staging_bytes
        found = spilling.homes(room, most, host_left)
        missing = most - found.kept_bytes - found.host_bytes - found.nvme_bytes
        if missing > 0:
            raise BudgetError.missing(
                Tier.HOST, missing, self.problem.budgets.host, "saved bytes, without nvme_dir",
                f"raise {Tier.HOST.value}_budget by as much, or use a smaller batch",
            )  # fmt: skip
        return found

    # -- the rest --

    def finish(self, homes: Homes) -> PlanResult:
        if homes.recomputed != self.problem.trace.recomputed and self.num_layers:
            self.recompute(homes.recomputed)
        self.keep(homes.saved)
        gathered = self._gathered(homes)
        trace = self.problem.trace
        trainable = {chunk.id for chunk in self.problem.chunks if chunk.trainable}
        schedule = schedule_gathers(
            self.needs,
            self._gather_room(homes),
            gathered,
            self.problem.max_prefetch,
            stale=trainable if trace.kind == "train" else (),
            may_begin=[call is not None for call in self.calls],
        )
        # a payload that the schedule never frees is planned as one that is never released
        for chunk_id in schedule.always:
            homes.never_released[chunk_id] = True
        plan = self._build(homes, schedule)
        plan.validate()
        profile = predict(plan, self.non_model)
        steps = gather_steps(
            self.calls, plan.gathers, [shard.chunk for shard in plan.shards if shard.never_released]
        )
        judged = self._judged(profile, Tier.DEVICE)
        has_room = self.problem.num_ahead > 0 or not has_budgets(self.policy)
        facts = facts_of(
            plan, judged, self.calls, self.problem.backward,
            has_buffers=has_room,
        )  # fmt: skip
        return PlanResult(plan, profile, steps, facts, self._all_stays)

    def check_room(self, homes: Homes) -> None:
        """Raise BudgetError where what a moment needs does not fit beside what lives there."""
        lack = self.lacks(homes)
        if lack is not None:
            moment, missing = lack
            raise BudgetError.missing(
                Tier.DEVICE, missing, self.problem.budgets.device,
                f"{self.problem.trace.moments[moment]} beside what lives there",
                "raise device_budget by as much, or use a smaller batch",
            )  # fmt: skip

    def lacks(self, homes: Homes) -> tuple[Moment, int] | None:
        """Moment whose payloads lack most room in these homes, and the bytes that they lack; None:
        all fit."""
        left = self._left(homes)
        if left.size == 0 or left.min() >= 0:
            return None
        return Moment(int(left.argmin())), -int(left.min())

    def _left(self, homes: Homes) -> Vector:
        """Bytes that are free at every moment beside what it needs, below 0 where it lacks some."""
        gathered = self._gathered(homes)
        needs = [sum(gathered.get(chunk, 0) for chunk in chunks) for chunks in self.needs]
        return self._gather_room(homes) - np.array(needs, np.int64)

    def _gathered(self, homes: Homes) -> dict[ChunkId, int]:
        """Bytes of the payloads that are gathered and freed."""
        return {
            chunk.id: int(chunk.payload_bytes)
            for chunk in self.problem.chunks
            if not homes.never_released[chunk.id]
            and (chunk.num_shards > 1 or homes.param[chunk.id] is not Tier.DEVICE)
        }

    def _build(self, homes: Homes, schedule: GatherSchedule, *, is_bare: bool = False) -> Plan:
        """Build the plan.

        is_bare: without moves of updates, which are most moves and change no peak.
        """
        problem, trace = self.problem, self.problem.trace
        leaving = leaving_bytes(homes, problem, self.reductions, len(self.needs))
        moves = moves_of(
            homes, problem, schedule.gathers, self.reductions, len(self.needs),
            updates=trace.kind == "train" and not is_bare,
        )  # fmt: skip
        if problem.saved is not None and not is_bare:
            more = moves_of_saved(problem.saved, trace.moments)
            moves = tuple(sorted((*moves, *more), key=lambda move: move.begin))
        return Plan(
            kind=trace.kind,
            layout_digest=self._layout_digest,
            trace_digest=self._trace_digest,
            num_trace_moments=len(self.needs),
            has_host_tier=problem.has_host_tier,
            unsharded_grads=self.unsharded_grads,
            budgets=problem.budgets,
            chunks=problem.chunks,
            shards=tuple(
                self._shard(homes, chunk.id, leaving.get(chunk.id, 0)) for chunk in problem.chunks
            ),
            original_home=problem.originals_on,
            average=problem.average,
            off_device=problem.off_device,
            gathers=schedule.gathers,
            device_staging=homes.device_staging,
            host_staging=homes.host_staging,
            forecast=Forecast(
                tuple(sorted(self.reductions.values(), key=lambda r: (r.last, r.chunk))),
                moves,
                schedule.gap,
            ),
            saved=problem.saved,
            recomputed=self._recomputed(),
        )  # fmt: skip

    def _recomputed(self) -> Recomputed | None:
        trace = self.problem.trace
        if not trace.recomputed:
            return None
        first = trace.layers[: trace.recomputed]
        seconds = sum(layer.seconds for layer in first)
        return Recomputed(tuple(layer.name for layer in first), len(trace.layers), seconds)

    def _gather_room(self, homes: Homes) -> Vector:
        """Bytes for payloads at every moment, in these homes."""
        problem = self.problem
        if isinstance(self.policy, StaticPlacement):
            # Fractions promise the same memory whatever the machine has: the working set and the
            # prefetched payloads, and nothing that is kept between uses.
            used_chunks = sorted({chunk for chunks in self.needs for chunk in chunks})
            payloads = [problem.chunks[chunk].payload_bytes for chunk in used_chunks]
            largest_need = max(
                (sum(problem.chunks[c].payload_bytes for c in chunks) for chunks in self.needs),
                default=0,
            )
            ahead = room_ahead(payloads, self.problem.max_prefetch)
            return np.full(len(self.needs), largest_need + ahead, np.int64)
        bare = self._build(homes, GatherSchedule((), (), 0.0), is_bare=True)
        used = np.array(
            predict(bare, self.non_model).total(Tier.DEVICE)[: len(self.needs)], np.int64
        )
        capped = self.demand.non_model[:-1] - np.array(self.non_model, np.int64)
        return np.asarray(problem.budgets.device - used - capped, np.int64)

    def _shard(self, homes: Homes, chunk: ChunkId, leaving: int) -> ShardPlan:
        sizes = self.problem.chunks[chunk]
        states = tuple(homes.state[chunk])
        grad = homes.grad[chunk] if sizes.trainable else None
        stays = chunk in self.never_released or sizes.num_shards == 1
        in_payload = stays and homes.param[chunk] is Tier.DEVICE
        return ShardPlan(
            chunk, homes.param[chunk], homes.never_released[chunk], in_payload, grad, states,
            self._why(homes, chunk), leaving,
        )  # fmt: skip

    def _why(self, homes: Homes, chunk: ChunkId) -> str:
        if isinstance(self.policy, StaticPlacement):
            return f"placed by {self.policy}"
        tiers = {homes.param[chunk], *homes.state[chunk]}
        if self.problem.chunks[chunk].trainable:
            tiers.add(homes.grad[chunk])
        if tiers == {Tier.DEVICE}:
            return "all of it fits the device budget"
        if Tier.DEVICE in tiers:
            return "the device budget has room for a part of it"
        return "the device budget has no room for it beside what saves more time a byte"

    def over_budget(self, profile: Profile) -> BudgetError | None:
        """The first tier whose predicted peak passes its budget."""
        if isinstance(self.policy, StaticPlacement):
            return None
        for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME):
            totals = self._judged(profile, tier)
            missing = max(totals) - self.problem.budgets.of(tier)
            if missing > 0:
                moment = totals.index(max(totals))
                return BudgetError.missing(
                    tier, missing, self.problem.budgets.of(tier), f"moment {moment}",
                    f"raise {tier.value}_budget by as much, or use a smaller batch",
                )  # fmt: skip
        return None

    def _judged(self, profile: Profile, tier: Tier) -> list[int]:
        """Bytes at every moment that a budget is for."""
        totals = profile.total(tier)
        if isinstance(self.policy, ConstPlacement) and tier is Tier.DEVICE:
            others = profile.rows[tier, "non-model"]
            return [n - m for n, m in zip(totals, others, strict=True)]
        return totals


def severity(error: BudgetError) -> tuple[int, int]:
    """Distance from a plan: homes are chosen tier by tier, so the failure of the last tier lacks
    least."""
    assert error.tier is not None
    return (list(Tier)[::-1].index(error.tier), error.missing_bytes)
