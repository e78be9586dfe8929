"""PipelineOwner: a process's parts of a pipeline, with one optimizer, in the vote of all stages."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from gemini.comm.ballot import Ballot
from gemini.comm.communicator import Communicator
from gemini.optim.rules.config import StateConfig
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.target import OWNER_ATTRIBUTE, Group, new_lock
from gemini.runtime.memory.machine import ranks_here
from gemini.runtime.sharding import Sharding
from gemini.runtime.step.target import ShardTarget

from .joint_target import JointStep
from .seats import Agreed, Part, Seats
from .ties import Ties

_known = threading.local()  # owners of the present default group; ranks may be threads


class PipelineOwner:
    """Owner, for optimizers, of the parameters of all parts of one mesh in this process.

    ignored: empty, as each part has its own.
    ranks_here: ranks of all stages on this host, which share its memory.
    pipeline: ranks of this pipeline, in the order of stages. place: this rank's among them.
    ties: of parameters that will be wrapped.
    """

    ignored: Mapping[int, str] = MappingProxyType({})

    def __init__(self, mesh: Any) -> None:
        self.pipeline: dist.ProcessGroup = mesh.get_group("pp")
        self.place = int(mesh.get_local_rank("pp"))
        self.comm = Communicator()
        self.ranks_here = ranks_here(self.comm)
        self.ties = Ties(self.pipeline, self.place)
        self.lock = new_lock()  # of all parts

    def attach(
        self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig
    ) -> list[ShardTarget]:
        """Make the state of each part's parameters; see `optim.target`."""
        params = [param for group in groups for param in group["params"]]
        owners = dict.fromkeys(getattr(param, OWNER_ATTRIBUTE).owner for param in params)
        members = [target for owner in owners for target in owner.attach(groups, rule, config)]
        JointStep(members, self)
        return members

    def refuse_beside_pass(self, changes: str) -> None:
        """Refuse nothing: a part refuses by itself what would change it."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Collective."""
        return self._summed([float(flag)])[0] > 0

    def seated(self, parts: Sequence[tuple[Sharding, tuple[int, int] | None]]) -> Seats:
        """Seats of these parts, each with its stage, and of those of all other ranks. Collective.

        Raises ValueError on all ranks if the parts are not one whole model.
        """
        mine = [
            Part(
                (self.place, i),
                tuple(spec.name for spec in one.layout.params),
                stage,
                tuple((name, repr(getattr(one.precision_settings, name))) for name in _ALIKE),
                tuple(tuple(map(one.comm.global_rank, ranks)) for ranks in one.scope.replicas),
                tuple(c.tie.names[0] for c in one.chunks if c.tie and not c.tie.is_first),
            )
            for i, (one, stage) in enumerate(parts)
        ]
        return Seats.of(self.comm.gather_objects(mine), self.comm.rank)

    def vote(self, seats: Seats, ballots: Sequence[Ballot], norm_type: float) -> Agreed:
        return seats.decode(self._summed(seats.encode(ballots)), norm_type)

    def raise_what_any_raised(self, seats: Seats, error: BaseException | None) -> None:
        """Raise this rank's error, or a RuntimeError with those of other ranks. Collective."""
        ballot = Ballot(power_sum=0.0, present=(), io_failed=error is not None)
        said = [ballot] * seats.num_own
        failed = seats.failed(self._summed(seats.encode(said)))
        if not failed:
            return
        texts = self.comm.gather_objects(str(error))
        if error is not None:
            raise error
        raise RuntimeError(
            f"the step failed on ranks {list(failed)}; weights and state of all stages are those "
            "of the last step. " + "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)
        )

    def _summed(self, vector: Sequence[float]) -> list[float]:
        """Sum of a vector over ranks, through host memory or else the store: no device waits."""
        if not self.comm.reaches_host:
            said = self.comm.tell("votes", json.dumps(list(vector)))
            return [sum(slot) for slot in zip(*map(json.loads, said), strict=True)]
        summed = torch.tensor(vector, dtype=torch.float64)
        self.comm.all_reduce(summed).wait()
        found: list[float] = summed.tolist()
        return found


# of `PrecisionSettings`: what a step does with the gradients of all stages
_ALIKE = ("max_norm", "norm_type", "on_nonfinite")


def together_of(mesh: Any) -> PipelineOwner:
    """Owner of a mesh with "pp" in this process. Collective over all ranks the first time.

    Equal meshes have one owner. It lives as long as the default group, and not until a garbage
    collection: those come at different times on different ranks.
    """
    world = dist.group.WORLD
    if getattr(_known, "world", None) is not world:
        _known.world, _known.owners = world, {}
    known: dict[Any, PipelineOwner] = _known.owners
    key = (tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), mesh.mesh_dim_names)
    if key not in known:
        known[key] = PipelineOwner(mesh)
    return known[key]
