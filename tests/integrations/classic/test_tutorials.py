"""The loops of Colossal-AI's tutorials, line by line, with their imports changed.

Only what no machine has is replaced: data that is downloaded, and the move to a GPU.
"""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from gemini.integrations import Booster, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.integrations.classic import (
    ColoInitContext,
    CPUAdam,
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiManager,
    HybridAdam,
    ReduceScatterBucketer,
    ShardedModelV2,
    ShardedOptimizerV2,
    ZeroDDP,
    get_current_device,
    init_chunk_manager,
    zero_model_wrapper,
    zero_optim_wrapper,
)
from gemini.integrations.launch import (
    get_default_parser,
    get_dist_logger,
    launch,
    launch_from_torch,
    priority_execution,
)
from gemini.integrations.plugins.precision import FP16TorchMixedPrecision
from gemini.integrations.schedules import CosineAnnealingLR
from optim.base import TieredOptimizer
from tests.support.ports import free_port

transformers = pytest.importorskip("transformers")
FEATURES = 12
pytestmark = pytest.mark.usefixtures("elsewhere")  # launched as the tutorials do


def resnet18(num_classes=10):
    """As torchvision's, in small: convolutions, norms, a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, num_classes),
    )  # fmt: skip


def images(count=40):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, 3, 8, 8), torch.randint(0, 10, (count,)))


@pytest.mark.parametrize("plugin_of", [LowLevelZeroPlugin, GeminiPlugin, TorchDDPPlugin])
def test_plugins(plugin_of):
    """ "Booster plugins", whose boost has its arguments in another order than boost has."""
    launch_from_torch({})
    model, train_dataset = resnet18(), images()
    optimizer, criterion = HybridAdam(model.parameters()), nn.CrossEntropyLoss()
    plugin = plugin_of()

    train_dataloader = plugin.prepare_dataloader(train_dataset, batch_size=8)
    booster = Booster(plugin=plugin)
    with pytest.raises(TypeError, match="criterion is a DataLoader; write dataloader="):
        booster.boost(model, optimizer, train_dataloader, criterion)
    model, optimizer, criterion, train_dataloader, _ = booster.boost(
        model, optimizer, criterion, dataloader=train_dataloader
    )
    for image, label in train_dataloader:
        booster.backward(criterion(model(image).float(), label), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("use_safetensors", [True, False])
def test_booster_api(use_safetensors):
    """ "Booster API": a scheduler that was made before, a clip, a sharded save, a plain load."""
    launch(config={}, rank=0, world_size=1, port=free_port(), host="localhost")
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    model = resnet18()
    criterion = lambda x: x.mean()  # noqa: E731
    optimizer = SGD((model.parameters()), lr=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    model, optimizer, criterion, _, scheduler = booster.boost(
        model, optimizer, criterion, lr_scheduler=scheduler
    )

    x = torch.randn(4, 3, 224, 224)
    output = model(x)
    loss = criterion(output)
    booster.backward(loss, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)

    save_path = "./model"
    booster.save_model(model, save_path, True, True, "", 10, use_safetensors=use_safetensors)

    new_model = resnet18()
    booster.load_model(new_model, save_path)
    for name, value in model.module.state_dict().items():
        assert torch.equal(new_model.state_dict()[name], value)


def test_gemini_by_booster():
    """ "Gemini": a module of the init context, the old policy, clipping, a loss scale."""
    plugin = GeminiPlugin(
        placement_policy="cuda", strict_ddp_mode=True, max_norm=1.0, initial_scale=2**5
    )
    booster = Booster(plugin=plugin)
    ctx = ColoInitContext()
    with ctx:
        model = resnet18()
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    criterion = lambda x: x.mean()  # noqa: E731
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion)
    booster.backward(criterion(model(torch.randn(4, 3, 8, 8))), optimizer)
    optimizer.step()
    assert not optimizer.last_report.skipped and optimizer.last_report.grad_norm > 0


def test_gradient_accumulation():
    """Parameters change with the last of four micro-batches alone."""
    BATCH_SIZE, GRADIENT_ACCUMULATION = 8, 4
    parser = get_default_parser()
    parser.parse_args([])
    launch_from_torch(config={})
    model = resnet18(num_classes=10)
    with priority_execution():
        train_dataset = images()
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    train_dataloader = plugin.prepare_dataloader(
        train_dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
    )
    model, optimizer, criterion, train_dataloader, _ = booster.boost(
        model=model, optimizer=optimizer, criterion=criterion, dataloader=train_dataloader
    )
    optimizer.zero_grad()
    param_by_iter = []
    for idx, (img, label) in enumerate(train_dataloader):
        sync_context = booster.no_sync(model)
        if (idx + 1) % GRADIENT_ACCUMULATION != 0:  # theirs steps at the first one too
            with sync_context:
                output = model(img)
                train_loss = criterion(output, label)
                booster.backward(train_loss, optimizer)
        else:
            output = model(img)
            train_loss = criterion(output, label)
            booster.backward(train_loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        ele_1st = next(model.parameters()).flatten()[0]
        param_by_iter.append(str(ele_1st.item()))
        if idx + 1 == GRADIENT_ACCUMULATION:
            break
    assert param_by_iter[0] == param_by_iter[2] != param_by_iter[3]


@pytest.mark.parametrize("custom", [False, True])
def test_gradient_clipping_and_mixed_precision(custom):
    """ "Gradient clipping" and "AMP": fp16 by name or by object under DDP, `model.zero_grad()`."""
    NUM_EPOCHS, BATCH_SIZE, GRADIENT_CLIPPING = 200, 8, 0.1
    launch_from_torch(config={})
    logger = get_dist_logger()
    model = resnet18(num_classes=10)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=NUM_EPOCHS)

    plugin = TorchDDPPlugin()
    mixed_precision = "fp16"
    if custom:
        mixed_precision = FP16TorchMixedPrecision(
            init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
        )
    booster = Booster(mixed_precision=mixed_precision, plugin=plugin)
    train_dataloader = plugin.prepare_dataloader(
        images(), batch_size=BATCH_SIZE, shuffle=True, drop_last=True
    )
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion, train_dataloader, lr_scheduler
    )
    before = next(model.parameters()).detach().clone()
    model.train()
    for idx, (img, label) in enumerate(train_dataloader):
        model.zero_grad()
        output = model(img)
        train_loss = criterion(output, label)
        booster.backward(train_loss, optimizer)
        optimizer.clip_grad_by_norm(max_norm=GRADIENT_CLIPPING)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert norm <= GRADIENT_CLIPPING * 1.001
        optimizer.step()
        lr_scheduler.step()
        ele_1st = next(model.parameters()).flatten()[0]
        logger.info(f"iteration {idx}, loss: {train_loss}, 1st element: {ele_1st.item()}")
        if idx == 3:
            break
    assert not torch.equal(before, next(model.parameters()))


def gpt(**options):
    return transformers.GPT2Config(
        n_layer=2, n_embd=FEATURES, n_head=2, vocab_size=61, n_positions=32, **options
    )


def get_data(batch_size, seq_len, vocab_size):
    ids = torch.randint(0, vocab_size, (batch_size, seq_len))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class GPTLMLoss(nn.Module):
    def forward(self, logits, labels):
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        )


@pytest.mark.parametrize("adam", [HybridAdam, CPUAdam])
def test_nvme_offload_on_a_cpu(adam):
    """`train_cpu`: the same losses with and without files."""
    losses = {}
    for nvme_offload_fraction in (0.0, 1.0):
        torch.manual_seed(123)
        config = gpt()
        model = transformers.GPT2LMHeadModel(config)
        criterion = GPTLMLoss()
        optimizer = adam(
            model.parameters(),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir="./" if nvme_offload_fraction else None,
        )
        losses[nvme_offload_fraction] = []
        for _ in range(3):
            data = get_data(4, 16, config.vocab_size)
            outputs = model(**data)
            loss = criterion(outputs.logits, data["input_ids"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[nvme_offload_fraction].append(loss.item())
        optimizer.close()
    assert losses[0.0] == losses[1.0]


def test_nvme_offload_with_gemini_by_the_wrappers():
    """`train_gemini_cpu`: losses are identical with the state in files."""
    losses = {}
    for nvme_offload_fraction in (0.0, 1.0):
        launch_from_torch({})
        torch.manual_seed(123)
        config = gpt()
        with ColoInitContext(device=get_current_device()):
            model = transformers.GPT2LMHeadModel(config)
        criterion = GPTLMLoss()
        optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=nvme_offload_fraction)
        gemini_config = {
            "strict_ddp_mode": True, "device": get_current_device(), "placement_policy": "cpu",
            "pin_memory": True, "hidden_dim": config.n_embd,
        }  # fmt: skip
        model = zero_model_wrapper(model, zero_stage=3, gemini_config=gemini_config)
        optimizer = zero_optim_wrapper(model, optimizer, initial_scale=2**5)
        torch.manual_seed(5)
        losses[nvme_offload_fraction] = []
        for _ in range(3):
            data = get_data(4, 16, config.vocab_size)
            outputs = model(**data)
            loss = criterion(outputs.logits, data["input_ids"])
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[nvme_offload_fraction].append(loss.item())
        optimizer.close()
    assert losses[0.0] == losses[1.0] and losses[0.0][0] != losses[0.0][2]


@pytest.mark.parametrize("by", ["GeminiDDP", "ZeroDDP"])
def test_zero_with_chunks(by):
    """ "ZeRO with chunks": searched chunks or the wrapper alone, and GeminiAdamOptimizer."""
    launch_from_torch({})
    PLACEMENT_POLICY = "auto"
    with ColoInitContext(device="cpu", default_dist_spec=None, default_pg=None):
        model = transformers.GPT2LMHeadModel(gpt())
    if by == "ZeroDDP":
        chunk_manager = init_chunk_manager(
            model=model, init_device=get_current_device(), hidden_dim=FEATURES,
            search_range_mb=32, min_chunk_size_mb=32,
        )  # fmt: skip
        gemini_manager = GeminiManager(PLACEMENT_POLICY, chunk_manager)
        model = ZeroDDP(model, gemini_manager)
    else:
        model = GeminiDDP(
            model, device=get_current_device(), placement_policy=PLACEMENT_POLICY,
            pin_memory=True, search_range_mb=32,
        )  # fmt: skip
    criterion = GPTLMLoss()
    optimizer = GeminiAdamOptimizer(model, lr=1e-3, initial_scale=2**5)
    data = get_data(2, 16, 61)
    optimizer.zero_grad()
    outputs = model(data["input_ids"], attention_mask=data["attention_mask"])
    loss = criterion(outputs.logits, data["input_ids"])
    optimizer.backward(loss)
    optimizer.step()
    assert not optimizer.last_report.skipped


def test_sharded_model_v2_and_its_bucketer(tmp_path):
    launch_from_torch({})
    model = ShardedModelV2(transformers.GPT2LMHeadModel(gpt()), shard_strategy=None)
    optimizer = ShardedOptimizerV2(model, CPUAdam(model.parameters()), initial_scale=2**5)
    assert isinstance(optimizer, TieredOptimizer)
    try:
        while True:
            optimizer.backward(model(**get_data(2, 16, 61)).logits.float().mean())
            optimizer.step()
            raise MemoryError
    except Exception:
        model.dump_memory_stats()
    assert (tmp_path / "dump_mem_stats.log").stat().st_size > 100

    printed, print = [], lambda text: printed.append(text)
    small_tensors, big_tensors = [torch.ones(3)], [torch.ones(25 * 2**18 + 1)]
    more_small_tensors = [torch.ones(5)]
    bucketer = ReduceScatterBucketer()
    bucketer.reduce_scatter_async(small_tensors, callback_fn=lambda result: print("small"))
    bucketer.reduce_scatter_async(big_tensors, callback_fn=lambda result: print("big"))
    bucketer.reduce_scatter_async(more_small_tensors, callback_fn=lambda result: print("small2"))
    bucketer.flush()
    assert printed == ["big", "small", "small2"]
