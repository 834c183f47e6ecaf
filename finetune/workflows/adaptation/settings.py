"""Builds the config of an adaptation from the options of the command and the size of the text."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.common import settings
from pretrain.common.commands import default_workers
from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, read_manifest
from pretrain.config import ModelConfig, PretrainConfig, load_config
from pretrain.planning import pace
from pretrain.planning.text import mean_lengths, measured_phases

CONFIG_FILE = "adapt.yaml"
_LENGTH = 128
_SEQUENCES = 32  # maximum per step; fewer if the text has fewer
# Epochs, as (for fewer tokens than this, epochs): more for less text, as in Gururangan et al. 2020, "Don't Stop
# Pretraining": one epoch for gigabytes of a domain, 100 for the text of a task.
_EPOCHS = ((1e6, 10), (1e7, 5), (1e8, 2))
_STEPS = (100, 50_000)  # minimum and maximum
# (maximum width, peak rate): about half of the rates used here to pretrain models of that width from random weights.
_RATES = ((384, 3e-4), (512, 2e-4), (768, 1e-4))


def corpus_values(name: str, folder: Path, start: Path, sources: list[dict[str, Any]], share: float) -> dict[str, Any]:
    """Return a config to prepare a corpus; `with_length` sets the sequence length of its phase."""
    corpus = {
        "dir": str(folder),
        "sources": sources,
        "min_document_words": 0,  # documents of a domain may be short: reviews, questions, messages
        "validation_fraction": round(share, 6),
    }
    return {
        "name": name,
        "start_from": str(start),
        "corpus": corpus,
        "pairs": {"objective": "none"},
        "phases": [_phase(1, 1e-4, 8)],
    }


def with_length(config: PretrainConfig) -> PretrainConfig:
    """Return `config` with the run's sequence length, for which the corpus card counts sequences."""
    length = min(_LENGTH, config.model.max_positions)
    return config.model_copy(update={"phases": (config.phases[0].model_copy(update={"sequence_length": length}),)})


def run_values(
    arguments: argparse.Namespace,
    corpus: dict[str, Any],
    model: ModelConfig,
    steps: int,
    sequences: int = _SEQUENCES,
) -> dict[str, Any]:
    """Return the config of the run; `corpus` is the section of the prepared corpus, `sequences` are per step."""
    out: Path = arguments.out
    workers = min(default_workers(), sequences) if arguments.workers is None else arguments.workers
    adaptation: dict[str, Any] = {}
    if arguments.general:
        adaptation = {"replay_corpus": str(out / "general"), "replay_share": arguments.replay}
    interval = max(1, steps // 5)
    return {
        "name": "adapt",
        "run_dir": str(out / "run"),
        "start_from": str(arguments.start_from),
        "corpus": corpus,
        "pairs": {"objective": "none"},
        "phases": [_phase(steps, peak_rate(model.hidden), min(_LENGTH, model.max_positions), sequences)],
        "engine": {"micro_batch_tokens": 4096},
        "evaluation": {"every_steps": interval, "sequences": 512},
        "checkpoint": {"every_steps": interval},
        "scheduling": {"workers": workers},
        "adaptation": adaptation,
    }


def write_config(path: Path, config: PretrainConfig, *, started: bool) -> None:
    """Write the config of a stage; `InputError` if the stage was `started` with a different config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if started and path.is_file():
        changes = settings.differences(load_config(path), config, ignore=())
        if changes:
            raise InputError(
                f"{path}: was started with other options: {', '.join(changes)}. Give the same ones, or another --out."
            )
    with atomic_open(path, "w") as file:
        file.write(settings.dump(config))


def sequences_per_step(config: PretrainConfig) -> int:
    """Return the sequences per step: at most as many as the prepared text has, including replayed text."""
    # Counted as in training. The number of tokens is not enough: a document of 1.4 sequences becomes two.
    return min(_SEQUENCES, int(measured_phases(config)[0].samples_per_epoch))


def choose_steps(config: PretrainConfig, arguments: argparse.Namespace) -> int:
    """Return the steps of a run: from --steps, as many as fit into --minutes, or by the size of the text."""
    if arguments.steps:
        return arguments.steps
    lengths = mean_lengths(config)
    if arguments.minutes:
        return pace.fit(config, arguments.minutes, lengths).total_steps
    phase, shards = config.phases[0], read_manifest(config.corpus.folder)["shards"]
    tokens = sum(shard["tokens"] for shard in shards if shard["split"] == "train")
    tokens = tokens / (1 - config.adaptation.replay_share)
    epochs = next((epochs for limit, epochs in _EPOCHS if tokens < limit), 1)
    steps = epochs * tokens / (phase.global_sequences * lengths[0])
    return round(min(max(steps, _STEPS[0]), _STEPS[1]))


def peak_rate(width: int) -> float:
    """Return the peak learning rate for a model of this hidden size."""
    return next((rate for limit, rate in _RATES if width <= limit), 5e-5)


def _phase(steps: int, rate: float, length: int, sequences: int = _SEQUENCES) -> dict[str, Any]:
    return {
        "sequence_length": length,
        "global_sequences": sequences,
        "steps": steps,
        "peak_learning_rate": rate,
        "warmup_steps": round(0.06 * steps),
    }
