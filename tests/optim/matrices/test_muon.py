"""HybridMuon on plain modules: torch.optim.Muon's bits on every tier, routing, splits, refusals."""

import math

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from optim import HybridMuon
from optim.matrices import sites
from optim.muon import routed
from optim.rules import matrix_rule
from optim.rules.orthogonal import COEFFICIENTS, adjusted_rate, orthogonal
from tests.support.plain_training import ON_DISK, make_params, on_disk, train, update_error

SHAPES = [(67, 97), (5, 3), (130, 48), (17,), (1, 33), (1023,), (48, 130)]
MATRICES = [i for i, shape in enumerate(SHAPES) if len(shape) == 2]


def _params(dtype=torch.float32, shapes=SHAPES):
    return make_params(dtype, shapes)


def _groups(params):
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "use_muon": False},
    ]


class _Theirs:
    """torch's two optimizers."""

    def __init__(self, params, lr=1e-2, weight_decay=0.1, **options):
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        self.parts = [torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **options)]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr, weight_decay=weight_decay, fused=True))

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def _skips(step):
    """Parameters without a gradient: a matrix, and what AdamW updates."""
    return {1: (2, 5), 3: (0,)}.get(step, ())


@ON_DISK
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        {"momentum": 0.3, "ns_steps": 3},
        {"lr": 0.03, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-5},
    ],
    ids=["default", "rms", "three", "others"],
)
def test_it_has_torchs_bits_wherever_state_lives(fraction, options, tmp_path):
    ours, theirs = _params(), _params()
    optimizer = HybridMuon(_groups(ours), **{"lr": 1e-2, **options}, **on_disk(tmp_path, fraction))
    got = train(ours, optimizer, 5, _skips)
    want = train(theirs, _Theirs(theirs, **options), 5, _skips)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_iterations_in_fp32_are_those_of_the_formula_in_fp64():
    """To 1e-6: B, G and O of the docstring, and the rate, in fp64."""
    (ours,), (start,) = _params(shapes=[(48, 130)]), _params(shapes=[(48, 130)])
    optimizer = HybridMuon([ours], lr=0.5, momentum=0.9, ns_dtype="fp32")
    train([ours], optimizer, 4)
    weight, momentum = start.detach().double(), torch.zeros(48, 130, dtype=torch.float64)
    for step in range(4):
        (given,) = _params(shapes=[(48, 130)])
        train([given], _Keeps([given]), 1, first=step)
        grad = given.kept.double()
        momentum += 0.1 * (grad - momentum)
        x = grad + 0.9 * (momentum - grad)
        x /= x.norm()
        a, b, c = COEFFICIENTS
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        weight = weight * (1 - 0.5 * 0.1) - 0.5 * x
    assert update_error([ours], [weight], [start]) < 1e-6


class _Keeps:
    """Of gradients that a loop gives."""

    def __init__(self, params):
        self.params = params

    def step(self):
        for param in self.params:
            param.kept = param.grad.clone()

    def zero_grad(self):
        pass


@ON_DISK
def test_a_matrix_is_made_orthogonal_once_a_step(fraction, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        matrix_rule, "orthogonal", lambda x, *a, **k: made.append(x.shape) or orthogonal(x, *a, **k)
    )
    params = _params()
    optimizer = HybridMuon(_groups(params), **on_disk(tmp_path, fraction))
    train(params, optimizer, 1)
    assert sorted(made) == sorted(torch.Size(SHAPES[i]) for i in MATRICES)
    train(params, optimizer, 1, lambda step: (0,), first=1)
    assert len(made) == 2 * len(MATRICES) - 1


def test_a_step_reads_and_writes_every_block_once(tmp_path):
    """Planes as they are: 4 bytes an element of a matrix, 8 of the rest, and what undoes a step."""
    params = _params(shapes=[(64, 128), (2048,), (32, 96)])
    optimizer = HybridMuon(_groups(params), **on_disk(tmp_path, 1.0))
    train(params, optimizer, 1)
    train(params, optimizer, 1, first=1)
    moved = optimizer.last_report.traffic
    read, numel = 4 * (64 * 128 + 32 * 96) + 8 * 2048, 64 * 128 + 2048 + 32 * 96
    assert moved.nvme_write == read + 4 * numel
    assert moved.nvme_read == read


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_a_momentum_in_fp32(dtype, tmp_path):
    """Both ways to keep them give the same; it is that of fp32 parameters, rounded as these are."""
    found = []
    for fraction in (0.0, 1.0):
        params = _params(dtype)
        optimizer = HybridMuon(_groups(params), lr=1e-2, **on_disk(tmp_path, fraction))
        found.append(train(params, optimizer, 3))
        state = optimizer.state_dict()["state"]
        assert {s["momentum_buffer"].dtype for s in list(state.values())[:5]} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_stack_is_its_matrices_one_by_one():
    (stack,) = _params(shapes=[(3, 20, 31)])
    matrices = [nn.Parameter(part.detach().clone()) for part in stack]
    grad = torch.randn(3, 20, 31, generator=torch.Generator().manual_seed(0))
    one, other = HybridMuon([stack], lr=1e-2), HybridMuon(matrices, lr=1e-2)
    for _ in range(3):
        stack.grad = grad.clone()
        for matrix, part in zip(matrices, grad, strict=True):
            matrix.grad = part.clone()
        one.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(stack, matrices, strict=True))


