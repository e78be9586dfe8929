"""What modules compute in, and the boundary where a loss scale goes on and comes off."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from bench.shared.models import Tower, seeded, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.simulated import SimBackend
from gemini import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer, PrecisionPolicy
from optim import HybridAdam, HybridSGD, LossScale, NvmeConfig
from tests.support.towers import ADAM, weights

SMALL = {"min_chunk_size_m": 0.004}


def train(model, optimizer, batches):
    for (part,) in batches:
        token_loss(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(
    ("module", "options", "warns"),
    [
        (nn.Linear(2, 2), {}, True),
        (nn.Linear(2, 2), {"precision": PrecisionPolicy("bf16")}, False),
        (nn.Linear(2, 2), {"precision": PrecisionPolicy(cast_buffers=True)}, True),
        (nn.Linear(2, 2), {"precision": "bf16"}, False),
        (nn.Linear(2, 2), {"precision": torch.float32}, False),
        (nn.Linear(2, 2), {"force_outputs_fp32": True}, False),
        (nn.Linear(2, 2).bfloat16(), {}, False),
    ],
)
def test_who_did_not_ask_for_bf16_is_told_that_fp32_comes_back_in_it(
    module, options, warns, caplog
):
    model = GeminiDDP(module, device="cpu", **options)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == warns
    for remedy in ('precision="fp32"', "force_outputs_fp32=True", 'precision="bf16"'):
        assert all(remedy in text for text in said)
    assert (model(torch.ones(1, 2)).dtype == torch.bfloat16) == (
        options.get("precision") != torch.float32 and not options.get("force_outputs_fp32")
    )


@pytest.mark.parametrize("max_norm", [0.0, 0.3])
def test_fp16_updates_agree_with_torch(max_norm):
    batches = token_batches(8, 1)
    start = flat(list(Tower().parameters()))
    model = GeminiDDP(Tower(), precision="fp16", max_norm=max_norm, **SMALL)
    got = train(model, HybridAdam(model.parameters(), **ADAM), batches)
    want = train_reference(
        Tower(),
        lambda ps: torch.optim.AdamW(ps, **ADAM, fused=True),
        batches,
        token_loss,
        torch.float16,
        max_norm,
    )
    assert relative_error(got - start, want - start) < 1e-2  # the bound


class Loose(nn.Module):
    """Losses inside and outside, several outputs, a scalar, a dataclass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(7, 5), nn.Linear(7, 3)

    def forward(self, x, how):
        a, b = self.a(x), self.b(x)
        match how:
            case "inside":
                return {"loss": a.float().pow(2).mean() + b.float().sum() / 9}
            case "outside":
                return a, [b]
            case "dataclass":
                return Pair(a, b)


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def loss_of(out):
    if isinstance(out, dict):
        return out["loss"]
    a, b = (out.a, out.b) if isinstance(out, Pair) else (out[0], out[1][0])
    return a.float().pow(2).mean() + b.float().sum() / 9


@pytest.mark.parametrize("how", ["inside", "outside", "dataclass"])
@pytest.mark.parametrize("call", ["loss", "optimizer"])
def test_a_loss_scale_is_there_wherever_the_loss_is_computed(how, call):
    """Gradients as small as 1e-9 survive fp16, and come out without the scale."""
    torch.manual_seed(1)
    x = torch.randn(4, 7)
    plain = Loose()
    (loss_of(plain(x, how)) * 1e-7).backward()
    model = GeminiDDP(Loose(), precision="fp16", loss_scale=LossScale(initial_scale=2.0**20))
    optimizer = HybridSGD(model.parameters(), lr=1.0)
    loss = loss_of(model(x, how)) * 1e-7
    if call == "loss":
        loss /= 1  # in place, as loops with accumulation do
        loss.backward()
    else:
        optimizer.backward(loss)
    got = dict(model.named_gradients())
    for name, param in plain.named_parameters():
        assert relative_error(got[name].double(), param.grad.double()) < 2e-3  # fp16's own


def test_gradients_that_leave_through_inputs_carry_no_scale():
    x = torch.randn(4, 7, requires_grad=True)
    plain = torch.autograd.grad(loss_of(Loose()(x, "outside")), x)[0]
    model = GeminiDDP(Loose(), precision="fp16")
    (alone,) = torch.autograd.grad(loss_of(model(x, "outside")), x)
    assert relative_error(alone.double(), plain.double()) < 5e-3
    loss_of(model(x, "outside")).backward()
    assert x.grad.dtype == torch.float32
    assert relative_error(x.grad.double(), plain.double()) < 5e-3


