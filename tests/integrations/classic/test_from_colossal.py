"""docs/from-colossal.md: every right-hand side is there, with the signature that users know."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[3]
ROW = re.compile(r"^\| `(colossalai[\w.]*)` \| `(gemini[\w.]*)` \|$", re.MULTILINE)
TABLE = dict(ROW.findall((ROOT / "docs/from-colossal.md").read_text()))
WRITTEN = re.findall(
    r"^\| `\w+ = .+` \| `(\w+ = .+)` \|$",
    (ROOT / "docs/from-colossal.md").read_text(),
    re.MULTILINE,
)
SCALE = (
    "min_scale=1, growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, "
    "max_scale=4294967296"
)
# as Colossal-AI's documents print them: names and defaults, in order
SIGNATURES = {
    "colossalai.booster.Booster": "device=None, mixed_precision=None, plugin=None",
    "colossalai.booster.plugin.GeminiPlugin": (
        "chunk_config_dict=None, chunk_init_device=None, placement_policy='static', "
        "enable_gradient_accumulation=False, max_prefetch=0, shard_param_frac=1.0, "
        "offload_optim_frac=0.0, offload_param_frac=0.0, warmup_non_model_data_ratio=0.8, "
        "steady_cuda_cap_ratio=0.9, precision='fp16', master_weights=True, pin_memory=False, "
        "force_outputs_fp32=False, strict_ddp_mode=False, search_range_m=32, hidden_dim=None, "
        "min_chunk_size_m=32, memstats=None, gpu_margin_mem_ratio=0.0, initial_scale=65536, "
        f"{SCALE}, max_norm=0.0, norm_type=2.0, tp_size=1, extra_dp_size=1, "
        "enable_all_optimization=False, enable_fused_normalization=False, "
        "enable_flash_attention=False, enable_sequence_parallelism=False, enable_jit_fused=False, "
        "enable_sequence_overlap=False, enable_async_reduce=True, use_fp8=False, verbose=False, "
        "fp8_communication=False"
    ),
    "colossalai.booster.plugin.LowLevelZeroPlugin": (
        f"stage=1, precision='fp16', initial_scale=4294967296, {SCALE}, max_norm=0.0, "
        "norm_type=2.0, reduce_bucket_size_in_m=12, communication_dtype=None, "
        "overlap_communication=True, overlap_allgather=False, cpu_offload=False, "
        "master_weights=True, verbose=False, cast_inputs=True, fp8_communication=False, "
        "use_fp8=False"
    ),
    "colossalai.booster.plugin.TorchDDPPlugin": (
        "broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False, "
        "check_reduction=False, gradient_as_bucket_view=False, static_graph=False, "
        "fp8_communication=False"
    ),
    "colossalai.booster.plugin.TorchFSDPPlugin": (
        "process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None, "
        "backward_prefetch=None, mixed_precision=None, ignored_modules=None, param_init_fn=None, "
        "sync_module_states=False, fp8_communication=False"
    ),
    "colossalai.booster.plugin.HybridParallelPlugin": (
        "tp_size, pp_size, sp_size=None, precision='fp16', zero_stage=0, "
        "enable_all_optimization=False, enable_fused_normalization=False, "
        "enable_flash_attention=False, enable_jit_fused=False, enable_sequence_parallelism=False, "
        "sequence_parallelism_mode=None, enable_sequence_overlap=False, parallel_output=True, "
        f"num_microbatches=None, microbatch_size=None, initial_scale=65536, {SCALE}, max_norm=0, "
        "broadcast_buffers=True, ddp_bucket_cap_mb=25, find_unused_parameters=False, "
        "check_reduction=False, gradient_as_bucket_view=False, static_graph=False, "
        "zero_bucket_size_in_m=12, cpu_offload=False, communication_dtype=None, "
        "overlap_communication=True, custom_policy=None, pp_style='1f1b', num_model_chunks=1, "
        "num_layers_per_stage=None, gradient_checkpoint_config=None, enable_metadata_cache=True, "
        "make_vocab_size_divisible_by=64, dp_outside=True, overlap_p2p=True, "
        "overlap_allgather=False, fp8_communication=False, use_fp8=False, inner_ring_size=None"
    ),
    "colossalai.booster.mixed_precision.FP16TorchMixedPrecision": (
        "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000"
    ),
    "colossalai.zero.zero_model_wrapper": (
        "model, zero_stage=1, gemini_config=None, verbose=False"
    ),
    "colossalai.zero.zero_optim_wrapper": (
        "model, optimizer, initial_scale=65536, growth_factor=2, backoff_factor=0.5, "
        "growth_interval=1000, hysteresis=2, min_scale=1, max_scale=4294967296, max_norm=0.0, "
        "norm_type=2.0, optim_config=None, verbose=False"
    ),
    "colossalai.zero.get_static_torch_model": (
        "zero_ddp_model, device='cpu', dtype='float32', only_rank_0=True"
    ),
    "colossalai.zero.sharded_model.ShardedModelV2": (
        "module, shard_strategy, process_group=None, reduce_scatter_process_group=None, "
        "reduce_scatter_bucket_size_mb=25, fp32_reduce_scatter=False, offload_config=None, "
        "gradient_predivide_factor=1.0, use_memory_tracer=False, reuse_fp16_shard=False"
    ),
    "colossalai.zero.sharded_model.reduce_scatter.ReduceScatterBucketer": "bucket_size_mb=25",
    "colossalai.zero.sharded_model.utils.col_model_deepcopy": "sharded_model, other_model",
    "colossalai.nn.lr_scheduler.CosineAnnealingWarmupLR": (
        "optimizer, total_steps, warmup_steps=0, eta_min=0.0, last_epoch=-1"
    ),
    "colossalai.nn.lr_scheduler.LinearWarmupLR": (
        "optimizer, total_steps, warmup_steps=0, last_epoch=-1"
    ),
}  # fmt: skip
COUNTS = {
    "colossalai.booster.plugin.GeminiPlugin": 41,
    "colossalai.booster.plugin.HybridParallelPlugin": 46,
}


def found_at(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", TABLE)
def test_every_right_hand_side_is_there(name):
    there = found_at(TABLE[name])
    assert there.__doc__, f"{TABLE[name]} does not say what it is"
    assert name.rpartition(".")[2] in (TABLE[name].rpartition(".")[2], "MemStats")


LINES = (
    "save_checkpoint('xxx.pt', epoch, model)",
    "assert load_checkpoint('xxx.pt', model) == epoch",
    "save_checkpoint('all.pt', epoch, model, optimizer, lr_scheduler)",
    "assert load_checkpoint('all.pt', model, optimizer, lr_scheduler) == epoch",
    "assert ChunkManager.search_chunk_size(model, 64 * 1024**2, 32)",
    *WRITTEN,
)


def test_lines_of_old_documents_run(tmp_path, monkeypatch):
    """And what the page says to write in place of those that do not."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "model": model, "optimizer": optimizer, "epoch": 3, "device": torch.device("cpu"),
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }  # fmt: skip
    names |= {name.rpartition(".")[2]: found_at(place) for name, place in TABLE.items()}
    assert WRITTEN
    for line in LINES:
        exec(line, names)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_that_users_know(name):
    shown = inspect.signature(found_at(TABLE[name])).parameters.values()
    ours = [
        p.name if p.default is p.empty else f"{p.name}={_plain(p.default)!r}" for p in shown
    ]  # fmt: skip
    theirs = [_normal(part) for part in SIGNATURES[name].split(", ")]
    assert ours == theirs
    assert len(ours) == COUNTS.get(name, len(ours))


