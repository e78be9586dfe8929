"""Traces: what they record, on fake tensors and on real ones."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.shared.models import Tower, token_loss
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from gemini.chunk.layout import ChunkLayout, specs_of
from gemini.memtracer.collector import MemStatsCollector, Moments, input_signature, listening, trace
from gemini.memtracer.monitor import CudaMonitor, StorageTracker
from gemini.memtracer.trace import Trace, TraceError, model_digest, reduce_traces
from tests.support.lines import made, step

IDS = torch.zeros(4, 9, dtype=torch.int64)


class Layers(nn.Module):
    """Linear layers without bias that save exactly their inputs."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def by_id(model, ids):
    tensors = {ids[name]: param for name, param in model.named_parameters()}
    return [tensors[i] for i in range(len(tensors))]


def events(found):
    return [(m.phase, m.edge, m.module) for m in found.moments]


def untimed(found):
    return [replace(m, seconds=0.0) for m in found.moments]


def test_storages_count_from_their_operator_until_the_last_tensor_dies():
    tracker = StorageTracker()
    outside = torch.ones(1000)
    tracker.start()
    a = torch.ones(1000)
    view = a[10:20]
    b = a * 2
    assert tracker.live_bytes == 8000
    del a, b
    assert tracker.live_bytes == 4000  # the view keeps its storage
    assert outside.numel() == 1000
    del view
    assert tracker.live_bytes == 0
    assert tracker.period() == 8000 and tracker.period() == 0
    c = torch.zeros(10)
    tracker.ignore([c])
    assert tracker.live_bytes == 0
    c.add_(1)
    assert tracker.live_bytes == 0
    tracker.stop()


def test_forward_and_backward_are_traced_module_by_module():
    found = trace(Layers(), (torch.ones(5, 64, requires_grad=True),), precision="fp32")
    names = [f"layers.{i}" for i in range(3)]
    forward = [("forward", edge, n) for n in names for edge in ("enter", "leave")]
    # a module is entered by the gradient that ends the one behind it
    backward = [("enter", 2), ("enter", 1), ("leave", 2), ("enter", 0), ("leave", 1), ("leave", 0)]
    assert events(found) == forward + [("backward", edge, names[i]) for edge, i in backward]
    assert [m.params for m in found.moments[:6:2]] == [(0,), (1,), (2,)]


def test_activations_of_linear_layers_are_their_outputs():
    found = trace(Layers(), (torch.ones(5, 64),), precision="fp32")
    out, weight = 5 * 64 * 4, 64 * 64 * 4
    entered = {(m.phase, m.module): m.non_model_bytes for m in found.moments if m.edge == "enter"}
    assert [entered["forward", f"layers.{i}"] for i in range(3)] == [out, 2 * out, 3 * out]
    # gradient of the output and of the weight; the last layer's output is already gone
    small = 2 * 4  # the sum, and its gradient
    last = entered["backward", "layers.2"]
    assert 3 * out + weight <= last <= 4 * out + weight + small


def test_fake_and_real_tensors_have_the_same_trace():
    model = Tower()
    fake = trace(model, (IDS,), loss=lambda logits: logits.float().sum(), precision="fp32")
    specs = specs_of(model, "float32")
    tracker = StorageTracker()
    tracker.ignore([*model.parameters(), IDS])
    collector = MemStatsCollector(specs, [tracker])
    ids = {n: i for i, s in enumerate(specs) for n in (s.name, *s.aliases)}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    collector.begin("train", input_signature((IDS,)))
    with listening(model, by_id(model, ids), ids, Moments(collector)):
        outputs = model(IDS)
        outputs.float().sum().backward()
        del outputs
    real = collector.end()
    assert real.deviation_of(fake) is None
    assert real.digest() == fake.digest()
    assert untimed(real) == untimed(fake)


def test_trace_made_ahead_says_nothing_of_time():
    assert not any(moment.seconds for moment in trace(Tower(), (IDS,)).moments)


def test_trace_leaves_the_module_alone_and_takes_meta_modules():
    model = Tower()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    here = trace(model, (IDS,))
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    token_loss(model, IDS).backward()
    with torch.device("meta"):
        meta = Tower()
    assert untimed(trace(meta, (IDS,))) == untimed(here)


def test_trace_orders_a_layout_by_first_use():
    class Reversed(Layers):
        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    model = Reversed()
    specs = specs_of(model, "bfloat16")
    order = trace(model, (torch.ones(5, 64),)).param_order(specs)
    layout = ChunkLayout.build(specs, 64 * 64, order=order)
    assert [chunk.slots[0].param for chunk in layout.chunks] == [2, 1, 0]


