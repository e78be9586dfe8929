"""What a step uploads: nothing, where gradients are in memory that they were in before."""

from types import SimpleNamespace

import torch

from kernels_triton.control_fields import NORM
from kernels_triton.launch import Launch
from kernels_triton.tiles import GRAD, PARAM, SegmentRow
from optim.state.memory import CpuMemory
from optim.state.pieces import GradSegment
from optim.update import grad_tiles, launch_tables
from optim.update.grad_tiles import GradTiles
from optim.update.launch_tables import VARIANTS, TableVariants
from optim.update.triton_update import DeviceOutcome

CPU = torch.device("cpu")
DTYPES = torch.bfloat16, torch.bfloat16


def keyed(address, count=2):
    return [(DTYPES, SegmentRow(4096 * i, address + 64 * i, 0, 64, i)) for i in range(count)]


def addresses(tables):
    return tables.segments[:, GRAD].tolist()


def made_of(variants, monkeypatch, turns):
    """Addresses in the tables of each turn, and how many tables were uploaded."""
    uploads, real = [], launch_tables.segment_table
    monkeypatch.setattr(
        launch_tables, "segment_table", lambda *given: uploads.append(given) or real(*given)
    )
    found = []
    for address, key in turns:
        tables = variants.known(key)
        if tables is None:
            tables = variants.of(keyed(address), Launch(64, 1), CPU, key)
        found.append(addresses(tables))
    return found, len(uploads)


def test_gradients_that_take_turns_in_a_few_places_upload_no_table_again(monkeypatch):
    turns = [(1024 * (i % VARIANTS), None) for i in range(4 * VARIANTS)]
    found, uploads = made_of(TableVariants(), monkeypatch, turns)
    assert found == [[address, address + 64] for address, _ in turns]
    assert uploads == VARIANTS


def test_one_more_place_is_in_the_memory_of_that_used_least_lately(monkeypatch):
    variants = TableVariants()
    turns = [(1024 * i, None) for i in (*range(VARIANTS), 0, VARIANTS, 0, 1)]
    found, uploads = made_of(variants, monkeypatch, turns)
    assert found == [[address, address + 64] for address, _ in turns]
    assert uploads == VARIANTS + 2  # the new place, and 1 that it came in place of


def test_a_known_identity_asks_for_no_segments(monkeypatch):
    first, second = object(), object()
    variants = TableVariants()
    turns = [(0, first), (0, second), (512, object())]
    made_of(variants, monkeypatch, turns)
    assert variants.known(first) is variants.known(second) is not None
    assert addresses(variants.known(first)) == [0, 64]
    assert variants.known(object()) is variants.known(None) is None


def test_another_number_of_segments_has_tables_of_its_own():
    variants = TableVariants()
    for count in (2, 3, 2):
        tables = variants.of(keyed(0, count), Launch(64, 1), CPU, None)
        assert tables.segments[:, PARAM].tolist() == [4096 * i for i in range(count)]
        assert tables.tiles.shape == (count, 2)


def test_a_norm_reads_tables_of_gradients_that_take_turns_and_uploads_none_again(monkeypatch):
    """Runs are measured one by one, as their gradients leave the device."""
    tiles = GradTiles({run: [GradSegment(0, 64, run)] for run in range(3)}, CpuMemory())
    places = [[torch.zeros(64) for _ in range(3)] for _ in range(2)]
    seen = []
    for turn in range(8):
        for run in range(3):
            grad = places[turn % 2][run]
            tiles.point_at({run: grad})
            assert tiles.tables[1][run, GRAD] == grad.data_ptr()
        seen.append(tiles.tables[1].data_ptr())
    assert seen[2:] == seen[2:4] * 3 and seen[2] != seen[3]
    for _ in range(grad_tiles.VARIANTS * 4 + 1):  # in memory of those that were used least lately
        grad = torch.zeros(64)
        places.append([grad])
        tiles.point_at({1: grad})
        assert tiles.tables[1][1, GRAD] == grad.data_ptr()
        assert tiles.tables[1][0, GRAD] == places[1][0].data_ptr()


def test_an_outcome_that_is_gone_leaves_its_memory_to_the_next():
    updater = SimpleNamespace(control=torch.zeros(32, dtype=torch.float64), outcomes=[])
    first = DeviceOutcome(updater, None)
    second = DeviceOutcome(updater, None)
    assert updater.outcomes == []
    del first, second
    memory = {kept.data_ptr() for kept, _ in updater.outcomes}
    assert len(memory) == 2
    for norm in (1.0, 2.0, 3.0):
        updater.control[NORM] = norm
        again = DeviceOutcome(updater, None)
        assert len(updater.outcomes) == 1 and again.wait().grad_norm == norm
        del again
    assert {kept.data_ptr() for kept, _ in updater.outcomes} == memory
