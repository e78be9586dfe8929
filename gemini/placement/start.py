"""Start of a run in three lines: memory, update, optimizer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemini.units import format_bytes

from .predict import KINDS
from .sizes import UNLIMITED, Budgets
from .tiers import Tier

RATED_TB = 600  # that data sheets of consumer SSDs of 1 TB let be written


def wear(written_bytes: int) -> str:
    """Words for what a step writes to a disk."""
    tb = 1000 * written_bytes / 1e12
    return (
        f"a step writes {format_bytes(written_bytes)} to disk, 1000 steps {tb:.3g} TB: "
        f"{100 * tb / RATED_TB:.2g} % of the {RATED_TB} TB that a 1 TB consumer SSD is rated for"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One engine when its optimizer is made. Bytes are of one rank.

    peaks: by tier its planned peak (`total`) and what it is made of, as `Profile.peaks` has them.
    folders: of files, in words. written_bytes: to them, by a step.
    may_promote: what is on a slower tier, after the first iteration.
    update_path: as `StepReport.update_path`. paths: by tier that has state, how it is updated.
    when: state is updated, in words; asked: the same as `update=`.
    optimizer: its class, and of a converted one what it stands for. decays: of its groups.
    """

    device: str
    peaks: Mapping[str, Mapping[str, int]]
    budgets: Budgets
    folders: str
    written_bytes: int
    may_promote: bool
    update_path: str
    paths: Mapping[str, str]
    when: str
    asked: str
    optimizer: str
    numel: int
    decays: tuple[float, ...]
    precision: str
    num_ranks: int

    def lines(self) -> tuple[str, str, str]:
        peaks = "; ".join(self._held(tier) for tier in Tier if self.peaks[tier.value]["total"])
        is_low = any(self.peaks[tier.value]["total"] for tier in (Tier.HOST, Tier.NVME))
        rises = ". What is not on the device may rise, once measured"
        paths = ", ".join(f"on {tier} {path}" for tier, path in self.paths.items())
        groups = "1 group" if len(self.decays) == 1 else f"{len(self.decays)} groups"
        decays = " and ".join(dict.fromkeys(f"{decay:g}" for decay in self.decays))
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return (
            f"gemini memory of a rank on {self.device}, planned peak: {peaks}"
            + (rises if self.may_promote and is_low else "")
            + (f". By rank, {wear(self.written_bytes)}" if self.written_bytes else ""),
            f'gemini update by {self.update_path}: state {paths}; {self.when} (update="'
            f'{self.asked}")',
            f"gemini optimizer {self.optimizer}: {self.numel:,} parameters in {groups}, "
            f"weight decay {decays}, {self.precision}, {ranks}",
        )

    def _held(self, tier: Tier) -> str:
        peak, budget = self.peaks[tier.value], self.budgets.of(tier)
        limit = "" if budget >= UNLIMITED else f" of {format_bytes(budget)}"
        kinds = ", ".join(f"{kind} {format_bytes(peak[kind])}" for kind in KINDS if peak[kind])
        where = f" in {self.folders}" if tier is Tier.NVME else ""
        return f"{tier.value} {format_bytes(peak['total'])}{limit}{where} ({kinds})"