def test_tied_parameter_is_one_id_that_both_modules_need():
    found = trace(Tower(), (IDS,))
    first, last = found.moments[0], [m for m in found.moments if m.phase == "forward"][-1]
    assert (first.module, last.module) == ("embed", "head")
    assert first.params == last.params == (0,)


def test_checkpointed_modules_are_entered_again_in_backward():
    class Checkpointed(Layers):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    found = trace(Checkpointed(), (torch.ones(5, 64, requires_grad=True),))
    entered = Counter(m.phase for m in found.moments if m.edge == "enter")
    assert entered == {"forward": 3, "backward": 6}


def test_larger_batch_needs_more_and_evaluation_less():
    small = trace(Layers(), (torch.ones(5, 64),)).peak_non_model_bytes
    large = trace(Layers(), (torch.ones(50, 64),)).peak_non_model_bytes
    evaluation = trace(Layers(), (torch.ones(50, 64),), kind="eval")
    assert small < large
    assert evaluation.peak_non_model_bytes == 2 * 50 * 64 * 2 < large  # of one layer, in and out
    assert {m.phase for m in evaluation.moments} == {"forward"}


def test_trace_survives_its_file(tmp_path):
    found = trace(Tower(), (IDS,))
    found.save(tmp_path / "t.json")
    assert Trace.load(tmp_path / "t.json") == found == Trace.from_json(found.to_json())
    (tmp_path / "t.json").write_text('{"format": 1}', encoding="utf-8")
    with pytest.raises(TraceError, match="damaged"):
        Trace.load(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b"\x80")
    with pytest.raises(TraceError, match="no trace"):
        Trace.load(tmp_path / "t.json")


