"""What follows from heartbeats, and what their exchange costs."""

from collections import Counter
from typing import Any

import pytest

from pretrain.training import heartbeats
from pretrain.training.heartbeats import AllRanksCheck, Hang, Heartbeat, HeartbeatExchange, HeartbeatSummary, Rank0Check

WAITS = heartbeats.IN_COLLECTIVE


def heartbeat(count: int, progress_count: int = 0, **more: object) -> Heartbeat:
    usual = {"micro_batches": 0, "progress_timeout": 8.0, "silence_timeout": 8.0, "waiting_for": "", "has_ended": False}
    return Heartbeat(count, progress_count, **{**usual, "host": "a", "pid": 1, **more})  # type: ignore[arg-type]


def find(*last: dict[str, object], seconds: int = 9) -> Hang | None:
    """The finding this long after the ranks last made progress, while their heartbeats continue with these values."""
    ranks = AllRanksCheck(len(last), 0.0)
    finding = None
    for now in range(seconds + 1):
        ranks.record([heartbeat(now + 1, **one) for one in last], float(now))  # type: ignore[arg-type]
        finding = ranks.find()
        if now < seconds:
            assert finding is None
    return finding


def test_progress_of_one_rank_is_enough() -> None:
    ranks = AllRanksCheck(3, 0.0)
    for now in range(100):
        ranks.record([heartbeat(now), heartbeat(now, progress_count=now), heartbeat(now)], float(now))
        assert ranks.find() is None


OTHER = {"waiting_for": WAITS, "micro_batches": 7}


@pytest.mark.parametrize(
    ("last", "rank", "why"),
    [
        # In no collective, even where it is not behind: a rank may hang after its forward pass.
        *(((OTHER,) * n + ({"waiting_for": "", "micro_batches": 7},) + (OTHER,) * (3 - n), n, "") for n in range(4)),
        # The slowest, if stack frames do not differ.
        (({"micro_batches": 8}, {"micro_batches": 7}, {"micro_batches": 8}), 1, ""),
        (
            tuple({"micro_batches": position, "waiting_for": WAITS} for position in (8, 8, 7)),
            2,
            "all ranks have waited",
        ),
        (({"waiting_for": WAITS}, {"has_ended": True, "micro_batches": 9}, {"waiting_for": WAITS}), 1, "has ended"),
    ],
)
def test_the_rank_that_hangs_is_named(last: tuple[dict[str, object], ...], rank: int, why: str) -> None:
    named(find(*last), rank, why)


def named(finding: Hang | None, rank: int, why: str = "") -> None:
    """Assert that a rank was found to hang."""
    assert finding is not None
    assert (finding.event, finding.rank) == ("hang", rank)
    assert why in finding.reason


def test_data_stalls_apart_from_hangs() -> None:
    waiting = {"waiting_for": "a batch", "progress_timeout": 30.0, "micro_batches": 6}
    assert find({"waiting_for": WAITS}, waiting, seconds=30) is None
    finding = find({"waiting_for": WAITS}, waiting, seconds=31)
    assert finding == Hang("data_stall", 1, "has waited 31 s for a batch", "a", 1)


def test_silence_is_measured_in_rounds_that_were_heard() -> None:
    ranks = AllRanksCheck(2, 0.0)
    ranks.record([heartbeat(1), heartbeat(1)], 0.0)
    ranks.record([heartbeat(2, 1), heartbeat(2, 1)], 100.0)  # the store paused
    assert ranks.find() is None
    assert ranks.overdue_round_seconds(108.0, limit=8.0) == 0
    assert ranks.overdue_round_seconds(130.0, limit=8.0) == 30
    assert AllRanksCheck(2, 0.0).overdue_round_seconds(130.0, limit=8.0) == 0, (
        "connections take long where there are many"
    )
    for now in range(101, 109):
        ranks.record([heartbeat(now, now), heartbeat(2, 1)], float(now))
        assert ranks.find() is None
    ranks.record([heartbeat(109, 109), heartbeat(2, 1)], 109.0)
    named(ranks.find(), 1, "was silent for 9 s")


def test_an_announced_block_may_be_silent_and_an_ended_rank_for_ever() -> None:
    ranks = AllRanksCheck(3, 0.0)
    for now in range(60):
        ranks.record(
            [heartbeat(now, now), heartbeat(1, silence_timeout=60.0), heartbeat(1, has_ended=True)], float(now)
        )
        assert ranks.find() is None
    ranks.record([heartbeat(61, 61), heartbeat(1, silence_timeout=60.0), heartbeat(1, has_ended=True)], 61.0)
    named(ranks.find(), 1)


def test_a_rank_that_never_reports_has_time_to_start() -> None:
    ranks = AllRanksCheck(2, 0.0)
    for now in range(0, 1801, 60):
        ranks.record([heartbeat(now, now), None], float(now))
        assert ranks.find() is None
    ranks.record([heartbeat(1801, 1801), None], 1801.0)
    named(ranks.find(), 1, "not reported")


