"""Builds the configs of `adapt` from its options and the size of the text."""

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
_SEQUENCE_LENGTH = 128  # lower if the model has fewer positions
_MAX_SEQUENCES = 32  # maximum number of sequences per step; lower if the text has fewer
# (upper limit of the number of tokens, epochs); one epoch above the last limit. Smaller texts get more epochs, as in
# Gururangan et al. 2020, "Don't Stop Pretraining": 1 for gigabytes of a domain's text, 100 for the text of a task.
_EPOCHS = ((1e6, 10), (1e7, 5), (1e8, 2))
_MIN_STEPS, _MAX_STEPS = 100, 50_000
# (maximum hidden size, peak learning rate): about half of the rates at which the example configs pretrain such models.
_PEAK_RATES = ((384, 3e-4), (512, 2e-4), (768, 1e-4))


def corpus_settings(
    name: str, folder: Path, checkpoint: Path, sources: list[dict[str, Any]], validation_share: float
) -> dict[str, Any]:
    """Return the settings for preparing a corpus, with a placeholder phase (see `with_run_sequence_length`)."""
    corpus = {
        "dir": str(folder),
        "sources": sources,
        "min_document_words": 0,  # documents of a domain may be short: reviews, questions, messages
        "validation_fraction": round(validation_share, 6),
    }
    return {
        "name": name,
        "start_from": str(checkpoint),
        "corpus": corpus,
        "pairs": {"objective": "none"},
        "phases": [_phase(1, 1e-4, 8)],
    }


def with_run_sequence_length(config: PretrainConfig) -> PretrainConfig:
    """Return a corpus's config with the run's sequence length, so that the corpus card counts the run's sequences."""
    length = min(_SEQUENCE_LENGTH, config.model.max_positions)
    return config.model_copy(update={"phases": (config.phases[0].model_copy(update={"sequence_length": length}),)})


def run_settings(
    arguments: argparse.Namespace,
    corpus: dict[str, Any],
    model: ModelConfig,
    steps: int,
    sequences: int = _MAX_SEQUENCES,
) -> dict[str, Any]:
    """Return the settings of the run, with the section `corpus` and this number of `sequences` per step."""
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
        "phases": [_phase(steps, peak_rate(model.hidden), min(_SEQUENCE_LENGTH, model.max_positions), sequences)],
        "engine": {"micro_batch_tokens": 4096},
        "evaluation": {"every_steps": interval, "sequences": 512},
        "checkpoint": {"every_steps": interval},
        "scheduling": {"workers": workers},
        "adaptation": adaptation,
    }


def write_config(path: Path, config: PretrainConfig, *, started: bool) -> None:
    """Write the config of a stage. Raises `InputError` if the stage has `started` with a different config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if started and path.is_file():
        changes = settings.differences(load_config(path), config, ignore=())
        if changes:
            raise InputError(
                f"{path}: this stage was started with different options ({', '.join(changes)}). Use the same "
                "options, or another --out."
            )
    with atomic_open(path, "w") as file:
        file.write(settings.dump(config))


def sequences_per_step(config: PretrainConfig) -> int:
    """Return the number of sequences per step, at most as many as the prepared and the replayed text have together."""
    # Sequences are counted as in training, because a document of 1.4 sequences becomes two.
    return min(_MAX_SEQUENCES, int(measured_phases(config)[0].samples_per_epoch))


def choose_steps(config: PretrainConfig, arguments: argparse.Namespace) -> int:
    """Return the number of steps: --steps, or as many as fit into --minutes, or a number based on the text's size."""
    if arguments.steps:
        return arguments.steps
    lengths = mean_lengths(config)
    if arguments.minutes:
        return pace.fit(config, arguments.minutes, lengths).total_steps
    phase, shards = config.phases[0], read_manifest(config.corpus.folder)["shards"]
    tokens = sum(shard["tokens"] for shard in shards if shard["split"] == "train")
    tokens = tokens / (1 - config.adaptation.replay_share)  # including replayed tokens
    epochs = next((epochs for limit, epochs in _EPOCHS if tokens < limit), 1)
    steps = epochs * tokens / (phase.global_sequences * lengths[0])
    return round(min(max(steps, _MIN_STEPS), _MAX_STEPS))


def peak_rate(hidden: int) -> float:
    """Return the peak learning rate for a model of this hidden size."""
    return next((rate for limit, rate in _PEAK_RATES if hidden <= limit), 5e-5)


def _phase(steps: int, learning_rate: float, length: int, sequences: int = _MAX_SEQUENCES) -> dict[str, Any]:
    return {
        "sequence_length": length,
        "global_sequences": sequences,
        "steps": steps,
        "peak_learning_rate": learning_rate,
        "warmup_steps": round(0.06 * steps),
    }