DAMAGED = {  # path into the JSON, value that must not be there, and what the error says
    "kind": (("kind",), "test", "kind is 'test'; expected one of"),
    "no moments": (("moments",), {}, "moments is {}; expected a list"),
    "signature": (("signature",), 3, "signature is 3; expected text"),
    "digest": (("model_digest",), None, "model_digest is None; expected text"),
    "moment": (("moments", 1), 7, "moment 1: it is 7; expected an object"),
    "phase": (("moments", 1, "phase"), "sideways", "moment 1: phase is 'sideways'; expected one"),
    "edge": (("moments", 0, "edge"), None, "moment 0: edge is None; expected one"),
    "module": (("moments", 0, "module"), ["m"], "moment 0: module is"),
    "params": (("moments", 0, "params"), "0", "moment 0: params is '0'; expected a list"),
    "negative param": (("moments", 0, "params"), [-1], "moment 0: a parameter is -1; expected"),
    "param of another type": (("moments", 0, "params"), [0.5], "a parameter is 0.5; expected"),
    "negative bytes": (("moments", 2, "non_model_bytes"), -1, "non_model_bytes is -1; expected"),
    "bytes of another type": (("moments", 2, "non_model_bytes"), True, "is True; expected"),
    "no machine has as much": (
        ("moments", 2, "non_model_bytes"),
        1 << 61,
        "whole number from 0 to",
    ),
    "more saved than there is": (
        ("moments", 2, "saved_bytes"),
        1 << 40,
        "moment 2: saved_bytes is 1099511627776; expected a whole number from 0 to",
    ),
    "seconds": (("moments", 2, "seconds"), float("nan"), "seconds is nan; expected"),
    "negative seconds": (("moments", 2, "seconds"), -1.0, "seconds is -1.0; expected"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_trace_is_refused_with_words(name):
    data = json.loads(json.dumps(trace(Tower(), (IDS,)).to_json()))
    assert Trace.from_json(data)
    (*path, last), value, words = DAMAGED[name]
    place = data
    for key in path:
        place = place[key]
    place[last] = value
    with pytest.raises(TraceError, match="this trace is damaged: .*" + re.escape(words)):
        Trace.from_json(data)


def test_a_trace_of_the_format_before_knows_nothing_of_saved_bytes():
    found = trace(Layers(256), (torch.ones(600, 256),))
    data = json.loads(json.dumps(found.to_json()))
    assert found.peak_saved_bytes and Trace.from_json(data) == found
    for moment in data["moments"]:
        del moment["saved_bytes"]
    with pytest.raises(TraceError, match="damaged: moment 0: it has no saved_bytes"):
        Trace.from_json(data)
    data["format"] = 1
    old = Trace.from_json(data)
    assert not old.peak_saved_bytes and old.digest() == found.digest()
    assert [m.non_model_bytes for m in old.moments] == [m.non_model_bytes for m in found.moments]
    data["format"] = 3
    with pytest.raises(TraceError, match="no trace of format 2: found 3"):
        Trace.from_json(data)


@pytest.mark.parametrize("key", ["kind", "moments", "signature", "model_digest"])
def test_a_trace_without_a_field_is_refused_with_its_name(key):
    data = json.loads(json.dumps(trace(Tower(), (IDS,)).to_json()))
    del data[key]
    with pytest.raises(TraceError, match=f"this trace is damaged: it has no {key}"):
        Trace.from_json(data)


def test_a_trace_that_names_parameters_the_model_has_not_is_refused():
    found = trace(Tower(), (IDS,))
    moments = (replace(found.moments[0], params=(0, 10_000)), *found.moments[1:])
    with pytest.raises(TraceError, match=r"moment 0 .* parameter 10000, and this model has"):
        GeminiDDP(Tower(), trace=replace(found, moments=moments))


def test_trace_of_another_model_is_refused():
    found = trace(Tower(), (IDS,))
    specs = specs_of(Tower(), "bfloat16")
    found.check_model(specs)
    others = specs_of(Layers(), "bfloat16")
    with pytest.raises(TraceError, match="another model"):
        found.check_model(others)
    assert model_digest(specs) != model_digest(others)


def test_iteration_that_differs_is_noted_and_becomes_the_trace(tmp_path, caplog):
    model = Layers()
    specs = specs_of(model, "float32")
    collector = MemStatsCollector(specs, [])
    ids = {s.name: i for i, s in enumerate(specs)}
    inputs = torch.ones(5, 64)

    def run(signature=""):
        collector.begin("train", signature)
        with listening(model, by_id(model, ids), ids, Moments(collector)):
            model(inputs).sum().backward()
        return collector.end()

    run()
    run()
    run("another signature")
    assert collector.deviations == [] and len(collector.traces) == 2
    dropped, model.layers = model.layers, model.layers[:2]
    model.layers.append(nn.Identity())
    found = run()
    assert dropped is not model.layers
    assert [str(d) for d in collector.deviations] == [
        "moment 4: expected forward enter of layers.2, found backward enter of layers.1"
    ]
    assert "planned anew" in caplog.text
    assert collector.traces["train", ""] == found
    collector.dump_memory_stats(tmp_path / "stats.json")
    assert "layers.2" in (tmp_path / "stats.json").read_text(encoding="utf-8")


def test_ranks_traces_are_reduced_to_the_most_of_each_period():
    one = trace(Layers(), (torch.ones(5, 64),))
    two = trace(Layers(), (torch.ones(5, 64),))
    moments = list(two.moments)
    moments[2] = replace(moments[2], non_model_bytes=10**9, seconds=5.0)
    both = reduce_traces([one, replace(two, moments=tuple(moments))])
    assert both.moments[2].non_model_bytes == 10**9 and both.moments[2].seconds == 5.0
    assert both.moments[1].non_model_bytes == one.moments[1].non_model_bytes
    other = replace(two, moments=tuple(moments[:-1]))
    with pytest.raises(TraceError, match="rank 1 ran another sequence"):
        reduce_traces([one, other])


def test_bytes_saved_and_the_rest_are_reduced_apart():
    one = trace(Layers(256), (torch.ones(600, 256),))
    moments = [replace(m, saved_bytes=0) for m in one.moments]
    both = reduce_traces([one, replace(one, moments=tuple(moments))])
    for mine, of_both in zip(one.moments, both.moments, strict=True):
        assert of_both.saved_bytes == mine.saved_bytes
        assert of_both.rest_bytes == mine.non_model_bytes


def test_saved_bytes_are_storages_that_are_there_all_through_a_period():
    """A layer saves its input of 600 x 256 in 16 bits; the first one's is the model's, and so no
    activation."""
    nbytes = 600 * 256 * 2
    found = trace(Layers(256, depth=4), (torch.ones(600, 256),))
    entered = [m for m in found.moments if m.edge == "enter"]
    assert [m.saved_bytes // nbytes for m in entered] == [0, 1, 2, 3, 2, 2, 1, 0]
    assert all(m.saved_bytes % nbytes == 0 for m in found.moments)
    peak = found.peak_non_model_bytes
    assert max(found.non_model_within(None)) == peak
    assert (
        max(found.non_model_within(1 << 40))
        == peak
        > max(found.non_model_within(nbytes))
        > max(found.non_model_within(0))
    )
    assert not trace(Layers(64), (torch.ones(600, 64),)).peak_saved_bytes  # small ones stay


class Saved:
    live_bytes = resident_bytes = 0


def test_bytes_that_have_left_the_device_count_as_if_they_had_stayed():
    saved, reading = Saved(), [0]

    class Fixed:
        includes_model_data, certain_bytes = False, 0
        start = stop = lambda self: None
        period = lambda self: reading[0]  # noqa: E731

    looks = []
    collector = MemStatsCollector((), [Fixed()], look=lambda *a: looks.append(a), saved=saved)
    collector.begin("train")
    for live, resident, used in [(0, 0, 10), (100, 60, 70), (100, 30, 40), (50, 50, 55)]:
        saved.live_bytes, saved.resident_bytes, reading[0] = live, resident, used
        collector.record("enter", "m", ())
    saved.live_bytes, saved.resident_bytes, reading[0] = 0, 0, 5
    found = collector.end().moments
    assert [m.saved_bytes for m in found] == [0, 100, 50, 0]
    assert [m.non_model_bytes for m in found] == [110, 110, 125, 5]
    assert len(looks) == 5  # at what is in use


def test_model_data_that_leaves_below_what_there_was_at_the_begin_is_no_activation():
    """An evaluation begins with weights that the one before it has carried, and lets go of them."""
    model, reading = [100], [0]

    class All:
        includes_model_data, certain_bytes = True, 0
        start = stop = lambda self: None

        def period(self):
            self.certain_bytes = reading[0] + model[0] - 100
            return self.certain_bytes

    looks = []
    collector = MemStatsCollector((), [All()], lambda: model[0], lambda *a: looks.append(a[0]))
    collector.begin("eval")
    for there, used in [(20, 0), (20, 7), (60, 3), (100, 5)]:
        collector.before_change()
        model[0], reading[0] = there, used
        collector.after_change()
        collector.record("enter", "m", ())
    assert [m.non_model_bytes for m in collector.end().moments] == [7, 7, 5, 5]
    assert max(looks) == 7


def test_bytes_saved_and_read_within_a_call_split_it():
    """A chain of operators in one module saves five tensors; of what it takes besides, two are
    there at once, and all of it is what it was."""

    class Chain(torch.nn.Linear):
        def forward(self, x):
            for _ in range(5):
                x = super().forward(x).exp()
            return x

    nbytes = 600 * 256 * 2
    found = trace(Chain(256, 256), (torch.ones(600, 256),))
    first = found.moments[0]
    assert first.phase == "forward"
    assert first.non_model_bytes == 6 * nbytes
    assert first.non_model_bytes - first.saved_bytes == 2 * nbytes


def test_memory_that_the_allocator_had_left_counts_as_well():
    """What is resident does not grow where freed memory is used again."""
    model = GeminiDDP(Tower(), SimBackend(1), StaticPlacement(1, 1, 1), min_chunk_size_m=0.004)
    model(IDS).sum().backward()
    model.engine.sampler.end()
    (found,) = model.memory_stats.traces.values()
    wanted = trace(Tower(), (IDS,))
    forward = [m.non_model_bytes for m in wanted.moments if m.phase == "forward"]
    got = [m.non_model_bytes for m in found.moments if m.phase == "forward"]
    assert got[:-1] == forward[:-1]  # the last ends where the loss is computed
    backward = [m.non_model_bytes for m in found.moments if m.phase == "backward"]
    assert backward[0] > 0.5 * max(got) > backward[-1]  # what forward left, as it dies
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize(("settings", "above"), [("", 800), ("expandable_segments:True", 500)])
def test_a_devices_monitor_counts_what_the_allocator_split_since_the_start(
    settings, above, monkeypatch
):
    now = {"allocated_bytes.all.peak": 0, "inactive_split_bytes.all.current": 70}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(now))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monitor = CudaMonitor(torch.device("cuda:0"))
    monitor.start()
    now |= {"allocated_bytes.all.peak": 1500, "inactive_split_bytes.all.current": 370}
    assert monitor.period() == above and monitor.certain_bytes == 500


def test_a_forward_that_was_broken_off_before_its_first_call_is_no_trace():
    model, optimizer = made("tail, files, bf16")
    sampler, broken = model.engine.sampler, [1]

    def breaks():
        if broken:
            broken.clear()
            raise KeyboardInterrupt

    model.engine.events.forward.listen(breaks)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, 0)
    assert not sampler.collector.collecting and sampler.traces() == []
    for number in (2, 4):
        step(model, optimizer, number)
    (trace,) = sampler.traces()
    edges = Counter((moment.phase, moment.edge) for moment in trace.moments)
    assert edges["backward", "leave"] == edges["forward", "enter"] > 0
    optimizer.close()


def test_rows_of_one_sequence_have_no_mask_of_rows_by_columns():
    """transformers asks values of positions for it, which a trace has not."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, use_cache=False,
    )  # fmt: skip
    model, length = transformers.LlamaForCausalLM(config), 2048
    ids = torch.zeros(1, length, dtype=torch.int64)
    masks = transformers.masking_utils.find_packed_sequence_indices

    def most(**more):
        traced = trace(model, {"input_ids": ids, "labels": ids, **more})
        return max(moment.non_model_bytes for moment in traced.moments)

    assert most() < length * length < most(position_ids=torch.arange(length)[None])
    assert transformers.masking_utils.find_packed_sequence_indices is masks
