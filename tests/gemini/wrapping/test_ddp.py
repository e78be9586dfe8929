"""GeminiDDP in one process; several ranks are in tests/dist."""

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import Choosy, Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from gemini import AutoPlacement, GeminiDDP, PrecisionPolicy, StaticPlacement
from gemini.placement.policy import parse_placement
from optim import HybridAdam, HybridSGD
from tests.support.checkpoints import masters_of, train, weights
from tests.support.spilled import BLOCKS, SMALL


def test_sgd_gives_the_bits_of_torch():
    batches = token_batches(20, 1)
    module = Tower()
    model = GeminiDDP(module, precision="fp32", **SMALL)
    assert len(model.engine.chunks) > 3
    train(model, HybridSGD(model.parameters(), lr=0.1), batches)
    want = train_reference(Tower(), lambda ps: torch.optim.SGD(ps, lr=0.1), batches, token_loss)
    assert torch.equal(weights(model), want)


def test_masters_start_as_the_original_weights_not_the_rounded_ones():
    module = Tower()
    want = flat(list(module.parameters()))
    model = GeminiDDP(module, **SMALL)
    optimizer = HybridAdam(model.parameters())
    assert torch.equal(masters_of(model, optimizer), want)
    assert not torch.equal(weights(model), want)


def test_parameters_are_views_of_one_storage_a_chunk():
    model = GeminiDDP(Tower(), **SMALL)
    storages = {}
    for chunk in model.engine.chunks:
        for slot in chunk.spec.slots:
            param = model.engine.params[slot.param]
            storages.setdefault(chunk.spec.id, set()).add(param.untyped_storage().data_ptr())
    assert all(len(found) == 1 for found in storages.values())
    assert len(set().union(*storages.values())) == len(model.engine.chunks)


def test_param_groups_with_their_own_lr_inside_one_chunk():
    batches = token_batches(5, 1)

    def groups(params):
        return [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "weight_decay": 0.3}]

    start = flat(list(Tower().parameters()))
    model = GeminiDDP(Tower(), precision="fp32")
    assert len(model.engine.chunks) == 1
    train(model, HybridAdam(groups(list(model.parameters())), 1e-2, eps=1e-3), batches)
    want = train_reference(
        Tower(),
        lambda ps: torch.optim.AdamW(groups(ps), 1e-2, eps=1e-3, weight_decay=0.0),
        batches,
        token_loss,
    )
    assert relative_error(weights(model) - start, want - start) < 1e-6


def test_a_parameter_without_gradient_keeps_every_bit_and_its_count():
    module = Choosy()
    model = GeminiDDP(module, precision="fp32")
    optimizer = HybridAdam(model.parameters(), lr=0.1, weight_decay=0.1)
    before = module.heads[1].weight.detach().clone()
    for step in range(4):
        model(torch.ones(2, 5), step // 3).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            assert torch.equal(module.heads[1].weight, before)
    names = [spec.name for spec in model.engine.layout.params]
    steps = dict(zip(names, optimizer.targets[0].step_counts, strict=True))
    assert (steps["heads.0.weight"], steps["heads.1.weight"]) == (3, 1)


def test_attributes_and_outputs_are_those_of_the_module():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.answer = 42

        def forward(self, x, scale=1.0):
            return {"y": self.linear(x) * scale, "n": 7, "pair": (x, [x])}

    model = GeminiDDP(Named())
    out = model(torch.ones(2, 3), scale=2.0)
    assert model.answer == 42 and out["n"] == 7
    assert out["y"].dtype == torch.bfloat16 and out["pair"][0].dtype == torch.bfloat16
    forced = GeminiDDP(Named(), force_outputs_fp32=True)(torch.ones(2, 3))
    assert forced["y"].dtype == torch.float32
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_a_failed_step_leaves_weights_and_state_at_the_last_one(tmp_path):
    from tests.support.disks.faults import spoil_block

    for precision in ("bf16", "fp32"):
        model = GeminiDDP(Tower(), precision=precision, **SMALL)
        optimizer = HybridAdam(
            model.parameters(),
            nvme_offload_fraction=0.9,
            nvme_offload_dir=tmp_path,
            nvme=BLOCKS,
        )
        batches = token_batches(4, 1)
        train(model, optimizer, batches[:2])
        before = weights(model)
        token_loss(model, batches[2][0]).backward()
        restore = spoil_block(optimizer, 9)
        with pytest.raises(RuntimeError, match="block 9 "):
            optimizer.step()
        assert torch.equal(weights(model), before)
        restore()
        optimizer.step()  # the gradients are still there
        optimizer.zero_grad()
        train(model, optimizer, batches[3:])
        clean = GeminiDDP(Tower(), precision=precision, **SMALL)
        train(clean, HybridAdam(clean.parameters()), batches)
        assert torch.equal(weights(model), weights(clean))


def test_two_engines_live_side_by_side():
    models = [GeminiDDP(Tower(seed), **SMALL) for seed in (0, 1)]
    optimizers = [HybridAdam(m.parameters()) for m in models]
    for batch in token_batches(3, 1):
        losses = [token_loss(m, batch[0]) for m in models]
        sum(losses).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    alone = GeminiDDP(Tower(1), **SMALL)
    train(alone, HybridAdam(alone.parameters()), token_batches(3, 1))
    assert torch.equal(weights(models[1]), weights(alone))


# -- bad input ---------------------------------------------------------------------------------


def test_what_cannot_be_wrapped_is_refused_and_left_alone():
    module = Tower()
    GeminiDDP(module)
    with pytest.raises(ValueError, match=r"embed\.weight belongs to a GeminiDDP already"):
        GeminiDDP(module)
    empty = nn.Module()
    empty.weight = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"weight of the root module .* on the meta device"):
        GeminiDDP(empty)
    complex_ = nn.Linear(3, 3)
    complex_.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"phase is complex \(torch.complex64\), .*view_as_real"):
        GeminiDDP(complex_)
    assert {type(p) for p in complex_.parameters()} == {nn.Parameter}


