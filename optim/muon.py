"""HybridMuon: matrices of hidden layers by Muon, all else by AdamW, in one optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gemini.arguments import by_name
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.matrix_rule import MatrixOptions, MatrixRule
from gemini.optim.rules.orthogonal import COEFFICIENTS

from .adam import AdamRule
from .base import Folders, TieredOptimizer

Split = Mapping[str, int | Sequence[int]]


class HybridMuon(TieredOptimizer):
    """Muon (Jordan et al. 2024; Liu et al. 2025), state on any tier; see `HybridAdam`.

    It is made from a module, plain or wrapped, whose parameters it tells apart by the modules they
    belong to (`routed`): weights of hidden layers [out, in], and stacks of them [experts, out, in],
    are made orthogonal; embeddings, weights tied to them, the output head, norms, convolutions and
    parameters of one dimension go to AdamW. Or it is made from parameters or groups, as
    torch.optim.Muon: groups with `use_muon=False` go to AdamW.

    lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
        torch.optim.Muon, whose bits these are on one process.
    adamw_lr: None for `lr`, which `adjust_lr_fn="match_rms_adamw"` makes fit both. betas,
        adamw_eps: as in torch.optim.AdamW.
    split: of a module: weights that are several matrices, by the end of their name, as
        `{"c_attn.weight": 3, "qkv_proj.weight": (2048, 512, 512)}`: in how many equal parts, or
        which ones, their outputs are cut. Of a group: a dimension, and sizes along it. A rate is
        that of each part.
    exclude: modules, or ends of parameters' names, that AdamW gets besides.
    ns_form: `"gram"` iterates on the smaller side alone: fewer operations, other bits.
    ns_dtype: of the iterations; `"fp32"` for comparisons.

    Momentum and moments are in fp32, and a parameter has only the planes of its own rule. Every
    matrix is made orthogonal once a step, whole, by one rank, so that bits depend on no tier and no
    number of ranks. With state on disk, staging is as large as the largest matrix's part here.

    Raises ValueError for an option out of range, for a parameter that is no matrix, for one that
    torch has split, and for float64; and as `HybridAdam`.
    Formulas: `optim.rules.matrix_rule`, `optim.rules.orthogonal`.
    """

    @by_name
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        split: Split | tuple[int, Sequence[int]] | None = None,
        exclude: Iterable[nn.Module | str] = (),
        ns_form: str = "standard",
        ns_dtype: str = "bf16",
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Folders = None,
        nvme_write_budget: int | str | None = None,
        nvme: NvmeConfig | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            if isinstance(split, tuple):
                raise ValueError(f"split={split!r} of a module; expected parts by names' ends")
            params, split = routed(params, split, exclude), None
        defaults = {
            "use_muon": True,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_lr": adamw_lr,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "split": split,
            "ns_form": ns_form,
            "ns_dtype": ns_dtype,
        }
        super().__init__(
            params,
            defaults,
            MatrixRule(AdamRule()),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme_write_budget=nvme_write_budget,
            nvme=nvme,
        )

    def _check_options(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        super()._check_options(group, params)
        hyper = self._rule.hyper(group)
        if not isinstance(hyper, MatrixOptions):
            return
        for param in params or group["params"]:
            if not isinstance(param, Tensor):  # a name, of a saved group
                continue
            if param.dim() < 2:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is no matrix; give it to a group "
                    "with use_muon=False, or make the optimizer from the module"
                )
            if hyper.split is not None and sum(hyper.split[1]) != param.shape[-2:][hyper.split[0]]:
                raise ValueError(
                    f"split={group['split']!r} of a parameter of shape {tuple(param.shape)}; "
                    "expected a dimension of its matrices, and sizes that add up to it"
                )


def routed(
    module: nn.Module, split: Split | None = None, exclude: Iterable[nn.Module | str] = ()
) -> list[dict[str, Any]]:
    """Param groups of a module for `HybridMuon`: with `use_muon`, by their split, and without.

    Frozen parameters are in none. Raises ValueError for a `split` or an `exclude` that names no
    parameter, or does not fit.
    """
    split, left_out = dict(split or {}), list(exclude)
    every = [name for name, _, _ in _named(module)]
    for end in (*split, *(name for name in left_out if isinstance(name, str))):
        if not any(_ends(name, end) for name in every):
            raise ValueError(f"{end!r} ends the name of no parameter; they are {every[:3]} ...")
    others = set(_others(module, left_out))
    groups: dict[Any, list[Tensor]] = {None: []}
    adamw: list[Tensor] = []
    for name, param, owner in _named(module):
        if not param.requires_grad:
            continue
        names = [end for end in split if _ends(name, end)]
        if id(param) in others or param.dim() not in (2, 3):
            adamw.append(param)
        elif names:
            groups.setdefault(_cut(name, param, owner, split[names[0]]), []).append(param)
        else:
            groups[None].append(param)
    found = [
        {"params": params, "use_muon": True, "split": cut}
        for cut, params in groups.items()
        if params
    ]
    return [*found, *([{"params": adamw, "use_muon": False, "split": None}] if adamw else [])]


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """List every parameter once, with the module it belongs to."""
    seen = set()
    for prefix, owner in module.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                yield f"{prefix}.{name}".lstrip("."), param, owner


def _others(module: nn.Module, exclude: Sequence[nn.Module | str]) -> Iterator[int]:
    """Ids of parameters that are not matrices of hidden layers."""
    heads = [m for m in exclude if isinstance(m, nn.Module)]
    for part in module.modules():
        get = getattr(part, "get_output_embeddings", None)
        head = get() if callable(get) else None
        heads += [head] if isinstance(head, nn.Module) else []
    outer = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
    heads += [part for part in module.modules() if isinstance(part, outer)]
    for part in heads:
        yield from map(id, part.parameters())
    ends = [end for end in exclude if isinstance(end, str)]
    for name, param, _ in _named(module):
        if any(_ends(name, end) for end in ends):
            yield id(param)


def _ends(name: str, end: str) -> bool:
    """Whether a name ends with whole words: a wrapper puts some in front."""
    return f".{name}".endswith(f".{end}")


def _cut(
    name: str, param: Tensor, owner: nn.Module, parts: int | Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """Cut a weight along its outputs: the first dimension, except in transformers' Conv1D."""
    dim = 1 if type(owner).__name__ == "Conv1D" else 0
    size = param.shape[-2:][dim]
    if isinstance(parts, int):
        if parts < 1 or size % parts:
            raise ValueError(
                f"split={parts} of {name}, which has {size} outputs; expected a divisor"
            )
        return dim, (size // parts,) * parts
    if sum(parts) != size:
        raise ValueError(f"split={tuple(parts)} of {name}, which has {size} outputs; expected them")
    return dim, tuple(parts)
