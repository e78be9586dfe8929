"""Speeds that the doctor keeps, and the runs that plan with them."""

import json
from dataclasses import replace

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP
from gemini.__main__ import main
from gemini.comm.connect import everyone
from gemini.doctor.report import judge
from gemini.kept_speeds import VARIABLE, file_of_speeds, keep, speeds_here
from gemini.placement.sizes import Bandwidths
from gemini.placement.speeds import USUAL, KeptSpeeds, Speeds, agreed, usual_speeds
from gemini.plan.machine import machine_of
from gemini.train.config import TrainConfig
from gemini.train.plan import hardware
from optim import HybridAdam
from tests.support.doctored import GOOD

CPU = torch.device("cpu")
LINKS = {"host_memory": 30e9, "device_memory": 36e9, "flops": 5e11}


def disk(read, write):
    return {"nvme_read": read, "nvme_write": write}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "caches" / "speeds.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def here(folder=None, ranks=1):
    return speeds_here(CPU, folder, ranks, has_host_tier=False)


def test_what_was_kept_is_what_a_run_plans_with(file, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    assert here() == Speeds(usual_speeds(has_host_tier=False))
    assert keep(KeptSpeeds("a day", (), LINKS, {str(folder): disk(4e9, 2e9)})) == file
    found = here(str(folder))
    assert found.links == replace(USUAL, **LINKS, **disk(4e9, 2e9))
    assert found.measured == {*LINKS, "nvme_read", "nvme_write"}
    assert found.origin == "measured on a day"
    policy = AutoPlacement(nvme_dir=str(folder))
    engine = GeminiDDP(Tower(), "cpu", policy, min_chunk_size_m=0.004).engine
    assert engine.planning.inputs.bandwidths == found.links
    assert list(file.parent.iterdir()) == [file]


def test_ranks_of_a_machine_share_its_ram_its_cores_and_its_disks():
    kept = KeptSpeeds("a day", (), {**LINKS, "host_to_device": 50e9}, {"/d": disk(4e9, 2e9)})
    on_cpu = kept.of_rank("/d", 4, has_host_tier=False).links
    assert (on_cpu.host_memory, on_cpu.device_memory, on_cpu.flops) == (7.5e9, 9e9, 1.25e11)
    assert (on_cpu.nvme_read, on_cpu.nvme_write) == (1e9, 0.5e9)
    on_gpu = kept.of_rank("/d", 4, has_host_tier=True).links
    assert (on_gpu.host_memory, on_gpu.device_memory, on_gpu.flops) == (7.5e9, 36e9, 5e11)
    assert (on_gpu.host_to_device, on_gpu.collective) == (50e9, USUAL.collective)


def test_a_disk_is_known_by_its_file_system_and_another_is_not(file, tmp_path):
    of_it, other = tmp_path / "measured", tmp_path / "beside"
    of_it.mkdir()
    other.mkdir()
    keep(
        KeptSpeeds("a day", (), LINKS, {"/none/there": disk(9e9, 9e9), str(of_it): disk(4e9, 2e9)})
    )
    assert here(str(other)).links.nvme_read == 4e9
    elsewhere = here("/dev/shm")
    assert elsewhere.links.nvme_read == USUAL.nvme_read
    assert elsewhere.measured == set(LINKS) and "but for disks" in elsewhere.origin


def test_folders_of_earlier_measurements_stay_and_those_of_other_devices_go(file):
    keep(KeptSpeeds("one day", (), LINKS, {"/a": disk(1e9, 1e9), "/b": disk(2e9, 2e9)}))
    keep(KeptSpeeds("another", (), LINKS, {"/b": disk(3e9, 3e9)}))
    found = KeptSpeeds.from_json(json.loads(file.read_text(encoding="utf-8")))
    assert found.day == "another"
    assert found.folders == {"/a": disk(1e9, 1e9), "/b": disk(3e9, 3e9)}
    keep(KeptSpeeds("a third", ("a GPU",), LINKS, {}))
    assert KeptSpeeds.from_json(json.loads(file.read_text(encoding="utf-8"))).folders == {}


GIVEN = KeptSpeeds("a day", (), LINKS, {"/a": disk(1e9, 1e9)}).as_json()


@pytest.mark.parametrize(
    "told",
    [
        "{", "[]", "{}", json.dumps(GIVEN | {"day": 1}), json.dumps(GIVEN | {"devices": "a GPU"}),
        json.dumps(GIVEN | {"more": 1}), json.dumps(GIVEN | {"links": {"flops": -1.0}}),
        json.dumps(GIVEN | {"links": {"flops": True}}),
        json.dumps(GIVEN | {"links": {"warp": 9.0}}),
        json.dumps(GIVEN | {"links": {"flops": float("nan")}}),
        json.dumps(GIVEN | {"folders": {"/a": {"flops": 1e9}}}), "[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_not_used_and_the_origin_says_so(told, file):
    file.parent.mkdir()
    file.write_text(told, encoding="utf-8")
    found = here()
    assert found.links == usual_speeds(has_host_tier=False) and not found.measured
    assert found.origin.startswith(f"usual ones: {file} cannot be read")
    keep(KeptSpeeds("a day", (), LINKS))  # it is written anew
    assert here().measured == set(LINKS)


def test_a_file_in_the_folder_for_caches_is_of_this_host(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    keep(KeptSpeeds("a day", (), LINKS))
    assert here().measured
    monkeypatch.setattr("socket.gethostname", lambda: "other")
    assert not here().measured and "gemini doctor" in here().origin
    monkeypatch.setenv(VARIABLE, "usual")
    assert file_of_speeds() is None and keep(KeptSpeeds("a day", (), LINKS)) is None


def test_ranks_agree_on_the_least_and_count_as_measured_what_all_have_measured():
    one = Speeds(replace(USUAL, host_memory=9e9, nvme_read=9e9), "a", frozenset({"host_memory"}))
    two = Speeds(replace(USUAL, host_memory=30e9), "b", frozenset({"host_memory", "nvme_read"}))
    both = agreed([one, two, one])
    assert both.links == replace(USUAL, host_memory=9e9)
    assert both.measured == {"host_memory"} and both.origin == "a; elsewhere b"


def plans(rank, file):
    """Each rank reads a file of its own, as on a machine of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"{file}-{rank}")
        engine = GeminiDDP(Tower(), "cpu", AutoPlacement(), min_chunk_size_m=0.004).engine
        return engine.planning.inputs.bandwidths, engine.planning.machine.speeds.origin


def test_ranks_with_other_files_make_one_plan(tmp_path, monkeypatch):
    for rank, speed in enumerate((30e9, 10e9)):
        monkeypatch.setenv(VARIABLE, str(tmp_path / f"file-{rank}"))
        keep(KeptSpeeds(f"day {rank}", (), {"host_memory": speed}))
    (links, origin), other = run_ranks(plans, 2, tmp_path / "file", processes=True)
    assert (links, origin) == other
    assert links.host_memory == 5e9  # of two that share it
    assert "day 0" in origin and "elsewhere measured on day 1" in origin


def test_the_command_keeps_what_it_measured_and_nothing_of_a_busy_machine(
    file, tmp_path, capsys, monkeypatch
):
    facts = replace(GOOD, devices=(), folders=(replace(GOOD.folders[0], path=str(tmp_path)),))
    monkeypatch.setattr("gemini.doctor.measure.examine", lambda folders: facts)
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["bandwidths"]["nvme_read"] == 4e9 and f"in {file}" in err
    assert here(str(tmp_path)).links == replace(
        USUAL, host_memory=30e9, device_memory=30e9, flops=4e11, **disk(4e9, 2e9)
    )
    file.unlink()
    facts = replace(facts, load_average=9.0)
    main(["doctor"])
    assert "the machine is busy" in capsys.readouterr().err and not file.exists()
    facts = replace(facts, load_average=0.0)
    monkeypatch.setenv(VARIABLE, "/proc/none/speeds.json")
    assert main(["doctor"]) == 0  # what cannot be kept is no fault of the machine
    assert "not kept for plans: [Errno" in capsys.readouterr().err


def test_a_report_says_where_its_speeds_are_from(file, tmp_path):
    def said():
        model = GeminiDDP(Tower(), "cpu", min_chunk_size_m=0.004, update="tail")
        optimizer = HybridAdam(
            model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path)
        )
        ((ids,),) = token_batches(1, 1)
        token_loss(model, ids).backward()
        optimizer.step()  # an iteration is priced when it was sampled
        text = model.explain("layers.0.0.weight")
        optimizer.close()
        return text

    assert "speeds of predictions: usual ones: `python -m gemini doctor`" in said()
    keep(KeptSpeeds("a day", (), LINKS, {str(tmp_path): disk(4e9, 2e9)}))
    assert "speeds of predictions: measured on a day" in said()


def test_plan_and_train_count_with_what_a_run_here_would(file, tmp_path, monkeypatch):
    keep(KeptSpeeds("a day", (), LINKS, {str(tmp_path): disk(4e9, 2e9)}))
    monkeypatch.setattr("gemini.train.plan.flops_of", lambda device: 7e11)
    monkeypatch.setattr("gemini.nvme.probe", None)  # what was kept is not measured again
    config = TrainConfig(model="gpt2", nvme=str(tmp_path))
    machine = hardware(config, everyone(None, None), CPU)
    engine = GeminiDDP(Tower(), "cpu", AutoPlacement(nvme_dir=str(tmp_path))).engine
    assert machine.run_speeds == engine.planning.inputs.bandwidths
    assert machine.bandwidths == replace(machine.run_speeds, flops=7e11)
    sources = dict(machine.sources)
    assert sources["flops"] == "measured" and sources["nvme_read"] == "measured on a day"


def test_a_report_of_another_machine_says_what_a_run_there_would_choose_with(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(judge(replace(GOOD, devices=())).as_json()), encoding="utf-8")
    machine = machine_of({}, device="cpu", world_size=2, ranks_per_node=2, report=path)
    kept = judge(replace(GOOD, devices=())).to_keep("a day")
    (folder,) = kept.folders
    assert machine.run_speeds == kept.of_rank(folder, 2, has_host_tier=False).links
    assert machine.run_speeds == Bandwidths(
        **{name: getattr(machine.bandwidths, name) for name in Bandwidths.__slots__}
        | {"host_to_device": 20e9, "device_to_host": 20e9, "collective": 10e9}
    )
    assert machine_of({}, device="cpu").run_speeds is None


def test_speeds_of_another_card_are_not_used(file, monkeypatch):
    links = {"host_to_device": 50e9, "device_memory": 3e12}
    keep(KeptSpeeds("a day", ("a GPU",), links))
    for name, measured in (("a GPU", set(links)), ("another GPU", set())):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        found = speeds_here(torch.device("cuda"), None, 2, has_host_tier=True)
        assert found.measured == measured
        assert found.links == (replace(USUAL, **links) if measured else USUAL)
    assert found.origin == f"usual ones: {file} has none of another GPU"
