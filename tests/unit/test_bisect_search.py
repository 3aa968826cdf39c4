"""The search for culprits, alone: every pair of 24 changes, triples, alternatives, answers that are not monotone."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ortlab.studies.bisection_search import smallest_set, smallest_sets

CHANGES = [f"switch_{number}" for number in range(24)]
ALL = frozenset(CHANGES)


class Counted:
    """A test that remembers what it was asked, as the lab's does."""

    def __init__(self, predicate) -> None:
        self.predicate = predicate
        self.asked = {}

    def __call__(self, names):
        assert names not in self.asked or self.asked[names] == self.predicate(names)
        self.asked[names] = self.predicate(names)
        return self.asked[names]


@pytest.mark.parametrize("culprit", CHANGES)
def test_one_culprit_is_found_in_few_runs(culprit):
    test = Counted(lambda names: culprit in names)
    assert test(ALL)
    assert not test(frozenset())
    (found,) = smallest_sets(CHANGES, test)
    assert found.names == (culprit,)
    repeated_baseline = 1
    assert len(test.asked) + repeated_baseline <= 2 * math.log2(24) + 4


def test_every_pair_that_acts_together_is_found():
    for pair in itertools.combinations(CHANGES, 2):
        test = Counted(set(pair).issubset)
        (found,) = smallest_sets(CHANGES, test)
        assert found.names == pair
        assert len(test.asked) <= 2 * (math.ceil(math.log2(24)) + 2) + 1


def test_every_pair_that_acts_each_alone_is_found():
    for one, other in itertools.combinations(CHANGES, 2):
        found = smallest_sets(CHANGES, Counted(lambda names, pair={one, other}: bool(pair & names)))
        assert {culprits.names for culprits in found} == {(one,), (other,)}


def test_three_that_act_together_are_found():
    triples = random.Random(1).sample(list(itertools.combinations(CHANGES, 3)), 200)
    for triple in triples:
        (found,) = smallest_sets(CHANGES, Counted(set(triple).issubset))
        assert found.names == triple


def test_a_pair_beside_one_that_acts_alone():
    found = smallest_sets(
        CHANGES, Counted(lambda names: {"switch_3", "switch_20"} <= names or "switch_11" in names)
    )
    assert {culprits.names for culprits in found} == {("switch_3", "switch_20"), ("switch_11",)}


def test_a_change_that_hides_another_does_not_mislead():
    # The effect of 5 is hidden where 9 stands without 17.
    def shows(names):
        return "switch_5" in names and not ("switch_9" in names and "switch_17" not in names)

    (found,) = smallest_sets(CHANGES, Counted(shows))
    assert found.names == ("switch_5",)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_the_answers_what_is_found_shows_it_and_nothing_in_it_is_idle(seed):
    names = CHANGES[:9]
    draw = random.Random(seed)
    answers = {frozenset(names): True, frozenset(): False}

    def answer(some):
        return answers.setdefault(some, draw.choice([True, False, False, None]))

    found = smallest_set(names, answer)
    assert answers[frozenset(found.names)] is True
    grouped = {name for group in found.together for name in group}
    groups = [*found.together, *((name,) for name in found.names if name not in grouped)]
    assert sorted(name for group in groups for name in group) == sorted(found.names)
    for group in groups:
        left = frozenset(found.names) - set(group)
        assert not left or answers[left] is not True


def test_changes_that_stand_only_together_are_named_together():
    def shows(names):
        half = len({"switch_7", "switch_8"} & names) == 1
        return None if half else "switch_7" in names

    (found,) = smallest_sets(CHANGES, Counted(shows))
    assert found.names == ("switch_7", "switch_8")
    assert found.together == (("switch_7", "switch_8"),)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("changes", [CHANGES, CHANGES[:1]])
@pytest.mark.parametrize("answer", [None, False])
def test_where_noise_hides_every_answer_all_changes_are_the_answer(changes, answer):
    found = smallest_set(changes, Counted(lambda _: answer))
    assert set(found.names) == set(changes)
