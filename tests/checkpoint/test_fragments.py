"""The list of fragments in a checkpoint's manifest: short, and every part of it is found."""

import itertools
import random
from typing import Any

import pytest

from pretrain.checkpoint.store import FragmentIndex
from pretrain.checkpoint.writing import packed

KINDS = ["weight", "exp_avg"]


def files(ranks: int) -> list[str]:
    return [f"rank-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]


def entry(name: str, start: int, stop: int, rank: int) -> dict[str, Any]:
    return {"name": name, "start": start, "numel": stop - start, "kinds": KINDS, "rank": rank}


def cut_equally(name: str, numel: int, ranks: int) -> list[dict[str, Any]]:
    part = -(-numel // ranks)
    bounds = [(part * rank, min(numel, part * (rank + 1))) for rank in range(ranks)]
    return [entry(name, start, stop, rank) for rank, (start, stop) in enumerate(bounds) if start < stop]


@pytest.mark.parametrize("ranks", [1, 8, 1024])
def test_equal_parts_are_one_entry(ranks: int) -> None:
    names = [f"layers.{number}" for number in range(10)]
    shards = [cut_equally(name, 100_001, ranks) for name in names]
    listed = packed(itertools.chain(*zip(*shards, strict=True)))
    assert len(listed) <= 2 * len(names), "the parts, and the shorter last one"


def test_any_range_is_found_whatever_the_fragments() -> None:
    choose = random.Random(0)
    for _ in range(300):
        ranks, numel = choose.randint(1, 9), choose.randint(1, 60)
        cuts = sorted({0, numel, *(choose.randint(1, numel) for _ in range(choose.randint(0, 6)))})
        uneven = [entry("a", a, b, choose.randrange(ranks)) for a, b in itertools.pairwise(cuts)]
        for fragments in (uneven, cut_equally("a", numel, ranks)):
            choose.shuffle(fragments)
            index = FragmentIndex(packed(fragments), files(ranks))
            start = choose.randrange(numel)
            stop = choose.randint(start + 1, numel)
            found = list(index.covering("exp_avg", "a", start, stop))
            expected = sorted(
                (p["start"], p["start"] + p["numel"], files(ranks)[p["rank"]])
                for p in fragments
                if p["start"] < stop and p["start"] + p["numel"] > start
            )
            assert [tuple(fragment) for fragment in found] == expected


def test_another_name_or_kind_has_no_fragments() -> None:
    index = FragmentIndex(packed([entry("a", 0, 5, 0)]), files(1))
    assert not list(index.covering("weight", "b", 0, 5))
    assert not list(index.covering("average", "a", 0, 5))


def test_parts_on_other_ranks_in_turn_are_not_joined() -> None:
    fragments = [entry("a", 0, 5, 0), entry("a", 5, 10, 2), entry("a", 10, 15, 3), entry("b", 15, 20, 4)]
    assert [(run["start"], run.get("parts", 1)) for run in packed(fragments)] == [(0, 1), (5, 2), (15, 1)]