def _plain(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _normal(part):
    name, given, default = part.partition("=")
    return f"{name}={_plain(ast.literal_eval(default))!r}" if given else name


def test_the_engine_imports_no_door():
    """Read from the source, so that no import inside a function is missed."""
    packages = ("gemini", "optim", "io", "kernels_triton")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    doors, above = ROOT / "gemini/integrations", ROOT / "gemini/train"  # a run, over Trainer's door
    checked = 0
    for path in paths:
        if {doors, above} & {*path.parents} or path == ROOT / "gemini/__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            assert not any("integrations" in name for name in names), path
            checked += bool(names)
    assert checked > 500
    for path in doors.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, path


def test_optional_packages_are_imported_by_their_own_file_alone():
    """Only where they are used, so that no other door asks for them."""
    own = {
        "peft": {"plugins/lora.py", "adapters.py"},
        "safetensors": {"adapters.py", "plugins/lora.py"},
        "accelerate": {"accelerate.py"},
        "transformers": {"transformers.py"},
        "trl": set(),
    }
    doors = ROOT / "gemini/integrations"
    for path in doors.rglob("*.py"):
        name = str(path.relative_to(doors))
        tops = {module.partition(".")[0] for module in _imported(path)}
        for package, allowed in own.items():
            assert package not in tops or name in allowed, path
        assert "lightning" not in tops or name.startswith("lightning/"), path
        assert "pytorch_lightning" not in tops, path


def _imported(path):
    """Modules that a file imports, wherever in it; none that is relative."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_lora_without_peft_names_the_extra(monkeypatch):
    from gemini.integrations import Booster

    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install peft"):
        Booster().enable_lora(nn.Linear(2, 2), lora_config=object())
    assert 'lora = ["peft>=' in (ROOT / "pyproject.toml").read_text()