class Rescaled(nn.Module):
    """Model that gives a layer's weights values again when it initialises what is around it."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def _init_weights(self, module):
        if module is self.pair:
            nn.init.normal_(module[0].weight)  # by name to a mode, not by place
            module[0].weight.fill_(2.0)
            module[0].weight.data.add_(module[1].weight)

    def forward(self, rows):
        return self.pair(rows)


def test_a_parameter_that_has_values_keeps_them_while_others_are_initialised():
    """Those of a chunk that was released are not even there."""
    module = Rescaled()
    module.pair[0].requires_grad_(False)  # in a chunk of its own
    module.pair[1].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    want = module.pair[0].weight.detach().clone()
    model = GeminiDDP(module, precision="fp32")
    assert torch.equal(model.state_dict()["pair.0.weight"], want)
    assert model.state_dict()["pair.1.weight"].abs().max() <= 0.5


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"precision": "int8"}, ValueError, "precision='int8'"),
        ({"placement_policy": "magic"}, ValueError, "placement_policy='magic'"),
        ({"max_norm": -1.0}, ValueError, "max_norm=-1.0"),
        ({"max_prefetch": -1}, ValueError, "max_prefetch=-1"),
        ({"min_chunk_size_m": 0}, ValueError, "min_chunk_size_m=0"),
        ({"device": "mps"}, ValueError, "device mps"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_a_bad_option_is_named(options, error, said):
    module = Tower()
    with pytest.raises(error, match=said):
        GeminiDDP(module, **options)
    assert type(module.embed.weight) is nn.Parameter


def test_bad_placements_are_named():
    with pytest.raises(ValueError, match="shard_param_frac=2"):
        StaticPlacement(2)
    with pytest.raises(ValueError, match="warmup_non_model_data_ratio=1"):
        AutoPlacement(warmup_non_model_data_ratio=1.0)


SPELLINGS = {
    "bf16": ["bfloat16", "BF16", torch.bfloat16, "torch.bfloat16"],
    "fp16": ["float16", "half", torch.float16],
    "fp32": ["float32", "float", torch.float32],
}


@pytest.mark.parametrize("precision", SPELLINGS)
def test_a_precision_is_taken_in_every_usual_spelling(precision):
    for given in SPELLINGS[precision]:
        assert PrecisionPolicy(given) == PrecisionPolicy(precision)
        assert PrecisionPolicy(communication_dtype=given).communication_dtype == precision
    for wrong in ("fp64", torch.int8, 16, None):
        with pytest.raises(ValueError, match=r"precision=.*; expected one of .'bf16'"):
            PrecisionPolicy(wrong)
    model = GeminiDDP(nn.Linear(2, 2), precision=given)
    assert model.engine.precision_settings.precision == precision


def test_a_placement_is_taken_whatever_its_case_and_dashes():
    for given in ("zero3", "zero-3", "ZeRO3", "ZeRO_3", "Zero 3"):
        assert parse_placement(given) == StaticPlacement.zero(3)
    for wrong in ("zero4", "", 3, None):
        with pytest.raises(ValueError, match=r"placement_policy=.* is unknown; expected one of"):
            parse_placement(wrong)


def test_an_option_that_there_is_not_names_the_one_that_was_meant():
    meant = {
        "placment_policy": "placement_policy", "precison": "precision", "maxnorm": "max_norm",
        "max-prefetch": "max_prefetch",
    }  # fmt: skip
    for given, name in meant.items():
        with pytest.raises(TypeError, match=f"{given}'; did you mean {name}.$"):
            GeminiDDP(nn.Linear(2, 2), **{given: 1})
    with pytest.raises(TypeError, match=r"keyword argument 'zzz'$"):
        GeminiDDP(nn.Linear(2, 2), zzz=1)
    with pytest.raises(TypeError, match=r"takes module, device, placement_policy by .* got 'bf16'"):
        GeminiDDP(nn.Linear(2, 2), None, "auto", "bf16")
    with pytest.raises(AttributeError, match=r"'HybridMuon'; it is gemini.optim.HybridMuon"):
        gemini.HybridMuon  # noqa: B018
    with pytest.raises(AttributeError, match=r"did you mean gemini\.optim\.HybridMuon\?"):
        gemini.HybridMuom  # noqa: B018
    with pytest.raises(AttributeError, match=r"it is gemini.HybridAdam\(params, weight_decay=0.01"):
        gemini.AdamW  # noqa: B018
    with pytest.raises(AttributeError, match=r"it is gemini.integrations.Booster"):
        gemini.Booster  # noqa: B018
    with pytest.raises(AttributeError, match=r"'GeminiDPP'; did you mean GeminiDDP"):
        gemini.GeminiDPP  # noqa: B018


def test_an_optimizer_over_nothing_that_is_trained_says_so(caplog):
    module = nn.Linear(2, 2).requires_grad_(False)
    HybridAdam(module.parameters())
    assert "HybridAdam: nothing is trained, as no parameter requires a gradient" in caplog.text


def test_an_optimizer_over_other_parameters_is_refused():
    model = GeminiDDP(Tower())
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="together with others"):
        HybridAdam([*model.parameters(), stranger])
    HybridAdam(model.parameters())
    with pytest.raises(ValueError, match=r"already; use parameter groups .* wrap the parts"):
        HybridAdam(model.parameters())
