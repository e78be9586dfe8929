"""Plans of runs whose activations may leave the device: `Training(activations="spill")`."""

from dataclasses import replace

from gemini.placement.tiers import Tier
from gemini.plan import words
from gemini.plan.ask import ask
from gemini.plan.machine import machine_of
from gemini.plan.training import Training

MIB = 1 << 20


def test_activations_that_may_leave_the_device_are_planned_and_said(config):
    """Of 935 MiB that a batch needs, backward needs 716 later: on 600 MiB it fits, and a line has
    the bytes of each tier. Nothing leaves a device with room for all."""
    machine = machine_of({"device_mem": 600 * MIB, "host_mem": 8192 * MIB}, gpu="rtx4090")
    training = Training(seq=512, batch=8, activations="spill")
    asked = ask(str(config), machine, training)
    assert not replace(asked, activations="keep").fits()
    plan = words.answer(asked, training.in_words())
    saved, profile = plan.result.plan.saved, plan.result.profile
    assert plan.fits and saved.host_bytes > 300 * MIB and not saved.nvme_bytes
    assert profile.peak(Tier.DEVICE) <= asked.machine.budgets().device
    said = list(words.five_lines("llama", plan))
    assert f"{saved} of a rank, of those that backward needs" in said
    assert "the oldest below the device where it has no room" in "".join(said)
    assert 2 * saved.host_bytes <= sum(plan.result.plan.bytes_moved().values())
    roomy = replace(asked, machine=machine_of({}, gpu="rtx4090"))
    assert roomy.planned().plan == replace(roomy, activations="keep").planned().plan


def test_layers_are_computed_again_where_nothing_else_fits_or_is_faster(config):
    """On 450 MiB beside little RAM; on more, nothing is computed twice."""
    machine = machine_of({"device_mem": 600 * MIB, "host_mem": 400 * MIB}, gpu="rtx4090")
    training = Training(seq=512, batch=8, activations="auto")
    asked = ask(str(config), machine, training)
    plan = words.answer(asked, training.in_words())
    planned = plan.result.plan.recomputed
    assert 0 < len(planned.names) <= planned.num_layers and planned.seconds > 0
    assert f"{planned} a step" in words.five_lines("llama", plan)
    assert "--activations auto" in words.train_arguments(plan, "adamw_torch")
    roomy = replace(asked, machine=machine_of({}, gpu="rtx4090"))
    assert roomy.planned().plan == replace(roomy, activations="keep").planned().plan