class TestFollower:
    def summary(self, count: int, finding: Hang | None = None, **more: object) -> HeartbeatSummary:
        return HeartbeatSummary(heartbeat(count, **more), finding)  # type: ignore[arg-type]

    def test_rank_0_is_named_where_its_summary_gets_old(self) -> None:
        follower = Rank0Check(5, patience=1.0)
        for now in range(100):
            assert follower.find(self.summary(now), 0, 8.0, float(now)) is None
        for now in range(100, 108):
            assert follower.find(self.summary(99), now, 8.0, float(now)) is None
        named(follower.find(self.summary(99), 0, 8.0, 108.5), 0)

    def test_rank_0_may_be_silent_in_an_announced_block(self) -> None:
        follower = Rank0Check(5, patience=1.0)
        assert follower.find(self.summary(1, silence_timeout=60.0), 0, 8.0, 0.0) is None
        assert follower.find(self.summary(1, silence_timeout=60.0), 0, 8.0, 60.5) is None
        assert follower.find(self.summary(1, silence_timeout=60.0), 0, 8.0, 61.5) is not None

    def test_what_rank_0_found_is_taken(self) -> None:
        finding = Hang("hang", 3, "sleeps", "b", 9)
        assert Rank0Check(5, 1.0).find(self.summary(1, finding), 0, 8.0, 0.0) == finding

    def test_a_rank_that_works_may_outlive_rank_0(self) -> None:
        follower = Rank0Check(5, patience=1.0)
        for now in range(100):
            assert follower.find(self.summary(1, has_ended=True), now, 8.0, float(now)) is None
        finding = follower.find(self.summary(1, has_ended=True), 99, 8.0, 108.0)
        assert finding is not None
        assert finding.rank == 0
        assert "rank 5 has made no progress" in finding.reason

    def test_rank_0_has_time_to_start(self) -> None:
        follower = Rank0Check(5, patience=1.0)
        assert follower.find(None, 0, 8.0, 1800.0) is None
        assert follower.find(None, 0, 8.0, 1801.0) is not None


class CountingStore:
    """A store in memory, and what it was asked."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.requests, self.bytes = Counter[str](), Counter[str]()

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.bytes["set"] += len(value)
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        self.bytes["get"] += len(self.values[key])
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        self.bytes["multi_get"] += sum(len(self.values[key]) for key in keys)
        return [self.values[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self.values.setdefault(key, desired_value)
        return self.values[key].encode()


def attached(store: Any, rank: int, size: int) -> HeartbeatExchange:
    exchange = HeartbeatExchange(rank, size)
    exchange.attach(store)
    return exchange


@pytest.fixture
def same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes: each counts its starts."""
    monkeypatch.setattr(heartbeats, "exchange_ids", iter(lambda: 0, 1))


@pytest.mark.usefixtures("same_start")
def test_a_round_costs_each_rank_two_requests_however_many_there_are() -> None:
    def requests_of_a_round(size: int) -> tuple[Counter[str], Counter[str]]:
        store = CountingStore()
        exchanges = [attached(store, rank, size) for rank in range(size)]
        exchanges[0].gather(heartbeat(1), None)
        for exchange in exchanges[1:]:
            exchange.report(heartbeat(1))
        store.requests.clear()
        store.bytes.clear()
        for exchange in exchanges[1:]:
            exchange.report(heartbeat(2, micro_batches=10**6, host="a" * 64))
        heard = exchanges[0].gather(heartbeat(2), None)
        assert [one and one.count for one in heard] == [2] * size
        counted = Counter(store.requests), Counter(store.bytes)
        finding = Hang("hang", size - 1, "sleeps", "a", 1)
        exchanges[0].gather(heartbeat(3), finding)
        summaries = [exchange.report(heartbeat(3)) for exchange in exchanges[1:]]
        assert all(summary is not None and summary.hang == finding for summary in summaries), "all ranks learn of it"
        return counted

    for size in (2, 64, 128):
        requests, _ = requests_of_a_round(size)
        assert requests == {"set": size, "get": size - 1, "multi_get": 1}
    (_, few), (_, many) = requests_of_a_round(64), requests_of_a_round(128)
    assert few["get"] / 63 == many["get"] / 127, "the summary does not grow"
    assert sum(many.values()) < 2.1 * sum(few.values())
    assert sum(many.values()) / 128 < 500


def test_a_second_start_in_the_same_processes_hears_nothing_of_the_first() -> None:
    store = CountingStore()
    attached(store, 0, 2).gather(heartbeat(1), Hang("hang", 1, "sleeps", "a", 1))
    second = attached(store, 0, 2)
    assert second.gather(heartbeat(1), None) == [heartbeat(1), None]


@pytest.mark.usefixtures("same_start")
def test_ranks_may_begin_in_any_order() -> None:
    store = CountingStore()
    other = attached(store, 1, 2)
    assert other.report(heartbeat(1)) is None
    first = attached(store, 0, 2)
    assert first.gather(heartbeat(1), None) == [heartbeat(1), heartbeat(1)]
    assert other.report(heartbeat(2)) == HeartbeatSummary(heartbeat(1), None)
