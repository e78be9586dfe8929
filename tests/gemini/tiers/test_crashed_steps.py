"""Power lost at any point of training with parameters and state on disk: one step is in both."""

import pytest
import torch

import nvme
from bench.shared.models import token_batches
from gemini import AutoPlacement
from tests.support.checkpoints import train
from tests.support.disks.crashes import check_recording, explore
from tests.support.disks.recording import recorded
from tests.support.spilled import LEAST, N, homes, wrapped

NOT_KEPT = ("gradients", "sums", "originals")  # files of one version, worth nothing after a crash


def steps(folder, count):
    """Record `count` steps. Names of the two files, and the blocks of both after every step."""
    with recorded(folder, NOT_KEPT) as log:
        model, optimizer = wrapped(AutoPlacement(LEAST.device_budget, nvme_dir=str(folder)))
        assert homes(model)[0] == {N} == homes(model)[2]  # all of both
        optimizer.bind()
        target = model.engine.target
        stores = (model.engine.storage.params.store, target.tiered_state.nvme.store)
        expected = {}
        for step in range(1, count + 1):
            log.note(("begins", step))
            train(model, optimizer, token_batches(step, 1)[step - 1 :])
            expected[step] = tuple(map(blocks_of, stores))
            log.note(("ends", step))
        check_recording(log)
        names = [store.paths[0].name for store in stores]
        whole = len(log.ops)
        optimizer.close()
        del log.ops[whole:]
    return log, names, expected


def blocks_of(store, step=None):
    with nvme.recover(
        store.paths if isinstance(store, nvme.BlockStore) else [store], step
    ) as found:
        return [found.block(i) for i in range(found.layout.num_blocks)]


def step_of(path):
    with nvme.recover([path]) as found:
        return found.index.step


def rounded(state_block):
    """Masters, the first of three planes, as the parameters are."""
    planes = torch.frombuffer(bytearray(state_block), dtype=torch.float32)
    return planes[: planes.numel() // 3].bfloat16()


def checker(names, expected):
    """Demands weights and state of one step, which is not before the last that had ended."""

    def check(crash):
        begun = [step for kind, step in crash.notes if kind == "begins"]
        ended = [step for kind, step in crash.notes if kind == "ends"]
        params, state = (crash.folder / name for name in names)
        try:
            last = step_of(params), step_of(state)
        except nvme.StoreFormatError:
            assert not ended, "a step that had ended is gone"
            return
        assert 0 <= last[0] - last[1] <= 1, "parameters count first"
        step = min(last)
        assert (ended or [0])[-1] <= step <= (begun or [0])[-1]
        if step == 0:  # the values that the run began with
            return
        weights, planes = blocks_of(params, step), blocks_of(state, step)
        assert (weights, planes) == expected[step]
        weights = torch.frombuffer(bytearray(b"".join(weights)), dtype=torch.bfloat16)
        assert torch.equal(weights, torch.cat([rounded(block) for block in planes]))

    return check


@pytest.mark.ci
def test_a_power_loss_in_a_step_leaves_weights_and_state_of_one_step(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    log, names, expected = steps(folder, 2)
    check = checker(names, expected)
    explored = explore(log, tmp_path / "after", check, samples=1, most=3)
    assert explored > 150


@pytest.mark.deep
def test_a_power_loss_in_a_step_leaves_one_step_in_any_of_thousands_of_states(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    log, names, expected = steps(folder, 4)
    check = checker(names, expected)
    explored = explore(log, tmp_path / "after", check, samples=10, most=40)
    print(f"{explored} states of parameters and state on disk")
    assert explored > 6000
