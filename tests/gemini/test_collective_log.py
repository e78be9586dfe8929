"""What ranks compare of what they did."""

from gemini.comm.collective_log import (
    Entry,
    SequenceLog,
    Wish,
    explain_difference,
    first_difference,
)


def log_of(*done):
    log = SequenceLog()
    for kind, subject in done:
        log.record(kind, subject)
    return log


def test_the_digest_is_of_kinds_subjects_and_their_order():
    logs = [
        (("gathers", 1), ("reduces", 2)), (("reduces", 2), ("gathers", 1)),
        (("gathers", 2), ("reduces", 2)), (("gathers", 1),), (("gathers", 1), ("gathers", 2)),
    ]  # fmt: skip
    assert len({log_of(*done).digest for done in logs}) == len(logs)
    assert log_of(*logs[0]).digest == log_of(*logs[0]).digest != 0


def test_the_first_difference_is_found_and_a_rank_that_is_behind_does_not_differ():
    ahead = log_of(("gathers", 1), ("gathers", 2), ("gathers", 3))
    behind, other = log_of(("gathers", 1)), log_of(("gathers", 1), ("gathers", 5), ("gathers", 6))
    entries = [SequenceLog.decode(log.encode()) for log in (ahead, behind, other)]
    assert first_difference(entries[:2]) is None
    found = first_difference(entries)
    assert found == (0, Entry(1, "gathers", 2), 2, Entry(1, "gathers", 5))
    said = str(explain_difference(found, lambda chunk: f"layer {chunk}"))
    assert "rank 0 gathers layer 2" in said and "rank 2 gathers layer 5" in said


def test_what_two_ranks_wait_for_may_be_their_own_but_for_calls():
    def waiting(kind, subject):
        log = SequenceLog()
        log.wait(kind, subject)
        return SequenceLog.decode(log.encode())

    assert first_difference([waiting("reads", "a"), waiting("reads", "b")]) is None
    found = first_difference([waiting("calls", "a"), waiting("calls", "b")])
    assert "All ranks must call a; take it out" in str(explain_difference(found, str))


def test_a_rank_that_waited_for_what_the_others_met_for_does_not_differ():
    """What it published meanwhile is still there when another wait is late."""
    late, others, alone = SequenceLog(), SequenceLog(), log_of(("gathers", 1))
    late.wait("reads", "a")
    others.record("reads", "a and b", met=True)
    entries = [SequenceLog.decode(log.encode()) for log in (late, others, alone)]
    assert first_difference(entries[:2]) is None
    assert first_difference(entries[1::-1]) is None
    assert first_difference([entries[0], entries[2]]) is not None


def test_wishes_that_no_one_deed_meets_differ():
    reads, calls = ([Wish(kind, {name: name}) for name in "ab"] for kind in ("reads", "calls"))
    assert not reads[0].differs_from(reads[1]) and not calls[0].differs_from(calls[0])
    assert calls[0].differs_from(calls[1]) and reads[0].differs_from(calls[0])
