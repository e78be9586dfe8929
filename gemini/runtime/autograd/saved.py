"""Saved tensors of one engine: their tiers, and the bytes of them that budgets leave room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from gemini.activations.file import SavedFile
from gemini.activations.host import HostTier
from gemini.activations.lower import FileTier, LowerTier, NoTier
from gemini.activations.saved_tensors import SavedTensors
from gemini.chunk.parameter import handle_of
from gemini.nvme import NvmeError
from gemini.placement.policy import recomputes, spills
from gemini.placement.predict import KINDS
from gemini.placement.saved import NUM_PIECES, Spilling
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import Backend, FileConfig
from gemini.runtime.schedule.planning import PlanInUse, Planning
from gemini.runtime.sharding import Sharding

NON_MODEL = "non-model"


class SavedCalls:
    """Forwards of one engine whose saved tensors may leave the device.

    Where no plan says what may stay, it is what the budget leaves beside model data, at its planned
    peak, what operators hold besides, and what is on its way out.
    """

    def __init__(
        self,
        sharding: Sharding,
        in_use: PlanInUse,
        root: nn.Module,
        owns: Callable[[Tensor], bool],
        tracking: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> None:
        """owns: whether a tensor is a view of a chunk. tracking: context of a forward, without
        this."""
        planning, storage = in_use.planning, in_use.storage
        sampler, ledger = in_use.sampler, in_use.ledger
        self._sharding, self._planning, self._ledger = sharding, planning, ledger
        self._sampler, self._tracking = sampler, tracking
        # parameters that the user kept to himself
        self._ignored = [param for param in root.parameters() if handle_of(param) is None]
        self._base = 0  # bytes of others on the device
        self._planned: tuple[object, int] | None = None  # a plan's result, and its peak
        sizes = planning.inputs.spilling or Spilling()  # none where nothing limits the device
        self.saved = SavedTensors(
            _tier_of(
                sharding.backend,
                storage.config,
                planning,
                sizes.piece_bytes,
                self._host_room,
            ),
            sharding.backend.device,
            room=self._device_room,
            leave_alone=owns,
            changed=sampler.saved_changed,
            failed=sharding.comm.say_failed,  # it may be this rank's alone
            least_bytes=sizes.least_bytes,
            ahead_bytes=sizes.ahead_bytes,
        )
        ledger.count_saved(lambda: self.saved.staging_bytes)
        sampler.count_saved(self.saved)
        if recomputes(planning.policy):
            from gemini.runtime.schedule.recompute import Layers

            Layers(sampler, planning, self.saved, root, sharding.backend.device)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Context of a forward."""
        if not torch.is_grad_enabled():
            self.saved.release_staging()
            with self._tracking(module):
                yield
            return
        self.follow_plan()
        in_use = self._sharding.backend.bytes_in_use()
        if in_use is not None:
            self._base = in_use - self._ledger.device_bytes() - self.saved.resident_bytes
        try:
            with self._tracking(module), self.saved.saving([*module.buffers(), *self._ignored]):
                yield
        except NvmeError as error:  # it may be this rank's alone
            self._sharding.comm.say_failed(error)
            raise

    def follow_plan(self) -> None:
        """Let as many saved bytes stay as the plan of the coming forward says, if there is one."""
        plan = self._planning.plan_of_forward(self._sampler.signature)
        if plan is None:
            self.saved.keep_what_fits()
        else:
            self.saved.keep_at_most(None if plan.saved is None else plan.saved.kept_bytes)

    def _device_room(self) -> int | None:
        """Bytes of saved tensors that may stay; None where nothing limits the device."""
        overruns, ledger = self._planning.overruns, self._ledger
        if not overruns.limits_device:
            return None
        held, in_use, saved = (
            ledger.device_bytes(),
            self._sharding.backend.bytes_in_use(),
            self.saved,
        )
        # an operator of backward has gradients as large as what was saved
        other = 2 * saved.largest_bytes
        if in_use is not None:
            other = max(other, in_use - held - saved.resident_bytes - self._base)
        left: int = overruns.limits[Tier.DEVICE] - max(held, self._planned_peak()) - other
        return left - saved.in_flight_bytes

    def _host_room(self) -> int | None:
        """Bytes of saved tensors that the host may hold; None where nothing limits it."""
        overruns = self._planning.overruns
        limit: int | None = overruns.limits.get(Tier.HOST)
        if limit is None:
            return None
        held: int = self._ledger.totals()[Tier.HOST]
        return max(0, limit - held)

    def _planned_peak(self) -> int:
        """The most bytes of model data on the device at any moment of the plan."""
        result = self._planning.result
        if self._planned is None or self._planned[0] is not result:
            rows = result.profile.rows
            kinds = [rows[Tier.DEVICE, kind] for kind in KINDS if kind != NON_MODEL]
            self._planned = result, max(map(sum, zip(*kinds, strict=True)))
        return self._planned[1]


def _tier_of(
    backend: Backend,
    config: FileConfig,
    planning: Planning,
    piece: int,
    host_room: Callable[[], int | None],
) -> LowerTier:
    policy, folder = planning.policy, None
    if config.folder is not None and spills(policy) and policy.has_files:
        folder = config.checked_folder()
    if not backend.has_host_tier:
        if folder is None:  # layers may be computed again all the same
            return NoTier()
        return FileTier(folder, config.label, piece_bytes=piece)
    file = None
    if folder is not None:
        file = SavedFile(folder, config.label, piece_bytes=piece)
    return HostTier(backend, file, host_room, in_flight_bytes=NUM_PIECES * piece)
