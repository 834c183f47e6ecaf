"""Mean lengths of the sequences of a prepared text, in the dry run and beside what a run trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import make_corpus, make_vocabulary, write_corpus

from finetune.cli import main
from pretrain.batches.loader import BatchMaker
from pretrain.common.settings import dump
from pretrain.config import PretrainConfig, load_config
from pretrain.planning import work
from pretrain.planning.text import mean_lengths
from pretrain.run.continuation import Corpora

CONFIGS = Path(__file__).parents[2] / "configs" / "pretrain"


def mini(**values: Any) -> PretrainConfig:
    config = load_config(CONFIGS / "mini.yaml")
    return PretrainConfig.model_validate({**config.model_dump(), "corpus": {"dir": "nowhere"}, **values})


def test_a_dry_run_has_the_tokens_of_the_prepared_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 1 % of those of all batches, in each phase. Without a corpus they are assumed."""
    config = two_lengths(corpus={"dir": str(make_corpus(tmp_path / "corpus"))})
    (tmp_path / "run.yaml").write_text(dump(config))
    printed = dry_run_tokens(tmp_path / "run.yaml", capsys, "measured on ")
    assert printed == pytest.approx([length * 12800 for length in counted_lengths(config)], rel=0.01)
    most = [one.sequences * one.sequence_length for one in config.phases]
    assert printed[0] < 0.94 * most[0], "it is not what is assumed"
    (tmp_path / "run.yaml").write_text(dump(two_lengths()))
    assumed = dry_run_tokens(tmp_path / "run.yaml", capsys, "assumed, 0.8 of the length; `prepare` ")
    assert assumed == pytest.approx([work.ASSUMED_FILL * one for one in most], rel=1e-3)


def test_replayed_text_counts_in_the_mean_length(tmp_path: Path) -> None:
    """A text of questions, half replaced by long documents."""
    short = [[np.arange(10, 30)] for _ in range(3000)]
    own = write_corpus(
        tmp_path / "own", {"train": [(0, short)], "validation": [(0, short[:20])]}, make_vocabulary(1000)
    )
    replay = {"replay_corpus": str(make_corpus(tmp_path / "general")), "replay_share": 0.5}
    config = two_lengths(corpus={"dir": str(own)}, start_from="start", adaptation=replay)
    assert mean_lengths(config) == pytest.approx(counted_lengths(config), rel=0.01)
    assert mean_lengths(config)[0] > 1.5 * mean_lengths(two_lengths(corpus={"dir": str(own)}))[0]


def two_lengths(**values: Any) -> PretrainConfig:
    """Phases of 128 and 32 tokens, of 12,800 sequences each."""
    phase = {**mini().phases[0].model_dump(), "ramp_from": 0, "ramp_steps": 0, "steps": 200}
    return mini(phases=[{**phase, "sequence_length": length} for length in (128, 32)], **values)


def counted_lengths(config: PretrainConfig) -> list[float]:
    """Mean tokens of all sequences that a run trains on, of each phase."""
    shards, means = Corpora.open(config).training, []
    for number, phase in enumerate(config.phases):
        maker = BatchMaker(shards, config, number, seed=config.seed, rank=0, world_size=1)
        size = phase.global_sequences
        means.append(sum(maker.make(size * step, size).tokens for step in range(phase.steps)) / phase.sequences)
    return means


def dry_run_tokens(path: Path, capsys: pytest.CaptureFixture[str], source: str) -> list[float]:
    """Of each phase, as printed with where the mean lengths come from."""
    assert main(["pretrain", str(path), "--dry-run"]) == 0
    table = capsys.readouterr().out.partition("Work\n")[2]
    assert f"mean: tokens per sequence, {source}" in table
    return [float(row.split()[5]) for row in table.splitlines()[1:3]]
