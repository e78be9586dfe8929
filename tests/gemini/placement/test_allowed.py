"""Which updates overlap a pass: every rule alone, with its reason, and what it leaves."""

import warnings
from dataclasses import replace

import pytest

from gemini.placement.tiers import Tier
from gemini.placement.timetable.allowed import (
    NO_TAIL_MADE,
    NOT_MADE,
    RULES,
    OverlapFacts,
    against_tail,
    allowed,
)
from gemini.placement.timetable.updates import RETIRED, SERIAL, TAIL, UPDATES, current_update

ON_DISK = OverlapFacts(
    state_homes=frozenset({Tier.NVME}),
    has_files=False,
    has_buffers=True,
    has_room=True,
)
ON_HOST = replace(ON_DISK, state_homes=frozenset({Tier.HOST, Tier.NVME}))
IN_FILES = replace(ON_DISK, has_files=True)

# facts, and a word of the reason against a tail
CASES = [
    (replace(ON_DISK, state_homes=frozenset({Tier.DEVICE})), "all state is on the device"),
    (replace(ON_DISK, state_homes=frozenset()), "all state is on the device"),
    (replace(IN_FILES, has_buffers=False), "no room for blocks"),
    (replace(ON_DISK, has_room=False), "live into a forward"),
    (replace(ON_DISK, is_gathered=True), "kept gathered"),
    (replace(ON_DISK, is_stage=True), "pipeline"),
    (replace(ON_DISK, is_split=True), "split"),
    (replace(ON_DISK, is_joint=True), "several modules"),
    (replace(ON_DISK, needs_wholes=True), "as a whole"),
]


@pytest.mark.parametrize(("facts", "words"), CASES)
def test_a_rule_against_a_tail_leaves_a_serial_step(facts, words):
    reason = against_tail(facts)
    assert reason is not None and words in reason
    assert allowed(TAIL, facts) == allowed(SERIAL, facts) == SERIAL


@pytest.mark.parametrize(
    "facts",
    [
        ON_DISK,
        ON_HOST,
        IN_FILES,
        replace(ON_HOST, has_files=True),
        replace(ON_DISK, has_buffers=False),
    ],
)
def test_without_a_rule_an_update_is_as_it_was_asked_for(facts):
    assert [allowed(update, facts) for update in UPDATES] == list(UPDATES)


def test_every_rule_is_the_reason_of_some_case():
    rules = (*RULES, *NOT_MADE, *NO_TAIL_MADE)
    assert {reason for reason, _ in rules} == {against_tail(facts) for facts, _ in CASES}


@pytest.mark.parametrize("update", RETIRED)
def test_an_update_of_earlier_versions_is_a_tail_and_says_so_once(update):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        warned = [current_update(update, by_kernels=False) for _ in range(3)]
    assert warned == [TAIL] * 3
    (one,) = told
    assert one.category is FutureWarning and f'update="{update}" is no longer' in str(one.message)


def test_an_update_of_today_is_itself_without_a_word_and_others_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [current_update(update, by_kernels=False) for update in UPDATES] == list(UPDATES)
    with pytest.raises(ValueError, match="expected one of"):
        current_update("late", by_kernels=True)
