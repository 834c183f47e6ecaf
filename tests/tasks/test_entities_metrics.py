"""Entity scores: equal to seqeval in both modes and to conlleval, on tags of every kind, ill-formed ones too."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import accuracy_score, classification_report
from seqeval.scheme import IOB2

from finetune.tasks.entities import metrics as metrics
from finetune.tasks.entities.metrics import (
    EntityCounts,
    EntitySpans,
    count,
    detect_scheme,
    encode_tags,
    find_entities,
    scheme_violations,
    write_prefixes,
)

TYPES = ("-PER", "-LOC", "-a-b")
BARE = (*TYPES, "")  # seqeval calls the type of a bare prefix `_`


def compare(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], rule: Any = "conlleval") -> EntityCounts:
    """`count` for tags as text."""
    truth = encode_tags(gold)
    return count(truth, encode_tags(predicted, truth.names), rule)


def tags_of(prefixes: str, types: tuple[str, ...] = TYPES) -> st.SearchStrategy[str]:
    inside = st.builds("{}{}".format, st.sampled_from(prefixes), st.sampled_from(types))
    return st.one_of(st.just("O"), inside, inside)


def pairs_of(prefixes: str, types: tuple[str, ...] = TYPES) -> st.SearchStrategy[list[tuple[list[str], list[str]]]]:
    """Sentences as (gold, predicted), half of the predicted tags right."""
    tag = tags_of(prefixes, types)
    word = st.tuples(tag, tag, st.booleans()).map(lambda one: (one[0], one[0] if one[2] else one[1]))
    sentence = st.lists(word, max_size=12).map(lambda words: ([w[0] for w in words], [w[1] for w in words]))
    return st.lists(sentence, min_size=1, max_size=5)


def split(pairs: list[tuple[list[str], list[str]]]) -> tuple[list[list[str]], list[list[str]]]:
    return [gold for gold, _ in pairs], [predicted for _, predicted in pairs]


def seqeval_report(gold: list[list[str]], predicted: list[list[str]], **mode: object) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scores over nothing
        return classification_report(gold, predicted, output_dict=True, **mode)  # pyright: ignore


def assert_equal_to_seqeval(counts: metrics.EntityCounts, report: dict) -> None:
    by_type = {name: scores for name, scores in report.items() if not name.endswith(" avg")}
    assert set(counts.by_type) == set(by_type)
    for name, scores in by_type.items():
        ours = counts.by_type[name]
        assert ours["support"] == scores["support"]
        for ours_name, name_there in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            assert ours[ours_name] == pytest.approx(scores[name_there])
            assert counts.overall[ours_name] == pytest.approx(report["micro avg"][name_there])
    assert counts.macro_f1 == pytest.approx(report["macro avg"]["f1-score"])


@settings(deadline=None, max_examples=150)
@given(pairs_of("BIES", BARE))
def test_default_mode_is_seqevals(pairs):
    gold, predicted = split(pairs)
    if any(tag != "O" for sentence in gold + predicted for tag in sentence):  # seqeval's report fails without any
        assert_equal_to_seqeval(compare(gold, predicted), seqeval_report(gold, predicted))
    if any(gold):
        truth = encode_tags(gold)
        ours = metrics.accuracy(truth, encode_tags(predicted, truth.names))
        assert ours == pytest.approx(accuracy_score(gold, predicted))


@settings(deadline=None, max_examples=150)
@given(pairs_of("BI", BARE))
def test_the_strict_mode_is_seqevals(pairs):
    gold, predicted = split(pairs)
    counts = compare(gold, predicted, "iob2")
    if counts.gold.sum() + counts.predicted.sum():
        assert_equal_to_seqeval(counts, seqeval_report(gold, predicted, mode="strict", scheme=IOB2))


def conlleval(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, list[int]]:
    """{type or "": [gold, predicted, correct]} as the Perl script counts them in one pass over lines.

    A line of O stands for the blank one between sentences. A chunk is right if both begin on the same line with
    the same type, go on together, and end on the same line.
    """

    def parts(tag: str) -> tuple[str, str]:
        prefix, _, kind = tag.partition("-")
        return prefix, kind

    def ends(before: tuple[str, str], now: tuple[str, str]) -> bool:
        return before[0] in "BI" and (now[0] in "BO" or before[1] != now[1])

    def begins(before: tuple[str, str], now: tuple[str, str]) -> bool:
        return now[0] == "B" or (now[0] == "I" and (before[0] == "O" or before[1] != now[1]))

    counts: dict[str, list[int]] = {}
    lines = [line for g, p in zip(gold, predicted, strict=True) for line in [*zip(g, p, strict=True), ("O", "O")]]
    right = False
    before_g = before_p = ("O", "")
    for now_g, now_p in ((parts(g), parts(p)) for g, p in lines):
        ends_g, ends_p = ends(before_g, now_g), ends(before_p, now_p)
        if right and ends_g and ends_p:
            counts[before_g[1]][2] += 1
        if ends_g or ends_p:
            right = False
        begins_g, begins_p = begins(before_g, now_g), begins(before_p, now_p)
        if begins_g:
            counts.setdefault(now_g[1], [0, 0, 0])[0] += 1
        if begins_p:
            counts.setdefault(now_p[1], [0, 0, 0])[1] += 1
        if begins_g and begins_p and now_g[1] == now_p[1]:
            right = True
        elif begins_g or begins_p:
            right = False
        before_g, before_p = now_g, now_p
    return counts


@settings(deadline=None, max_examples=200)
@given(pairs_of("BI"))
def test_counts_are_those_of_conlleval(pairs):
    gold, predicted = split(pairs)
    counts = compare(gold, predicted)
    ours = {
        name: [int(of[place]) for of in (counts.gold, counts.predicted, counts.correct)]
        for place, name in enumerate(counts.names)
        if counts.gold[place] or counts.predicted[place]
    }
    assert ours == conlleval(gold, predicted)


@pytest.mark.parametrize("rule", ["conlleval", "iob2"])
def test_nothing_to_find_scores_zero(rule):
    for gold in ([["O", "O"]], [[]], []):
        assert compare(gold, gold, rule).overall == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
        assert compare(gold, gold, rule).macro_f1 == 0.0
    assert metrics.accuracy(encode_tags([]), encode_tags([])) == 0.0


@pytest.mark.parametrize("tag", ["X-PER", "", "Org"])
def test_what_cannot_be_scored_is_refused(tag):
    with pytest.raises(ValueError, match=f"'{tag}' is not a tag"):
        encode_tags([[tag]])


@st.composite
def entities(draw: st.DrawFn) -> tuple[EntitySpans, np.ndarray]:
    """Entities of some sentences, neighbors of the same type among them, and where the sentences begin."""
    starts, first, behind, types, word = [0], [], [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        for gap, length, kind in draw(
            st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 1)), max_size=4)
        ):
            word += gap
            first.append(word)
            word += length
            behind.append(word)
            types.append(kind)
        word += draw(st.integers(0, 2))
        starts.append(word)
    return EntitySpans(np.array(first, int), np.array(behind, int), np.array(types, int)), np.array(starts)


@settings(deadline=None)
@given(entities(), st.sampled_from(["iob1", "iob2", "bioes"]))
def test_every_scheme_gives_back_what_was_written(case, scheme):
    spans, starts = case
    prefixes = write_prefixes(spans, starts, scheme)
    types = np.full(len(prefixes), -1)
    for first, behind, kind in zip(spans.first, spans.end, spans.types, strict=True):
        types[first:behind] = kind
    tags = metrics.TaggedSentences(prefixes, types, starts, ("PER", "LOC"))
    rules: list[metrics.Rule] = ["conlleval", "iob2"] if scheme == "iob2" else ["conlleval"]
    for rule in rules:
        found = find_entities(tags, rule)
        for ours, expected in ((found.first, spans.first), (found.end, spans.end), (found.types, spans.types)):
            assert ours.tolist() == expected.tolist()
    assert len(scheme_violations(tags, scheme)) == 0


@pytest.mark.parametrize(
    ("tags", "scheme"),
    [
        ("I-PER I-PER O I-LOC B-LOC", "iob1"),
        ("I-PER", "iob1"),
        ("B-PER I-PER O B-LOC B-LOC", "iob2"),
        ("O O", "iob2"),
        ("B-PER E-PER O", "bioes"),
        ("O S-PER", "bioes"),
        ("B-PER O B-PER I-PER O B-LOC O I-LOC", "iob2"),  # one slip of four
    ],
)
def test_the_scheme_is_seen(tags, scheme):
    assert detect_scheme(encode_tags([tags.split()])) == scheme


@pytest.mark.parametrize(
    ("sentences", "scheme", "slips"),
    [
        ([["B-PER", "O", "I-PER"], ["I-PER"]], "iob2", [2, 3]),
        ([["B-PER", "B-PER"]], "iob1", [0]),
        ([["I-PER"], ["I-PER", "B-PER"]], "iob1", []),  # sentences part them already
        ([["B-PER", "I-PER", "O", "S-PER"]], "bioes", [1]),
    ],
)
def test_slips_are_found_where_they_are(sentences, scheme, slips):
    assert scheme_violations(encode_tags(sentences), scheme).tolist() == slips