@pytest.mark.parametrize("sizes", [(20, 20, 20), (40, 10, 10)], ids=["equal", "grouped"])
def test_parts_of_a_split_weight_are_matrices_of_their_own(sizes):
    """Along a Linear's rows, and a Conv1D's columns. Of unequal parts a rate is each part's; this
    one is that of the transposed, too."""
    torch.manual_seed(0)
    options = {"lr": 1e-2, "ns_dtype": "fp32", "adjust_lr_fn": "match_rms_adamw"}
    linear, conv = nn.Linear(12, 60, bias=False), Conv1D(60, 12)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.T)
    parts = [nn.Parameter(part.detach().clone()) for part in linear.weight.split(sizes)]
    grad = torch.randn(60, 12)
    optimizers = [
        HybridMuon(linear, split={"weight": sizes}, **options),
        HybridMuon(conv, split={"weight": sizes}, **options),
        HybridMuon(parts, **options),
    ]
    for _ in range(3):
        linear.weight.grad, conv.weight.grad = grad.clone(), grad.T.clone()
        for part, of_part in zip(parts, grad.split(sizes), strict=True):
            part.grad = of_part.clone()
        for optimizer in optimizers:
            optimizer.step()
    want = torch.cat(list(parts))
    assert torch.allclose(linear.weight, want, atol=1e-7)
    assert torch.allclose(conv.weight.T, want, atol=1e-6)  # rows and columns change places
    whole = nn.Parameter(torch.cat([part.detach() for part in parts]))
    whole.grad = grad.clone()
    before = whole.detach().clone()
    HybridMuon([whole], lr=1e-2).step()
    assert not torch.allclose(whole - before, linear.weight - before, atol=1e-3)


def test_the_gram_form_comes_to_the_same_by_other_bits():
    (wide,) = _params(shapes=[(24, 200)])
    standard, gram = (
        orthogonal(wide.detach(), COEFFICIENTS, 5, 1e-7, form=form, dtype=torch.float32)
        for form in ("standard", "gram")
    )
    assert not torch.equal(standard, gram)
    assert torch.allclose(standard, gram, atol=2e-4)
    tall = orthogonal(wide.detach().T, COEFFICIENTS, 5, 1e-7, form="gram", dtype=torch.float32)
    assert torch.equal(tall, gram.T)
    singular = torch.linalg.svdvals(gram)
    assert float(singular.min()) > 0.6 and float(singular.max()) < 1.3


def test_rates_are_those_of_torch():
    assert adjusted_rate(1.0, None, 64, 16) == adjusted_rate(1.0, "original", 64, 16) == 2.0
    assert adjusted_rate(1.0, None, 16, 64) == 1.0
    assert adjusted_rate(1.0, "match_rms_adamw", 16, 64) == 0.2 * 8


# -- routing -------------------------------------------------------------------------------------


def test_parameters_are_told_apart_by_their_modules():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8)
    model = GPT2LMHeadModel(config)
    names = {id(param): name for name, param in model.named_parameters()}
    found = routed(model, {"c_attn.weight": 3})
    by_cut = {
        (group["use_muon"], group["split"]): [
            names[id(p)].split("h.0.")[-1] for p in group["params"]
        ]
        for group in found
    }
    assert by_cut[True, None] == ["attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    assert by_cut[True, (1, (16, 16, 16))] == ["attn.c_attn.weight"]
    assert "transformer.wte.weight" in by_cut[False, None]  # and the head that is tied to it
    assert len(by_cut) == 3 and sum(map(len, by_cut.values())) == len(names)


def test_heads_convolutions_what_is_excluded_and_what_is_frozen_are_no_matrices():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=40, tie_word_embeddings=False,
    )  # fmt: skip
    model = nn.ModuleDict({"lm": Qwen3ForCausalLM(config), "conv": nn.Conv1d(4, 4, 3)})
    model["extra"], model["gate"] = nn.Linear(4, 4), nn.Linear(4, 4)
    model["lm"].model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(param): name for name, param in model.named_parameters()}
    muon, adamw = routed(model, exclude=[model["extra"], "gate.weight"])
    of_muon = {names[id(p)].rsplit(".", 2)[-2] for p in muon["params"]}
    assert of_muon == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}
    of_adamw = {names[id(p)] for p in adamw["params"]}
    wanted = {"lm.lm_head.weight", "lm.model.embed_tokens.weight", "conv.weight", "extra.weight"}
    assert of_adamw >= {*wanted, "gate.weight"} and not any("up_proj" in name for name in of_adamw)


