"""What is suggested where a run does not fit, or would be faster: it is enough, and less is not."""

from dataclasses import replace

import pytest

from gemini.plan import words
from gemini.plan.ask import ask, plan_for
from gemini.plan.machine import machine_of
from gemini.plan.training import Training
from gemini.plan.words import answer
from gemini.units import parse_bytes
from tests.support.asked import DISK, on


@pytest.mark.ci
def test_a_share_that_is_too_small_is_told_beside_what_was_given(question):
    machine = replace(question.machine, device="cpu", device_mem=20 << 20, ranks_per_node=2)
    why = answer(replace(question, machine=machine, other=None)).why
    assert "--device-mem of 20.00 MiB: a rank's share of 10.00 MiB is " in why
    assert "; raise --device-mem by as much for each of 2 ranks" in why
    alone = answer(replace(on(question, device_mem=20), other=None)).why
    assert "--device-mem of 20.00 MiB is " in alone and "by as much for each" not in alone


@pytest.mark.parametrize(
    "short",
    [
        {"device_mem": 200, "host_mem": 100, "nvme": 10},
        {"device_mem": 200, "host_mem": 1, "nvme": 2000},
        {"device_mem": 20},
        {"device": "cpu", "device_mem": 200, "nvme": 100},
    ],
)
def test_change_that_is_suggested_makes_it_fit_and_less_does_not(question, short):
    asked = replace(on(question, **short), other=None)
    plan = answer(asked)
    assert not plan.fits and plan.largest_batch == 0
    flags = plan.change.split()
    assert len(flags) == 2
    name = flags[0].removeprefix("--").replace("-", "_")
    mib = int(flags[1].removesuffix("MiB"))
    assert on(asked, **{name: mib}).fits()
    assert not on(asked, **{name: mib - 2}).fits()


def test_the_same_step_in_more_forwards_is_the_cheapest_change(question):
    asked = replace(on(question, device_mem=200), batch=4096)
    plan = answer(asked)
    found = plan.asked
    assert (found.batch * found.accumulate, found.lora) == (4096, 0) and found.batch > 1
    assert plan.change == f"--batch {found.batch} --accumulate {found.accumulate}"
    before = f"{found.accumulate} forwards of {found.batch} rather than 1 of 4096"
    assert plan.change_in_words == before
    twice = replace(found, batch=2 * found.batch, accumulate=found.accumulate // 2)
    assert found.fits() and not twice.fits()
    largest = plan.largest_batch
    assert replace(asked, batch=largest).fits() and not replace(asked, batch=largest + 1).fits()


def test_checkpointing_is_the_cheapest_change_where_it_is_enough(config):
    asked = ask(str(config), machine_of({"device_mem": 100 << 20, **DISK}), Training(seq=512))
    plan = answer(asked)
    assert not plan.fits and plan.change == "--checkpointing"
    assert answer(asked.other(True, 0, None)).fits
    more = on(asked, device_mem=101)
    assert answer(more).asked.machine == more.machine
    said = list(words.five_lines("it", plan))
    assert said[1].startswith("cheapest change: activations that are computed again in backward")
    assert words.train_arguments(plan, "adamw_torch").endswith(" --checkpointing")


def test_a_quantised_base_is_the_cheapest_change_where_a_disk_is_not_enough(config):
    machine = machine_of({"device_mem": 33 << 20, "nvme": 0}, device="cpu")
    training = Training(seq=64, lora=16, checkpointing=True)
    plan = plan_for(str(config), machine, training)
    flags = plan.change.split()
    assert not plan.fits and flags[:2] == ["--quantize", "nf4"] and flags[2] == "--nvme"
    assert "a base in nf4 rather than in 16 bits" in plan.change_in_words
    assert words.train_arguments(plan, "adamw_torch").find("--lora 16 --quantize nf4") > 0
    more = machine_of({"device_mem": 33 << 20, "nvme": parse_bytes(flags[3])}, device="cpu")
    asked = plan_for(str(config), more, replace(training, quantize="nf4"))
    assert asked.fits and asked.homes == plan.homes
    with pytest.raises(ValueError, match="quantize='nf4' with lora=0; expected one of"):
        replace(training, quantize="nf4", lora=0)


def test_what_is_faster_is_said_and_planned(config):
    """Activations that are kept, and RAM in place of a disk."""
    machine = machine_of({"device_mem": 200 << 20, "host_mem": 100 << 20, **DISK})
    asked = ask(str(config), machine, Training(seq=64, checkpointing=True, accumulate=2))
    plan = answer(asked)
    assert plan.fits and plan.homes["state"].get("nvme")
    found = dict(plan.faster)
    more = [flags for flags in found if flags.startswith("--host-mem")]
    assert len(more) == 1 and all(seconds < 0.93 * plan.seconds for seconds in found.values())
    size = int(more[0].split()[1].removesuffix("MiB"))
    again = answer(on(asked, host_mem=size))
    assert again.fits and again.seconds == pytest.approx(found[more[0]], rel=0.02)
    said = list(words.five_lines("it", plan))
    assert f"with {more[0]} a step takes about {found[more[0]]:.3g} s" in said
