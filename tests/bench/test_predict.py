from types import SimpleNamespace

from bench.predict import CASES, device_bytes, rows
from gemini.placement.predict import KINDS, TIERS, Profile


def test_rows_are_of_the_tiers_that_hold_anything():
    found = rows("m", {"device": 103, "nvme": 0}, {"device": 100, "nvme": 0})
    assert [(r["tier"], r["predicted_bytes"], r["measured_bytes"]) for r in found] == [
        ("device", 103, 100)
    ]
    assert abs(found[0]["error"] - 0.03) < 1e-9


def test_gradients_that_a_tail_holds_count_in_the_forward():
    rows = {(tier, kind): (0,) * 4 for tier in TIERS for kind in KINDS}
    rows[TIERS[0], "non-model"] = (10, 20, 25, 5)
    tail = SimpleNamespace(kept_bytes=(9, 8))
    planned = SimpleNamespace(profile=Profile(rows), overlapped={"tail": tail})
    assert device_bytes(planned, "serial") == 25
    assert device_bytes(planned, "tail") == 28


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    wanted = {"gpt2", "gpt2+nvme1", "gpt2+nvme1+tail", "gpt2+lora16", "gpt2+malloc"}
    assert wanted | {"bert-base", "t5-small", "vit-base"} <= {*names}
