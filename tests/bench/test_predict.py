from bench.predict import CASES, rows


def test_rows_are_of_the_tiers_that_hold_anything():
    found = rows("m", {"device": 103, "nvme": 0}, {"device": 100, "nvme": 0})
    assert [(r["tier"], r["predicted_bytes"], r["measured_bytes"]) for r in found] == [
        ("device", 103, 100)
    ]
    assert abs(found[0]["error"] - 0.03) < 1e-9


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {"gpt2", "gpt2+lora16", "gpt2+malloc", "bert-base", "t5-small", "vit-base"} <= {*names}
