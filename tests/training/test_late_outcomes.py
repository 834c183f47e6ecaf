"""Outcomes that are read when the next step has been launched, as on a GPU, change neither losses nor weights."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import make_corpus

from pretrain.checkpoint.store import CheckpointReader, read_weights
from pretrain.common.transfers import PendingCopy, arrivals
from pretrain.run import loop
from tests.distributed import run_workers
from tests.run.test_spikes import starts_with_bad_data
from tests.starts import Start, all_records, pretraining, records

# By first sample, which counts from 0 in each phase: a step of NaN, and a spike in the last step of the first phase;
# five steps of NaN in a row in the second.
# After the spike at the end of the first phase, its last 8 steps read other text before the second one starts.
SECOND = (38 + 8) * 12
BAD = {(22 * 12, 12): math.nan, (37 * 12, 12): 30.0, **{(SECOND + 11 * n, 11): math.nan for n in range(13, 18)}}


def settings(corpus: Path, run_dir: Path) -> dict[str, Any]:
    often = {"checkpoint__every_steps": 10, "evaluation__every_steps": 15, "tracking__log_every_steps": 4}
    phases = [(32, 12, 38), (32, 11, 32)]
    values = pretraining(corpus, run_dir, phases, model__layers=1, **often)
    values["phases"][1]["averaged_share"] = 14 / 32
    return values


def read_late(starts: list[Start]) -> list[tuple[str, int]]:
    """Of each start, its outcome and how many steps were launched while another's outcome was unread."""
    launch, read = loop.Fit.launch_step, loop.Fit.read_step
    unread, late = set[int](), list[int]()

    def launch_step(self: Any, number: int, *others: Any) -> Any:
        late.extend([number] if unread else [])
        unread.add(number)
        return launch(self, number, *others)

    def read_step(self: Any, launched: Any) -> Any:
        unread.discard(launched.index)
        return read(self, launched)

    loop.reads_late = lambda _: True  # type: ignore[assignment]
    loop.Fit.launch_step, loop.Fit.read_step = launch_step, read_step  # type: ignore[method-assign]
    found = []
    for start in starts:
        unread.clear()
        late.clear()
        (outcome,) = starts_with_bad_data([(start, BAD)])
        found.append((outcome, len(late)))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders: of outcomes read at once, a step late, and a step late with two stops."""
    root = tmp_path_factory.mktemp("late")
    corpus = make_corpus(root / "corpus", documents=60, vocabulary_size=300)
    folders = {name: root / name for name in ("at once", "late", "stopped")}
    configs = {name: settings(corpus, folder) for name, folder in folders.items()}
    assert run_workers(2, starts_with_bad_data, [(Start(configs["at once"]), BAD)]) == [[""]] * 2
    stopped = configs["stopped"]
    parts = [Start(stopped, stop_at=26), Start(stopped, True, stop_at=15), Start(stopped, True)]
    for found in run_workers(2, read_late, [Start(configs["late"]), *parts]):
        (whole, late), first, second, last = found
        assert whole == last[0] == ""
        assert late > 35
        # The stop is noticed when the next step has been launched, which is taken too.
        assert first[0].startswith("StoppedError: stopped at step 27 of 70; checkpoint step-00000027 is saved.")
        assert second[0].startswith("StoppedError: stopped at step")
    return folders


@pytest.mark.parametrize("which", ["late", "stopped"])
def test_losses_rollbacks_and_weights_are_the_same(folders: dict[str, Path], which: str) -> None:
    at_once, late = (records(folders[name]) for name in ("at once", which))
    for key in ("step", "loss", "lr", "grad_norm", "skipped_steps", "tokens", "samples"):
        assert [one[key] for one in late] == [one[key] for one in at_once], key
    at_once, late = (records(folders[name], "validation") for name in ("at once", which))
    assert [(one["step"], one["loss"]) for one in late] == [(one["step"], one["loss"]) for one in at_once]
    assert len(late) == 5
    events = [
        [one["message"] for one in all_records(folders[name]) if one.get("event") == "rollback"]
        for name in ("at once", which)
    ]
    assert events[0] == events[1]
    spike, bad = events[0]
    assert spike.startswith("the loss of step 38 spiked to")
    assert bad.startswith("5 steps in a row up to step 56 had a loss or gradient that is not finite")
    at_once, late = (everything(folders[name] / "checkpoints/step-00000070") for name in ("at once", which))
    assert at_once.keys() == late.keys()
    assert all(torch.equal(at_once[name], late[name]) for name in at_once)


def everything(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Weights, their averages and moments, by kind and name."""
    weights = read_weights(checkpoint)
    with CheckpointReader(checkpoint) as reader:
        return {
            (kind, name): reader.read(kind, name, 0, weight.numel())
            for kind in ("weight", "average", "exp_avg", "exp_avg_sq")
            for name, weight in weights.items()
        }


def test_a_copy_is_waited_for_when_the_next_is_on_its_way() -> None:
    order: list[str] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            order.append(f"wait {self.number}")

    def launch() -> Iterator[tuple[int, PendingCopy]]:
        for number in range(3):
            order.append(f"launch {number}")
            event: Any = Event(number)
            yield number, PendingCopy(torch.tensor(number), event)

    assert [(number, int(values)) for number, values in arrivals(launch())] == [(0, 0), (1, 1), (2, 2)]
    assert order == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]
    assert list(arrivals([])) == []