# -- faults and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("which", [1, 6, 14])
def test_a_step_that_fails_in_its_middle_changes_nothing(which, tmp_path, monkeypatch):
    """Blocks wait then, are written, or were."""
    params = _params()
    optimizer = HybridMuon(_groups(params), **on_disk(tmp_path, 0.8))
    train(params, optimizer, 2)
    before = [p.detach().clone() for p in params]
    real, calls = sites.cpu_update.update, []

    def fails(*args):
        calls.append(args)
        if len(calls) == which:
            raise OSError("on purpose")
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(sites.cpu_update, "update", fails)
        with pytest.raises(OSError, match="on purpose"):
            train(params, optimizer, 1, first=2)
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    others = _params()
    want = train(others, HybridMuon(_groups(others)), 3)
    got = train(params, optimizer, 1, first=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_state_dicts_go_on_and_come_from_torch(tmp_path):
    params, others, fresh = _params(), _params(), _params()
    optimizer = HybridMuon(_groups(params), lr=1e-2, **on_disk(tmp_path, 0.6))
    train(params, optimizer, 2)
    saved = optimizer.state_dict()
    assert [set(s) - {"step"} for s in saved["state"].values()] == [
        *[{"momentum_buffer"}] * 5, *[{"exp_avg", "exp_avg_sq"}] * 2
    ]  # fmt: skip
    other = HybridMuon(_groups(others))
    with torch.no_grad():
        for mine, his in zip(params, others, strict=True):
            his.copy_(mine)
    other.load_state_dict(saved)
    want, got = train(params, optimizer, 2, first=2), train(others, other, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    matrices = [fresh[i] for i in MATRICES]
    theirs = torch.optim.Muon(matrices, lr=1e-2)
    train(matrices, theirs, 1)
    ours = HybridMuon(matrices)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 1e-2
    for mine, his in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], his["momentum_buffer"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ns_steps": 100}, "ns_steps=100; expected a whole number below 100"),
        ({"ns_steps": 2.5}, "ns_steps=2.5; expected a whole number"),
        ({"ns_coefficients": (1.0, 2.0)}, "expected three numbers"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms'; expected one of"),
        ({"ns_form": "cubic"}, "ns_form='cubic'; expected one of"),
        ({"ns_dtype": "fp8"}, "ns_dtype='fp8'; expected one of"),
        ({"momentum": 1.5}, r"momentum=1.5 is outside \[0, 1\]"),
        ({"lr": math.nan}, "lr=nan is outside"),
        ({"split": (0, (3, 3))}, "expected a dimension of its matrices, and sizes that add up"),
    ],
)
def test_options_that_are_none_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        HybridMuon([nn.Parameter(torch.zeros(5, 3))], **options)


def test_what_is_no_matrix_and_what_nothing_here_updates_are_named():
    with pytest.raises(ValueError, match=r"shape \(17,\) is no matrix; give it to a group"):
        HybridMuon([nn.Parameter(torch.zeros(17))])
    with pytest.raises(ValueError, match="expected parts by names' ends"):
        HybridMuon(nn.Linear(3, 3), split=(0, (1, 2)))
    with pytest.raises(ValueError, match="'eight' ends the name of no parameter"):
        HybridMuon(nn.Linear(4, 4), split={"eight": 2})
    with pytest.raises(ValueError, match="'gate' ends the name of no parameter"):
        HybridMuon(nn.Linear(4, 4), exclude=["gate"])
    with pytest.raises(ValueError, match="split=2 of weight, which has 3 outputs"):
        HybridMuon(nn.Linear(3, 3), split={"weight": 2})
    wide = [nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))]
    optimizer = HybridMuon(wide)
    wide[0].grad = torch.ones_like(wide[0])
    with pytest.raises(ValueError, match=r"a rule over matrices got torch\.float64 parameters"):
        optimizer.step()


def test_what_adamw_updates_stages_nothing_for_muon(tmp_path):
    """A table of words that is larger than every matrix: its blocks wait for nobody."""
    params = _params(shapes=[(400, 64), (32, 64)])
    groups = [{"params": params[1:]}, {"params": params[:1], "use_muon": False}]
    optimizer = HybridMuon(groups, **on_disk(tmp_path, 1.0))
    optimizer.bind()
    nvme = optimizer.targets[0].tiered_state.nvme
    wide, depth = 1024 * 12, 2  # a block in which both have elements is the largest
    assert nvme.staging_bytes <= (depth + 2 + 3) * wide


def test_a_group_keeps_the_rule_that_its_state_was_made_for():
    params = _params()
    optimizer = HybridMuon(_groups(params))
    train(params, optimizer, 1)
    optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(ValueError, match="group 0 has another use_muon than when the state"):
        train(params, optimizer, 1)
