"""Homes that follow what iterations ask for: down before a forward that has no room, up where it
pays.

What an iteration asks for is known before its forward: as it was measured, or by a bound. When
data is promoted is said in `gemini.placement.renting`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from gemini.chunk.storage import Chunk
from gemini.comm.communicator import Communicator
from gemini.memtracer.forecast import with_bytes_added
from gemini.memtracer.trace import Kind, Trace
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.placement.plan import Plan
from gemini.placement.planner import PlanInputs, PlanResult
from gemini.placement.renting import Tenancy, iteration_in_words, named, promoted_bytes
from gemini.placement.tiers import Tier
from gemini.runtime.passes import Passes
from gemini.runtime.schedule.iteration_plans import Lowered
from gemini.runtime.schedule.planning import PlanInUse
from gemini.runtime.weights import Weights

log = logging.getLogger("gemini")

IN_WORDS: dict[Kind, str] = {"train": "train", "eval": "evaluate"}


class MovingHomes:
    """Homes of one engine. They move while no graph waits for its backward; up, once gradients were
    dropped."""

    def __init__(self, weights: Weights, in_use: PlanInUse, passes: Passes) -> None:
        self._passes = passes
        self._sharding, self._weights, self._in_use = weights.sharding, weights, in_use
        self._planning, self._storage = in_use.planning, in_use.storage
        self._manager, self._sampler, self._ledger = in_use.manager, in_use.sampler, in_use.ledger
        # homes that wait for gradients to be dropped, and another trace that they are for
        self._higher: tuple[PlanResult, PlanInputs | None] | None = None
        self._gradients_stay = False  # where they waited as homes went down
        self._tenancy = Tenancy()
        self._comm: Communicator | None = None  # of ranks that ask each other before a forward
        self.meet()

    def meet(self) -> None:
        """Open the group in which ranks ask each other, once they have a trace. Collective.

        It is a group of its own: an evaluation on one rank alone would pair what ranks ask with a
        collective of another size, which ends the process.
        """
        comm, planning = self._sharding.comm, self._planning
        if self._comm is None and comm.world_size > 1 and planning.levels.like is not None:
            self._comm = comm.for_thread() if planning.homes_follow else None

    # -- down --

    def before_forward(self) -> None:
        """Make room for the iteration that begins, where the present homes leave it too little.

        Collective at several ranks: they gather together, in evaluation too.
        """
        trains = torch.is_grad_enabled()
        planning = self._planning
        if not planning.homes_follow or self._weights.target is None:
            return
        if trains:
            self._promote_as_found()
        trace = self._sampler.expected()
        is_measured = trace in self._sampler.traces()
        waiting = self.waiting_bytes()
        # What is measured again was measured in other homes, with what libraries allocate once.
        counts = not (is_measured and self._sampler.is_measuring)
        if self._sharding.comm.world_size > 1:
            counts = True  # ranks note the same
            mine = 0 if trace is None else trace.peak_non_model_bytes + waiting
            trace = self._of_all_ranks(mine, "train" if trains else "eval")
            is_measured, waiting = planning.levels.is_measured, 0
        if trace is None:
            return
        trace = planning.asked_by(trace)
        if trains and counts:
            self._tenancy.note(trace)
        if not planning.has_room(trace, waiting):
            self._make_room(trace, is_measured)

    def _of_all_ranks(self, nbytes: int, kind: Kind) -> Trace | None:
        """Trace of an iteration in which one rank asks for `nbytes`: of the largest of all ranks.

        Collective, once all ranks have measured one.
        """
        levels = self._planning.levels
        if self._comm is None:
            return None
        most = self._comm.largest(nbytes, f"what the ranks' batches ask for, to {IN_WORDS[kind]}")
        found: Trace | None = levels.begin(most, kind)
        return found

    def agree_on_level(self) -> None:
        """Take the ranks' traces of a level that is new, and ask for higher homes where these pay.

        Collective, before a step.
        """
        planning = self._planning
        if not planning.homes_follow or planning.levels.like is None:
            return
        if planning.levels.asks:
            planning.levels.take(planning.reduced(self._sampler.measured()))
        if self._higher is None and planning.has_trace:
            found = self._tenancy.what_pays(planning.raised)
            if found is not None:
                planning.compare(found.result.plan)
                self._higher = found.result, found.inputs

    def _make_room(self, trace: Trace, is_measured: bool) -> None:
        planning = self._planning
        if not self._may_move():
            return
        lowered = planning.lowered(trace, params_stay=self._sharding.all_gathered)
        gradients_leave = False
        if (lowered is None or lowered.refused is not None) and self._wait_on_device():
            planning.wait_beside(self.waiting_bytes(on_device=False))
            other = planning.lowered(trace, params_stay=self._sharding.all_gathered)
            if other is not None and self._none_on_device(other.result.plan):
                lowered, gradients_leave = other, True
        if lowered is None:
            return
        if lowered.refused is not None:
            planning.say_lacking(trace, lowered, is_measured=is_measured)
        if not promoted_bytes(lowered.result.plan, planning.plan) and not gradients_leave:
            planning.keep_lacking(trace, lowered)
            return
        reason = iteration_in_words(trace, is_measured=is_measured)
        self._demote(trace, lowered, reason, gradients_leave=gradients_leave)

    def _demote(
        self, trace: Trace, lowered: Lowered, reason: str, *,
        gradients_leave: bool = False, in_pass: bool = False,
    ) -> None:  # fmt: skip
        """Use the homes of `lowered`, for an iteration that `reason` describes.

        in_pass: state alone leaves, and gathers go on as they are.
        """
        planning = self._planning
        before = planning.plan
        stay = not gradients_leave and any(chunk.gradient.exists for chunk in self._sharding.chunks)
        with DeferredSignals():  # Ctrl-C finds each block in one place, and the plan of all
            plan = (lowered.training or lowered.result).plan
            files = None if stay else self._storage.new_gradient_files(plan)
            try:
                self.demote_homes(lowered.result.plan, in_pass=in_pass)
            except BaseException:
                if files is not None:
                    files.close()
                raise
            planning.use_lowered(trace, lowered)
            self._higher = None
            planning.moves.down(lowered.result.plan, before, reason)
            self._tenancy.end()
            try:
                if stay:
                    self._gradients_stay = True
                else:
                    self._storage.place_gradients(planning.plan, self._sharding.chunks, files)
            finally:
                if in_pass:
                    assert self._weights.target is not None
                    self._weights.target.homes_changed()
                else:
                    self._homes_changed()  # releases what was never released before, too

    @property
    def follow_alone(self) -> bool:
        """Whether homes follow what forwards of this one rank ask for."""
        is_alone = self._sharding.comm.world_size == 1
        return is_alone and self._planning.homes_follow and self._weights.target is not None

    def release_idle(self) -> None:
        """Release payloads that no call uses, in a pass."""
        self._manager.make_room()

    def may_demote(self) -> bool:
        """Whether anything on the device could leave it now."""
        if (
            not self._planning.homes_follow
            or self._weights.target is None
            or self._sharding.comm.world_size > 1
        ):
            return False
        return self._is_whole() and any(
            Tier.DEVICE in (shard.param_home, *shard.state_homes)
            for shard in self._planning.plan.shards
        )

    def demote_all(self) -> None:
        """Move all that may leave the device, as a forward found no memory there."""
        self._demote_lowest(f"{self._iteration()}, which found no memory")
        log.warning(
            "a forward ran out of memory; it begins again, and its Python runs twice: %s",
            self._planning.moves,
        )

    def demote_all_state(self, part: str) -> None:
        """Move all state that may leave the device, in a pass, as its `part` takes more than was
        known."""
        if self.may_demote() and self._planning.plan.blocks_on(Tier.DEVICE):
            self._demote_lowest(f"{self._iteration()}, as its {part} was under way", in_pass=True)
            log.warning(
                "an iteration takes more than such inputs did before, and state has left the "
                "device in its middle: %s", self._planning.moves,
            )  # fmt: skip

    def _iteration(self) -> str:
        kind, signature = self._sampler.key
        planning = self._planning
        return named(replace(planning.inputs.trace, kind=kind, signature=signature))

    def _demote_lowest(self, reason: str, *, in_pass: bool = False) -> None:
        """Use the lowest homes, for all that anybody knows; `in_pass` parameters stay."""
        planning = self._planning
        trace, budgets = planning.inputs.trace, planning.inputs.budgets
        everything = with_bytes_added(trace, int(budgets.device))
        params_stay = in_pass or self._sharding.all_gathered
        lowered = planning.lowered(everything, params_stay=params_stay)
        if lowered is None:
            return
        if promoted_bytes(lowered.result.plan, planning.plan):
            self._demote(trace, replace(lowered, refused=None), reason, in_pass=in_pass)

    # -- up --

    def propose(self) -> None:
        """Ask for higher homes, once, when a measured iteration was planned. Collective."""
        found = self._planning.higher()
        if found is not None:
            self._higher = found, None

    def gradients_dropped(self) -> None:
        """Raise homes to what the first measured iteration leaves; look whether more would pay.

        What pays is promoted before the next forward: here an overlapped step may be under way, and
        nothing waits for it.
        """
        if not self._may_move():
            return
        if self._gradients_stay:
            self._gradients_stay = False
            self._weights.settle()  # an overlapped step reads them where they were
            self._in_use.place_gradients(self._sharding.chunks)
        if self._higher is not None:
            planned, inputs = self._higher
            if inputs is None:
                self._higher = None
                self._promote(planned, inputs)
                self._sampler.remeasure()  # its traces were measured in other homes
        elif self._sharding.comm.world_size > 1:  # they agree in a step
            return
        elif self._planning.homes_follow and self._planning.has_trace:
            found = self._tenancy.what_pays(self._planning.raised)
            if found is not None:
                self._higher = found.result, found.inputs

    def _promote_as_found(self) -> None:
        """Raise homes to what pays, once gradients were dropped."""
        if self._higher is None or self._higher[1] is None or not self._may_move():
            return
        if not any(chunk.gradient.exists for chunk in self._sharding.chunks):
            higher, self._higher = self._higher, None
            self._promote(*higher)

    def _may_move(self) -> bool:
        must_stay = self._passes.graph_is_open or self._weights.target is None
        return not must_stay and self._is_whole()

    def _is_whole(self) -> bool:
        """Whether no memory is given away for a while; see `optim.state.parking`."""
        return not any(chunk.is_parked for chunk in self._sharding.chunks)

    def _promote(self, planned: PlanResult, inputs: PlanInputs | None) -> None:
        planning = self._planning
        before = planning.plan
        with DeferredSignals():
            self.promote_homes(planned, inputs)
            planning.moves.up(before, planned.plan)
            self._tenancy.end()

    # -- moves --

    def waiting_bytes(self, *, on_device: bool = True) -> int:
        """Bytes on the device that gradients of earlier backwards take, or may take as the next
        adds to them: sums are in fp32, and no plan of one backward has room for that.

        on_device: they wait where they are; else they have left.
        """
        added = [c for c in self._sharding.chunks if c.gradient.exists and c.dtype != torch.float32]
        largest = max((chunk.spec.payload_bytes for chunk in added), default=0)
        # Not those that a tail still reads: they go as the forward asks for their chunks, and how
        # many are left as it begins depends on how fast the tail is.
        return 2 * largest + on_device * (self._ledger.gradient_bytes - self._ledger.kept_bytes)

    def _wait_on_device(self) -> bool:
        """Whether gradients wait, and all of them on the device."""
        found = [chunk.gradient for chunk in self._sharding.chunks if chunk.gradient.exists]
        return bool(found) and all(gradient.offloaded_dtype is None for gradient in found)

    def _none_on_device(self, plan: Plan) -> bool:
        """Whether a plan has none of the gradients that wait on the device."""
        return all(
            shard.grad_home is not Tier.DEVICE
            for chunk, shard in zip(self._sharding.chunks, plan.shards, strict=True)
            if chunk.gradient.exists
        )

    @torch.no_grad()
    def demote_homes(self, plan: Plan, *, in_pass: bool = False) -> None:
        """Move shards and state down to where `plan` has them.

        Before a forward, while no graph is open; `in_pass` state alone moves. Gradients that wait
        stay where they are. On an error of the disk nothing has changed.
        """
        target = self._weights.target
        assert target is not None
        target.settle()
        if in_pass:
            target.demote_state(plan)
            return
        self._manager.release_all()
        pairs = zip(self._sharding.chunks, plan.shards, strict=True)
        to_files = [c for c, s in pairs if s.param_home is Tier.NVME and c.files is None]
        # What a disk may refuse comes first, while all is in memory still.
        self._storage.take_in(
            {chunk.spec.id: chunk.shard for chunk in to_files}, target.committed_step
        )
        try:
            target.demote_state(plan)
        except BaseException:
            self._storage.keep_shards(
                [chunk.spec.id for chunk in self._sharding.chunks if chunk.files is not None]
            )
            raise
        self._send_down(plan)

    def _send_down(self, plan: Plan) -> None:
        """Drop shards that memory has above their homes in a plan, where files have them by now."""
        for chunk, shard in zip(self._sharding.chunks, plan.shards, strict=True):
            if shard.param_home is Tier.NVME and chunk.files is None:
                chunk.leave_memory(self._storage)
            elif shard.param_home is Tier.HOST and _home(chunk) is Tier.DEVICE:
                chunk.leave_device()

    @torch.no_grad()
    def promote_homes(self, planned: PlanResult, inputs: PlanInputs | None = None) -> None:
        """Bring shards and state nearer, to where `planned` has them, and make it the plan.

        inputs: what it was made with, where that is another trace. Between iterations, when there
        are no gradients. On an error of the disk nothing has changed.
        """
        target = self._weights.target
        assert target is not None
        target.settle()
        self._manager.release_all()
        try:  # what a disk may refuse, while files have all that they had
            self._storage.place_gradients(planned.plan, self._sharding.chunks)
            for chunk, shard in zip(self._sharding.chunks, planned.plan.shards, strict=True):
                if shard.param_home is not _home(chunk):
                    chunk.bring_home(shard.param_home is Tier.HOST)
            target.promote_state(planned.plan)
        except BaseException:
            self._send_down(self._planning.plan)
            self._in_use.place_gradients(self._sharding.chunks)
            self._homes_changed()
            raise
        self._planning.use_plan(planned, inputs)
        self._storage.keep_shards(
            [chunk.spec.id for chunk in self._sharding.chunks if chunk.files is not None]
        )
        self._homes_changed()

    def _homes_changed(self) -> None:
        """Let all who know of homes know where these are."""
        assert self._weights.target is not None
        self._weights.target.homes_changed()
        self._manager.homes_changed()
        self._manager.release_all()


def _home(chunk: Chunk) -> Tier:
    if chunk.files is not None:
        return Tier.NVME
    return Tier.HOST if chunk.shard_on_host else Tier.DEVICE