def test_fp16_outputs_are_raised_and_bf16_ones_are_not():
    for precision, dtype in (("fp16", torch.float32), ("bf16", torch.bfloat16)):
        model = GeminiDDP(Loose(), precision=precision)
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                assert model(torch.ones(2, 7), "outside")[0].dtype == dtype
    forced = GeminiDDP(Loose(), force_outputs_fp32=True)
    assert forced(torch.ones(2, 7), "dataclass").b.dtype == torch.float32


class Opaque:
    def __init__(self, tensor):
        self.inside = [tensor]


class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x), Opaque(self.linear(x))


def test_gradients_of_tensors_inside_objects_carry_the_loss_scale():
    """Of the user's own objects, as caches are: the same gradient as through the output."""
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = GeminiDDP(Hides(), precision="fp16")
        y, opaque = model(torch.ones(2, 3))
        loss = opaque.inside[0] if inside else y
        loss.float().pow(2).sum().backward()
        found.append(dict(model.named_gradients())["linear.weight"])
    assert torch.equal(*found) and float(found[0].norm()) > 0


class UsesItsOutput(nn.Module):
    """Returns, in fp32, what it goes on to use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.inner(x).float()
        return h, self.outer(h.to(self.outer.weight.dtype)).float().pow(2).sum()


def test_an_output_that_the_module_uses_itself_is_scaled_once():
    found = {}
    for precision in ("fp32", "fp16"):
        scale = 256.0 if precision == "fp16" else None
        model = GeminiDDP(UsesItsOutput(), precision=precision, loss_scale=scale)
        h, loss = model(torch.ones(2, 3))
        (loss + h.sum()).backward()
        found[precision] = dict(model.named_gradients())
    for name, grad in found["fp16"].items():
        assert relative_error(grad.double(), found["fp32"][name].double()) < 5e-3, name


class Sealed(Opaque):
    def __setattr__(self, name, value):
        if hasattr(self, name):
            raise AttributeError(f"{name} is sealed")
        super().__setattr__(name, value)


class HidesWell(Hides):
    def forward(self, x):
        return self.linear(x), Sealed(self.linear(x))


def test_an_object_that_cannot_be_changed_is_refused_in_fp16_only_and_only_for_training():
    model = GeminiDDP(HidesWell(), precision="fp16")
    with pytest.raises(TypeError, match=r"returned a Sealed.*loss scale"):
        model(torch.ones(2, 3))
    with torch.no_grad():
        model(torch.ones(2, 3))
    GeminiDDP(HidesWell(), precision="bf16")(torch.ones(2, 3))


def test_fp16_gpt2_trains_as_it_comes_with_its_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=24, n_layer=2, n_head=2, vocab_size=97, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(config)
    torch.manual_seed(0)
    model = GeminiDDP(GPT2LMHeadModel(config), precision="fp16", loss_scale=256.0)
    ids = torch.randint(97, (2, 16))
    outputs = []
    for module in (plain, model):
        out = module(input_ids=ids, labels=ids)
        assert out.past_key_values is not None
        (out.loss + out.past_key_values.layers[0].keys.float().pow(2).mean()).backward()
        outputs.append(out)
    for name, grad in model.named_gradients():
        want = dict(plain.named_parameters())[name].grad
        assert relative_error(grad.double(), want.double()) < 1e-2, name  # 11 bits, 2 layers


def test_a_loss_that_goes_round_the_boundary_is_refused_in_fp16():
    model = GeminiDDP(Tower(), precision="fp16", **SMALL)
    HybridAdam(model.parameters())
    with pytest.raises(RuntimeError, match="no loss scale"):
        (model.layers[0][1].weight ** 2).sum().backward()
    model.zero_grad()  # the error cut a backward short
    (batch,) = token_batches(1, 1)
    with pytest.raises(RuntimeError, match="without passing through the outputs"):
        token_loss(model.module, batch[0]).backward()


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.body = nn.BatchNorm1d(7), nn.Linear(7, 7)
        self.router = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 2))
        self.seen = []

    def forward(self, x):
        x = self.body(self.norm(x))
        self.seen = [x.dtype, self.router[0](self.router[1].weight.new_ones(1, 7)).dtype]
        return self.router(x)


def is_kept(name, module):
    return name == "router" or isinstance(module, nn.BatchNorm1d)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_modules_are_kept_in_fp32_by_predicate(precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = GeminiDDP(Router(), precision=precision, keep_fp32=is_kept, min_chunk_size_m=0.001)
    optimizer = HybridSGD(model.parameters(), lr=0.5)
    dtypes = {name: param.dtype for name, param in model.module.named_parameters()}
    assert {dtypes["body.weight"], dtypes["body.bias"]} == {dtype}
    assert {v for k, v in dtypes.items() if not k.startswith("body")} == {torch.float32}
    torch.manual_seed(1)
    x = torch.randn(16, 7)
    out = model(x)
    assert model.seen == [dtype, torch.float32]
    out.float().pow(2).mean().backward()
    optimizer.step()
    plain = Router()
    plain(x).pow(2).mean().backward()
    for name, param in plain.named_parameters():
        got = model.state_dict()[name].double() - param.detach().double()
        if float(param.grad.norm()) > 1e-3:
            assert relative_error(got, -0.5 * param.grad.double()) < 3e-2, name


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="whole module"):
        GeminiDDP(Tower(), keep_fp32=lambda name, module: True)
    with pytest.raises(ValueError, match=r"head\.weight is tied to one of embed"):
        GeminiDDP(Tower(), keep_fp32=lambda name, module: name == "embed")


def test_buffers_keep_their_dtype_unless_asked():
    for asked, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        model = GeminiDDP(Router(), cast_buffers=asked)
        assert model.norm.running_mean.dtype == dtype
        assert model.norm.num_batches_tracked.dtype == torch.int64
    model = GeminiDDP(Router(), cast_buffers=True, keep_fp32=is_kept)
    assert model.norm.running_mean.dtype == torch.float32


# -- without master weights ----------------------------------------------------------------------


def without_masters(folder, device="cpu", fraction=0.0, seed=3, batches=4, block_numel=4096):
    model = GeminiDDP(
        Tower(), device, master_weights=False, rounding_seed=seed, max_norm=0.3, **SMALL
    )
    optimizer = HybridAdam(
        model.parameters(),
        **ADAM,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=block_numel),
    )
    got = train(model, optimizer, token_batches(batches, 1))
    planes = set(optimizer.state_dict()["state"]["embed.weight"])
    optimizer.close()
    assert planes == {"step", "exp_avg", "exp_avg_sq"}
    return got


def test_stochastic_rounding_has_the_same_bits_in_every_placement(tmp_path):
    resident = without_masters(tmp_path)
    for device, fraction in (("cpu", 1.0), (SimBackend(), 0.0), (SimBackend(), 0.4)):
        assert torch.equal(without_masters(tmp_path, device, fraction), resident)
    assert torch.equal(without_masters(tmp_path, "cpu", 1.0, block_numel=1024), resident)
    assert not torch.equal(without_masters(tmp_path, seed=4), resident)


def test_stochastic_rounding_follows_fp32_masters_where_nearest_stands_still(tmp_path):
    """Updates far below half a bf16 step: rounding to nearest would lose all of them."""

    def one_weight(**options):
        module = nn.Linear(256, 16, bias=False)
        nn.init.constant_(module.weight, 1.0)
        model = GeminiDDP(module, **options)
        optimizer = HybridSGD(model.parameters(), lr=2.0**-12)
        for _ in range(32):
            model(torch.ones(1, 256)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()["weight"]

    want = 1 - 32 * 2.0**-12
    assert torch.equal(one_weight(), torch.full((16, 256), want))
    got = one_weight(master_weights=False)
    # each step moves down by 2**-8 one time in 16: mean of 4096, deviation 0.0215 / 64 a weight
    assert abs(float(got.double().mean()) - want) < 5 * 2**-8 * (32 / 16) ** 0.5 / 64
    assert got.unique().numel() > 3


@pytest.mark.ci
def test_the_triton_path_rounds_by_the_same_noise(tmp_path):
    """Not the same bits: Adam's two paths differ by ulps, and a draw turns on one once in a while.

    With other noise the error would be that of two seeds, which is measured beside it.
    """
    start = flat(list(Tower().parameters()))
    cpu = without_masters(tmp_path, batches=3)
    triton = without_masters(tmp_path, SimBackend(updates_by_triton=True), batches=3)
    other = without_masters(tmp_path, seed=4, batches=3)
    assert relative_error(triton - start, cpu - start) < 0.05
    assert relative_error(other - start, cpu - start) > 0.1


# -- Colossal's names ----------------------------------------------------------------------------


def test_gemini_optimizers_set_the_scale_and_the_norm_of_their_module():
    model = GeminiDDP(Tower(), precision="fp16", **SMALL)
    inner = HybridAdam(model.parameters(), **ADAM)
    optimizer = GeminiOptimizer(inner, model, initial_scale=2.0**8, max_norm=0.3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    (batch,) = token_batches(1, 1)
    optimizer.backward(token_loss(model, batch[0]))
    optimizer.step()
    schedule.step()
    assert inner.last_report.loss_scale == 2.0**8 and calls == ["post"]
    assert inner.param_groups[0]["lr"] == 0.5e-2

    same = GeminiDDP(Tower(), precision="fp16", **SMALL)
    adam = GeminiAdamOptimizer(same, initial_scale=2.0**8, max_norm=0.3, **ADAM)
    train(same, adam, [batch])
    assert torch.equal(weights(same), weights(model))


def test_gemini_optimizers_refuse_what_they_cannot_set():
    model = GeminiDDP(Tower(), **SMALL)
    with pytest.raises(ValueError, match="loss_scale is for precision"):
        GeminiAdamOptimizer(model, initial_scale=8.0)
    model = GeminiDDP(Tower(), **SMALL)
    with pytest.raises(ValueError, match="expected one of this project's"):
        GeminiOptimizer(torch.optim.AdamW(Tower().parameters()), model)
    with pytest.raises(ValueError, match="not over the parameters of that module"):
        GeminiOptimizer(HybridAdam(Tower().parameters()), model)
    with pytest.raises(ValueError, match="wrap it first"):
        GeminiAdamOptimizer(Tower())
    with pytest.raises(TypeError, match="initial_sale"):
        GeminiOptimizer(HybridAdam(model.parameters()), model, initial_sale=8.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"loss_scale": LossScale()}, "loss_scale is for precision"),
        ({"loss_scale": LossScale(), "precision": "fp32"}, "loss_scale is for precision"),
        ({"master_weights": False, "precision": "fp16"}, "master_weights=False is for"),
        ({"rounding_seed": 3}, "rounding_seed does nothing"),
        ({"rounding_seed": -1, "master_weights": False}, "rounding_seed=-1"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore'"),
        ({"max_norm": float("nan")}, "max_norm=nan"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, said):
    module = Tower()
    with pytest.raises(ValueError, match=said):
        GeminiDDP(module, **options)
    assert type(module.embed.weight) is nn.Parameter


def test_the_compiled_cpu_path_refuses_to_round_at_random():
    model = GeminiDDP(Tower(), master_weights=False)
    with pytest.raises(ValueError, match='cpu_path="compile"'):
        HybridAdam(model.parameters(), cpu_path="compile")


# -- spectral norms ------------------------------------------------------------------------------


class Spectral(nn.Module):
    def __init__(self, normed):
        super().__init__()
        with seeded():
            self.body = nn.Sequential(normed(nn.Linear(8, 16)), nn.Tanh())
            self.head = normed(nn.Linear(16, 4))

    def forward(self, x):
        return self.head(self.body(x)).float().square().mean()


@pytest.mark.parametrize("normed", [nn.utils.spectral_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_spectral_norms_are_torchs_of_that_precision(normed, precision):
    """Their vectors have the dtype of the weights that they are multiplied with; bit for bit."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    plain, x = Spectral(normed).to(dtype), torch.linspace(-1, 1, 40).view(5, 8)
    options = {"loss_scale": 1.0} if precision == "fp16" else {}
    model = GeminiDDP(Spectral(normed), precision=precision, **options, **SMALL)
    optimizer = HybridSGD(model.parameters(), lr=0.1)
    for _ in range(2):
        got, want = model(x), plain(x.to(dtype))
        assert torch.equal(got, want)
        got.backward()
        want.backward()
    grads = dict(plain.named_parameters())
    for name, grad in model.named_gradients():  # ours are summed in fp32
        assert relative_error(grad, grads[name].grad.float()) < 2 * torch.finfo(dtype).eps, name
    optimizer.step()
    model.eval()
    assert torch.isfinite(model(x))
    assert {buffer.dtype for buffer in model.unwrap().buffers()} == {torch.float32}


def test_a_spectral_norm_that_stays_in_fp32_does_with_its_vectors():
    module = Spectral(nn.utils.spectral_norm)
    model = GeminiDDP(module, keep_fp32=lambda name, _: name == "head", **SMALL)
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert dtypes["head.weight_u"] == dtypes["head.weight_v"] == torch.float32
    assert dtypes["body.0.weight_u"] == torch.bfloat16
    model(torch.ones(2, 8)).backward()
