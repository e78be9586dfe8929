"""The table of docs/pipelines.md: each row with the tests that hold it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PLACES = (
    "tests/dist/meshes/test_pipelines.py",
    "tests/gemini/pipelines/test_seats.py",
    "tests/integrations/parallel/test_hybrid.py",
)
SPLIT = "test_what_is_split_cut_and_copied_trains_as_one_process"
EXACT = "test_a_pipeline_trains_as_one_process_does"
REFUSED = "test_what_cannot_be_is_refused_by_name"
HELD_BY = {
    "GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV": EXACT,
    "ZeRO-2, ZeRO-3": "test_a_stage_is_gathered_once_for_all_micro_batches",
    "bf16, fp32": "test_in_bf16_a_pipeline_trains_as_fp32_does_to_its_rounding",
    "fp16": "test_in_fp16_halves_of_backwards_have_one_loss_scale",
    '`"tp"` and replicas in the mesh': SPLIT,
    "state on host memory or NVMe": "test_state_on_disk_has_the_same_bits",
    "budgets (`AutoPlacement`)": "test_without_room_micro_batches_gather_for_themselves",
    "calls of the schedule that add up before a step": "test_calls_of_a_schedule_add_up",
    'clip by norm, steps that are skipped, `on_nonfinite="raise"`': (
        "test_a_clip_is_one_of_the_whole_model",
        "test_a_gradient_that_is_not_finite_lets_all_stages_skip",
    ),
    "`schedule.eval`": "test_an_evaluation_between_steps_changes_nothing",
    "`save_checkpoint`, `load_checkpoint`, `async_save`": (
        "test_a_checkpoint_loads_at_any_number_of_stages"
    ),
    "exports, `save_pretrained`, `load_pretrained`": REFUSED,
    "a stage's output that depends on weights and on no input": (
        "test_a_weight_that_meets_no_input_is_found"
    ),
    "a weight that two stages tie": REFUSED,
    "several optimizers for the parts of a process": REFUSED,
    "`dw_builder`": REFUSED,
    "other dimensions of the mesh": REFUSED,
    "`model.state_dict()`, `optimizer.state_dict()`, `digest()`": EXACT,
}


def test_every_row_of_the_table_is_held_by_a_test():
    page = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)
    assert rows == list(HELD_BY)
    tests = "".join((ROOT / place).read_text(encoding="utf-8") for place in PLACES)
    for held_by in HELD_BY.values():
        for name in (held_by,) if isinstance(held_by, str) else held_by:
            assert f"def {name}(" in tests, name
