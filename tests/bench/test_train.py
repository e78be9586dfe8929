"""bench.train: rows of JSON, and what a missing peer, a crash and Ctrl-C cost."""

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench import train
from bench.peers import deepspeed_zero
from bench.rows.job import Job, number_of_settings
from bench.rows.processes import PeerError, Ranks
from bench.rows.summary import ratios, summary, table
from bench.rows.table import chosen, default_budgets, rows
from tests.support.until import until

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [
    "torch/adamw-bf16", "torch/adamw-autocast", "fsdp2/w1", "fsdp2/w2", "fsdp2/w2-keep",
    "ddp/zero1", "deepspeed/zero3", "deepspeed/zero3-cpu", "deepspeed/zero3-nvme", "ours/resident",
    "ours/half-nvme", "ours/nvme", "ours/nvme-tail",
    "ours/resident-8bit", "ours/nvme-bf16", "ours/nvme-bf16-tail",
    "ours/nvme-8bit", "ours/nvme-8bit-tail", "ours/w2", "ours/zero1", "ours/zero2", "ours/zero3",
    "ours/auto-1.5GiB",
    "torch/accelerate", "ours/accelerate", "torch/trainer", "ours/trainer", "torch/lightning",
    "ours/lightning",
]  # fmt: skip
ON_MESHES = [
    f"{peer}/mesh-{mesh}"
    for mesh in ("hsdp2x2", "tp2", "dp2tp2", "tp2pp2")
    for peer in ("fsdp2", "ours")
] + ["ours/mesh-ulysses4", "ours/mesh-ring4"]
KEYS = {
    "name", "step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds",
    "peak_rss_mib", "nvme_bytes", "loss", "startup_seconds", "settings", "threads", "spread",
}  # fmt: skip
TINY = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64,
    "n_head": 2, "vocab_size": 256, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TINY_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2,
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
# stands for DeepSpeed: as the real one it must be importable, and has an accelerator
STAND_IN = """
import os, sys, types
accelerator = types.ModuleType("deepspeed.accelerator")
builder = types.SimpleNamespace(load=lambda verbose: None)
accelerator.get_accelerator = lambda: types.SimpleNamespace(create_op_builder=lambda name: builder)
sys.modules["deepspeed.accelerator"] = accelerator
def initialize(**kwargs):
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def place(tmp_path):
    """A folder for the disk rows, a tiny model, and a path for modules."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "modules").mkdir()
    (tmp_path / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    return tmp_path


def start(place, *flags):
    command = [
        sys.executable, "-m", "bench.train", "--model", place / "tiny.json", "--seq", "16",
        "--device", "cpu", "--steps", "3", "--rounds", "1", "--nvme-dir", place / "disk",
        "--json", place / "out.json", "--plot", place / "out.png",
        "--peers-python", sys.executable, *flags,
    ]  # fmt: skip
    path = os.pathsep.join([str(place / "modules"), str(ROOT), str(ROOT / "io")])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background
    try:  # ignores it, and so would its children
        return subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            encoding="utf-8", start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def run(place, *flags):
    process = start(place, *flags)
    printed, _ = process.communicate()
    return process.returncode, printed


def workers(place):
    """Processes that were told of this folder, the bench itself left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.startswith(str(place / "disk" / "bench-train-")) for word in words):
            found.append(int(path.parent.name))
    return found


# -- pure --


def test_rows_have_the_names_that_were_asked_for():
    every = rows("cpu", ["1.5GiB"])
    assert [row.name for row in every] == NAMES + ON_MESHES
    assert [row.name for row in chosen(every, None)] == NAMES
    assert {"fsdp2/w1-offload", "fsdp2/w2-offload", "ours/host"} == {
        row.name for row in rows("cuda", ["1.5GiB"])
    } - {*NAMES, *ON_MESHES}
    assert [r.name for r in chosen(every, ["fsdp2", "deepspeed/zero3", "ours/auto"])] == [
        "fsdp2/w1", "fsdp2/w2", "fsdp2/w2-keep", "deepspeed/zero3", "ours/auto-1.5GiB"
    ]  # fmt: skip
    assert [r.name for r in chosen(every, ["ours/mesh"])] == [
        name for name in ON_MESHES if name.startswith("ours")
    ]
    with pytest.raises(ValueError, match="no row 'ours/nothing'; expected some of torch/adamw"):
        chosen(every, ["ours/nothing"])


def test_budgets_are_a_quarter_above_and_below_model_data():
    assert default_budgets(124_439_808) == ("2.25GiB", "1.5GiB")
    assert default_budgets(1000) == ("0.25GiB",)


def test_settings_are_counted_one_by_one():
    assert number_of_settings({"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}) == 3
    args = train.parse(["--device", "cpu"])
    by_row = {
        row.name: number_of_settings(train.configuration(row, args)) for row in rows("cpu", [])
    }
    assert by_row["ours/resident"] == 3  # rate, decay, norm
    assert by_row["ours/nvme"] == 5 and by_row["torch/adamw-autocast"] == 5
    assert by_row["deepspeed/zero3-nvme"] > by_row["deepspeed/zero3-cpu"] > 10


def test_ranks_that_split_layers_have_the_same_sequences():
    def sequences(mesh):
        options = {"mesh": mesh} if mesh else {}
        jobs = [Job("ours", "", "", "", options, rank=rank, world_size=4) for rank in range(4)]
        return [list(range(4))[job.own_batch] for job in jobs]

    assert sequences(None) == sequences({"replicate": 2, "shard": 2}) == [[0], [1], [2], [3]]
    assert sequences({"dp": 2, "tp": 2}) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def life(step, peak, start=1.0):
    """What one process says whose steps all take `step` seconds."""
    parts = {f"{part}_seconds": step / 4 for part in ("forward", "backward", "optimizer")}
    steps = [{"step_seconds": 9.0 if i < 2 else step, "loss": 5.0 - i, **parts} for i in range(4)]
    end = {"peak_rss_mib": peak, "peak_device_mib": 0.0, "threads": 2}
    ready = {"import_seconds": start, "wrap_seconds": 0.5}
    return steps, {"ready": [ready, ready], "end": [end, {**end, "peak_rss_mib": peak - 1}],
                   "nvme_bytes": 7}  # fmt: skip


def row_of(name, lives):
    row = next(row for row in rows("cpu", ["1.5GiB"]) if row.name == name)
    steps, ends = zip(*lives, strict=True)
    return summary(row, {"a": 1}, ends, steps, None)


def test_medians_leave_the_first_steps_out_and_ratios_are_paired_by_round():
    ours = row_of("ours/nvme", [life(1.0, 100), life(2.0, 300)])
    theirs = row_of("deepspeed/zero3-nvme", [life(2.0, 400), life(4.0, 400, start=2.0)])
    assert ours["step_seconds"] == 1.5 and ours["spread"]["step_seconds"] == [1.0, 2.0]
    assert ours["peak_rss_mib"] == 200 and ours["loss"] == 2.0 and ours["nvme_bytes"] == 7
    assert theirs["startup_seconds"] == 2.0
    found = {r["of"]: r for r in ratios([ours, theirs])}
    assert found["step_seconds"]["ratio"] == 0.5 and found["step_seconds"]["met"]
    assert found["peak_rss_mib"]["ratio"] == 0.5
    assert found["startup_seconds"]["ratio"] == 0.75 and not found["startup_seconds"]["met"]


def test_the_default_is_held_to_the_best_placement_that_a_user_could_name():
    default = row_of("ours/w2", [life(1.5, 100)])
    named = [row_of(f"ours/zero{n}", [life(step, 100)]) for n, step in ((1, 4.0), (2, 2.0))]
    (found,) = ratios([default, *named])
    assert (found["row"], found["ratio"], found["at_most"]) == ("ours/w2", 0.75, 1.02)
    (found,) = ratios([default, *named, row_of("ours/zero3", [life(1.0, 100)])])
    assert found["ratio"] == 1.5 and not found["met"]
    assert ratios([default]) == []


def test_the_step_after_settle_is_not_counted():
    """Nothing of the row itself was behind it."""
    steps, ends = life(1.0, 100)
    steps[2] |= {"step_seconds": 0.1, "follows_settle": 1.0}
    row = row_of("ours/nvme-tail", [(steps, ends)])
    assert row["step_seconds"] == 1.0 and row["steps_by_round"] == [[1.0]]


def test_moves_of_homes_after_the_warm_up_are_counted_over_all_rounds():
    lives = [life(1.0, 100), life(1.0, 100)]
    for (steps, _), moves in zip(lives, ((1, 1, 1, 1), (0, 1, 2, 3)), strict=True):
        for step, so_far in zip(steps, moves, strict=True):
            step["home_moves"] = float(so_far)
    assert row_of("ours/auto-1.5GiB", lives)["moves"] == 2
    assert "moves" not in row_of("ours/nvme", [life(1.0, 100)])


def test_rows_take_turns_that_end_when_nothing_is_under_way(monkeypatch, tmp_path):
    """So no row's tail is in the time of the next."""
    said = []

    class Told:
        ready = ()

        def __init__(self, python, jobs, timeout):
            self.name = jobs[0].options.get("update", "serial")

        def step(self):
            said.append(self.name)
            return [{"loss": 1.0}]

        def settle(self):
            said.append("settle")

        def finish(self):
            return []

        def close(self):
            pass

    monkeypatch.setattr(train, "Ranks", Told)
    args = train.parse(["--device", "cpu", "--steps", "5"])
    group = chosen(rows("cpu", []), ["ours/nvme", "ours/nvme-tail"])
    group = [row for row in group if row.name in ("ours/nvme", "ours/nvme-tail")]
    measured = {row.name: train.Measured(row, {}) for row in group}
    train.play(group, args, tmp_path, tmp_path / "none", measured, 0)
    turns = [["serial"] * 3, ["tail"] * 3, ["serial"] * 2, ["tail"] * 2]
    assert said == [word for turn in turns for word in (*turn, "settle")]
    assert ["follows_settle" in step for step in measured["ours/nvme-tail"].steps[0]] == [
        True, False, False, True, False
    ]  # fmt: skip


def test_table_has_every_row_and_the_reason_of_those_without_figures():
    row = next(row for row in rows("cpu", []) if row.name == "deepspeed/zero3")
    lost = summary(row, {"a": 1}, [], [], "exit 1: No module named 'deepspeed'")
    text = table({"device": "cpu", "steps": 4, "rows": [row_of("ours/w2", [life(1.0, 100)]), lost]})
    assert "| ours/w2 | 1.00 (1.00 to 1.00) | 0.25 | 0.25 | 0.25 | 100 (100 to 100)" in text
    assert "deepspeed/zero3: exit 1: No module named 'deepspeed'" in text


def test_what_was_hidden_and_waited_for_is_said_of_rows_that_have_a_tail():
    steps, ends = life(1.0, 100)
    for i, step in enumerate(steps[1:]):  # the first has none before it
        step |= {"hidden_seconds": 0.25 * i, "waited_seconds": 0.5, "committed": 1.0}
    tail = row_of("ours/nvme-tail", [(steps, ends)])
    assert tail["hidden_seconds"] == 0.375 and tail["waited_seconds"] == 0.5
    serial = row_of("ours/nvme", [life(1.0, 100)])
    assert "hidden_seconds" not in serial
    said = "0.38 s a step of the tail are hidden, and 0.50 s waited for; "
    text = table({"device": "cpu", "steps": 4, "rows": [serial, tail]})
    assert text.splitlines()[-1] == f"ours/nvme-tail: {said}every step counts"
    steps[-1]["committed"] = 0.0
    lost = row_of("ours/nvme-tail", [(steps, ends)])
    text = table({"device": "cpu", "steps": 4, "rows": [lost]})
    assert text.splitlines()[-1] == f"ours/nvme-tail: {said}NOT EVERY STEP COUNTS"


@pytest.mark.parametrize("clipped, said", [
    ((1.0, 1.0), "every step is clipped; "), ((0.0, 0.0), "no step is clipped; "), ((0.0, 1.0), ""),
])  # fmt: skip
def test_a_row_says_whether_its_steps_are_clipped(clipped, said):
    steps, ends = life(0.8, 100)
    for step, value in zip(steps[2:], clipped, strict=True):
        step |= {"hidden_seconds": 0.0, "waited_seconds": 0.0, "committed": 1.0, "clipped": value}
    tail = row_of("ours/nvme-tail", [(steps, ends)])
    text = table({"device": "cpu", "steps": 4, "rows": [tail]})
    assert text.splitlines()[-1] == f"ours/nvme-tail: {said}every step counts"


@pytest.mark.parametrize(
    "peer",
    ["torch_adamw", "fsdp2", "fsdp2_stages", "ddp_zero", "deepspeed_zero", "ours", "boosted"],
)
def test_every_peer_clips_to_the_norm_of_the_run(peer):
    options = {"autocast": False, "mesh": {"pp": 1}}
    found = [
        import_module(f"bench.peers.{peer}").settings(Job(peer, "", "", "", options, max_norm=norm))
        for norm in (1.0, 7.5)
    ]
    assert "7.5" not in str(found[0]) and str(found[0]).replace("1.0", "7.5") == str(found[1])


def test_lock_of_a_killed_build_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/lock").touch()
    with pytest.raises(RuntimeError, match="cpu_adam/lock is left of a build"):
        deepspeed_zero.load()


@pytest.mark.parametrize("flags", [["--steps", "2"], ["--rounds", "0"], ["--batch", "3"]])
def test_bad_arguments_are_refused(flags):
    with pytest.raises(SystemExit) as refused:
        train.parse(flags)
    assert refused.value.code == 2


# -- processes --


@pytest.mark.ci
def test_worker_that_says_nothing_ends_and_is_the_rows_reason(place, monkeypatch):
    (place / "modules/silent.py").write_text(
        "import threading\nthreading.Event().wait()\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(place / "modules"))
    monkeypatch.setattr("bench.rows.processes.WORKER", "silent")
    job = Job("silent", "", "", str(place / "disk"))
    with pytest.raises(PeerError, match="no answer in 1 s"):
        Ranks(sys.executable, [job, Job("silent", "", "", str(place / "disk"), rank=1)], 1.0)


def whole_rows(place, *peers):
    """Rows of a run that have figures, by name; what it printed."""
    code, printed = run(place, "--force", "--peers", *peers)
    assert code == 0, printed
    result = json.loads((place / "out.json").read_text(encoding="utf-8"))
    found = {row["name"]: row for row in result["rows"] if "losses" in row}
    for row in found.values():
        assert row.keys() > KEYS, row
        parts = ("forward_seconds", "backward_seconds", "optimizer_seconds")
        assert all(row[part] > 0 for part in parts)
        assert row["peak_rss_mib"] > 0 and row["startup_seconds"] > 0
        # one rank or two, and wherever the state is, within bf16's rounding
        assert row["losses"] == pytest.approx(found["torch/adamw-autocast"]["losses"], rel=5e-3)
    assert result["machine"]["load_average"] and result["versions"]["torch"]
    assert (place / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((place / "disk").iterdir()) and not list(place.glob("*.part"))
    return found, printed


@pytest.mark.ci
def test_rows_are_written_whole_and_a_peer_that_crashes_costs_its_own(place):
    (place / "modules/deepspeed.py").write_text(STAND_IN, encoding="utf-8")
    found, printed = whole_rows(place, "torch/adamw-autocast", "ours/nvme-tail", "deepspeed/zero3")
    assert found.keys() == {"torch/adamw-autocast", "ours/nvme-tail"}
    assert [name for name, row in found.items() if "hidden_seconds" in row] == ["ours/nvme-tail"]
    assert "s a step of the tail are hidden" in printed and "every step counts" in printed
    rows = json.loads((place / "out.json").read_text(encoding="utf-8"))["rows"]
    reasons = {row["name"]: row.get("reason") for row in rows}
    assert reasons["deepspeed/zero3"] == "killed by SIGKILL"
    assert not workers(place)


@pytest.mark.deep
def test_all_rows_are_written_whole(place):
    ours = ("ours/resident", "ours/half-nvme", "ours/nvme", "ours/nvme-tail")
    two = ("fsdp2/w2", "fsdp2/w2-keep", "ours/w2", "ours/zero1", "ours/zero2", "ours/zero3")
    found, _ = whole_rows(place, "torch/adamw", *ours, "ours/auto", *two, "ddp")
    single = {"torch/adamw-bf16", "torch/adamw-autocast", *ours, "ours/auto-0.25GiB"}
    assert found.keys() == {*single, *two, "ddp/zero1"}
    on_disk = [found[f"ours/{name}"]["nvme_bytes"] for name in ("resident", "half-nvme", "nvme")]
    assert 0 == on_disk[0] < on_disk[1] <= on_disk[2]
    for row in found.values():
        parts = ("forward_seconds", "backward_seconds", "optimizer_seconds", "step_seconds")
        *least, whole = (row["spread"][part][0] for part in parts)
        assert sum(least) < 1.5 * whole  # of ranks, each
        assert row["peak_rss_mib"] > 100 and row["startup_seconds"] > 0.1
    assert found["ours/resident"]["losses"] == found["ours/nvme"]["losses"]
    assert found["ours/nvme"]["losses"] == found["ours/nvme-tail"]["losses"]


@pytest.mark.deep
def test_rows_on_meshes_have_the_losses_of_one_rank(place):
    (place / "llama.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
    named = ["fsdp2/mesh-tp2", "ours/mesh-tp2", *ON_MESHES[-4:]]
    code, printed = run(
        place, "--model", place / "llama.json", "--force", "--peers", "torch/adamw-autocast", *named
    )
    assert code == 0, printed
    result = json.loads((place / "out.json").read_text(encoding="utf-8"))
    found = {row["name"]: row for row in result["rows"]}
    for name in named:  # sums of row-parallel parts are rounded to bf16, too
        want = found["torch/adamw-autocast"]["losses"]
        assert found[name].get("losses") == pytest.approx(want, rel=5e-3), found[name]
    assert {ratio["row"] for ratio in result["ratios"]} == {n for n in named if "ours" in n}


def test_missing_peer_costs_its_own_rows(monkeypatch, tmp_path):
    def prepare(python, peer, *rest):
        if peer == "deepspeed_zero":
            raise PeerError("exit 1: ImportError: deepspeed is not here")
        return {"versions": {peer: "1"}}

    monkeypatch.setattr(train, "prepare", prepare)
    some = chosen(rows("cpu", []), ["deepspeed/zero3", "torch/adamw-bf16"])
    monkeypatch.setattr(train, "write_batches", lambda args, folder: folder / "batches.pt")
    played = []
    monkeypatch.setattr(train, "play", lambda group, *rest: played.extend(group))
    measured, versions = train.run(some, train.parse(["--device", "cpu"]), tmp_path, 1000)
    assert {one.row.name: one.reason for one in measured} == {
        "torch/adamw-bf16": None,
        "deepspeed/zero3": "exit 1: ImportError: deepspeed is not here",
    }
    assert {row.name for row in played} == {"torch/adamw-bf16"} and len(versions) == 1


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.ci),
        pytest.param(signal.SIGTERM, marks=pytest.mark.deep),
    ],
)
def test_interrupt_leaves_no_file_process_or_folder(place, number):
    (place / "out.json").write_text("before", encoding="utf-8")
    process = start(place, "--force", "--steps", "5000", "--peers", "ours/nvme")
    try:

        def has_state():
            assert process.poll() is None
            return list((place / "disk").glob("bench-train-*/*/state/*"))

        until(has_state)
        assert workers(place)
        process.send_signal(number)
        printed, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 128 + number, printed
    assert not workers(place) and not list((place / "disk").iterdir())
    assert sorted(p.name for p in place.iterdir()) == ["disk", "modules", "out.json", "tiny.json"]
    assert (place / "out.json").read_text(encoding="utf-8") == "before"


def test_busy_machine_is_refused(place, capsys):
    code = train.main(["--device", "cpu", "--json", str(place / "out.json")], load=lambda: 0.9)
    printed = capsys.readouterr().out
    assert code == 2 and "the machine is busy: 90%" in printed and "--force" in printed
    assert not (place / "out.json").exists()
