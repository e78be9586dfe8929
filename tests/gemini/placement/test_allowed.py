"""Which updates overlap a pass: every rule alone, with its reason, and what it leaves."""

from dataclasses import replace

import pytest

from gemini.placement.tiers import Tier
from gemini.placement.timetable.allowed import EARLY, RULES, TAIL, OverlapFacts, against, allowed
from gemini.placement.timetable.updates import UPDATES

ON_DISK = OverlapFacts(
    state_homes=frozenset({Tier.NVME}),
    has_files=False,
    has_host_tier=False,
    has_masters=True,
    has_buffers=True,
    has_room=True,
)
ON_HOST = replace(ON_DISK, state_homes=frozenset({Tier.HOST, Tier.NVME}), has_host_tier=True)
IN_FILES = replace(ON_DISK, has_files=True)

# facts, the parts that a rule is against, and a word of its reason
CASES = [
    (replace(ON_DISK, state_homes=frozenset({Tier.DEVICE})), (TAIL, EARLY), "device|NVMe"),
    (replace(ON_DISK, state_homes=frozenset()), (TAIL, EARLY), "device|NVMe"),
    (replace(ON_HOST, has_files=True), (TAIL, EARLY), "memory of its own"),
    (replace(ON_HOST, state_homes=frozenset({Tier.NVME})), (TAIL, EARLY), "memory of its own"),
    (ON_HOST, (EARLY,), "memory of its own"),
    (replace(IN_FILES, has_buffers=False), (TAIL, EARLY), "no room for blocks"),
    (replace(ON_DISK, has_buffers=False), (EARLY,), "no room for blocks"),
    (replace(ON_DISK, has_room=False), (TAIL,), "live into a forward"),
    (replace(ON_DISK, has_masters=False), (EARLY,), "masters"),
    (replace(ON_DISK, state_homes=frozenset({Tier.HOST})), (EARLY,), "no state is on NVMe"),
    (replace(ON_DISK, is_gathered=True), (TAIL, EARLY), "kept gathered"),
    (replace(ON_DISK, is_stage=True), (TAIL, EARLY), "pipeline"),
    (replace(ON_DISK, is_split=True), (TAIL, EARLY), "split"),
    (replace(ON_DISK, is_joint=True), (TAIL, EARLY), "several modules"),
    (replace(ON_DISK, needs_wholes=True), (TAIL, EARLY), "as a whole"),
]


@pytest.mark.parametrize(("facts", "parts", "words"), CASES)
def test_a_rule_leaves_what_it_is_not_against(facts, parts, words):
    for part in (TAIL, EARLY):
        reason = against(part, facts)
        assert (reason is not None) == (part in parts), reason
        assert reason is None or any(word in reason for word in words.split("|"))
    has_tail, is_early = TAIL not in parts, EARLY not in parts
    names = {(True, True): "both", (True, False): "tail", (False, True): "speculate"}
    assert allowed("both", facts) == names.get((has_tail, is_early), "serial")
    assert allowed("tail", facts) == ("tail" if has_tail else "serial")
    assert allowed("speculate", facts) == ("speculate" if is_early else "serial")


@pytest.mark.parametrize("facts", [ON_DISK, IN_FILES])
def test_without_a_rule_an_update_is_as_it_was_asked_for(facts):
    assert [allowed(update, facts) for update in UPDATES] == list(UPDATES)


def test_every_rule_is_the_reason_of_some_case():
    told = {against(part, facts) for facts, parts, _ in CASES for part in parts}
    assert {reason for _, reason, _ in RULES} == told
