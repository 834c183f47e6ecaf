"""A run whose weight decay is given as a timescale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corpora import make_corpus

from tests.distributed import run_workers
from tests.starts import Start, pretraining, records, starts


def test_a_run_decays_as_its_timescale_says(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")

    def settings(name: str, **optimizer: Any) -> dict[str, Any]:
        return pretraining(tmp_path / "corpus", tmp_path / name, [(32, 8, 4)], optimizer={"name": "muon", **optimizer})

    # 4 steps at 1e-3: 1 / (0.5 * 4 * 1e-3) = 500
    runs = settings("timescale", decay_timescale=0.5), settings("decay", weight_decay=500.0), settings("default")
    assert run_workers(1, starts, [Start(run) for run in runs]) == [[""] * 3]
    timescale, decay, default = ([r["loss"] for r in records(Path(run["run_dir"]))] for run in runs)
    assert timescale == decay
    assert timescale[2:] != default[2:]
