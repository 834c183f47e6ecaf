"""Statistics of a run's text: sequence lengths, and how much of each source is read, measured on the prepared corpus.

Sequences are planned from document offsets, not read, so a dry run is fast and needs no torch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pretrain.batches.blocks import WINDOW_BLOCKS
from pretrain.batches.mixing import SourceReading, plan_mix
from pretrain.batches.reading import Reading, count_reading, count_readings
from pretrain.batches.replay import with_replay
from pretrain.batches.sampler import Sampler, phase_samplers
from pretrain.batches.source import SourceSamples
from pretrain.common.addresses import local_path
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, read_manifest
from pretrain.common.kinds import unknown_name_message
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.corpus.prepare import ReadingCounter
from pretrain.corpus.shards import Shard, TokenShards, open_shards, shards_of
from pretrain.corpus.stored import fetch_without_tokens, is_streamed, prepared_manifest
from pretrain.planning.work import expected_length

# Number of sequences sampled per phase. If lengths vary as much as in a mixture of questions and books, the standard
# error of the mean is 0.5 %.
_SAMPLED_SEQUENCES = 16384
_SPANS = 8  # number of spans of consecutive sequences that are sampled


@dataclass(frozen=True)
class PhaseStatistics:
    """Statistics of the sequences of one phase."""

    mean_length: float  # mean tokens per sequence
    samples_per_epoch: float


def measured_phases(config: PretrainConfig) -> tuple[PhaseStatistics, ...]:
    """Return the statistics of each phase, measured on the prepared corpus or taken from a streamed corpus's card.

    Returns () if there is neither. Raises `InputError` if the corpus is damaged, or has no sequence for a phase.
    """
    if not (manifest := prepared_manifest(config.corpus)):
        return ()
    if not _has_full_copy(config, manifest):
        _check_weights(config, manifest)
        means = {reading.sequence_length: reading.mean_length for reading in _card_readings(config)}
        if any(phase.sequence_length not in means for phase in config.phases):
            return ()
        tokens = sum(shard["tokens"] for shard in manifest["shards"] if shard["split"] == "train")
        phase_means = [means[phase.sequence_length] for phase in config.phases]
        return tuple(PhaseStatistics(mean, tokens / mean) for mean in phase_means)
    samplers = phase_samplers(_training_shards(config), config, seed=config.seed)
    return tuple(_measure_phase(*pair) for pair in zip(config.phases, samplers, strict=True))


def mean_lengths(config: PretrainConfig) -> list[float]:
    """Return the mean sequence length of each phase in tokens, [] if unknown. Raises as `measured_phases` does."""
    return [phase.mean_length for phase in measured_phases(config)]


def reading_lines(config: PretrainConfig) -> list[str]:
    """Return lines that say how often an epoch reads a token, and how much of each source a phase reads.

    Returns [] if the corpus is not prepared. Raises `InputError` as `measured_phases` does.
    """
    if not (manifest := prepared_manifest(config.corpus)):
        return []
    if not _has_full_copy(config, manifest):
        readings = _card_readings(config)
        return [*(reading.line for reading in readings), *_expected_phase_lines(config, manifest, readings)]
    shards = _training_shards(config)
    lengths = sorted({phase.sequence_length for phase in config.phases})
    return [*(count_reading(shards, config, length).line for length in lengths), *phase_lines(shards, config)]


def phase_lines(shards: TokenShards, config: PretrainConfig) -> list[str]:
    """Return lines that say how much of each source a phase reads; for one source, only phases that skip text.

    Raises `InputError` as `measured_phases` does.
    """
    return [
        f"phases.{index}: {'; '.join(reading.line for reading in readings)}"
        for index, readings in enumerate(phase_readings(shards, config))
        if len(shards.sources) > 1 or readings[0].skipped_tokens
    ]


def phase_readings(shards: TokenShards, config: PretrainConfig) -> Iterator[list[SourceReading]]:
    """Yield, for each phase, how much of each source it reads; raises `InputError` as `measured_phases` does."""
    last_readers: list[SourceSamples | None] = [None] * len(shards.sources)
    samplers = phase_samplers(shards, config, seed=config.seed)
    for phase, sampler in zip(config.phases, samplers, strict=True):
        counts = sampler.counts(phase.sequences)
        skipped = [sampler.skipped_tokens(n, last_readers[n]) if count else 0 for n, count in enumerate(counts)]
        yield sampler.readings(phase.sequences, skipped)
        last_readers = [sampler.sources[n] if count else last_readers[n] for n, count in enumerate(counts)]


def _expected_phase_lines(
    config: PretrainConfig, manifest: dict[str, Any], readings: Sequence[Reading]
) -> Iterator[str]:
    """Estimate `phase_lines` without a local copy of the text: all sources get the same mean sequence length."""
    if not readings:
        return
    means, empty = {reading.sequence_length: reading.mean_length for reading in readings}, np.zeros(1, np.uint16)
    corpus = shards_of(config.corpus.folder, {**manifest, "shards": []}, "train")
    shards = [
        Shard(shard["name"], "train", shard["source"], np.broadcast_to(empty, shard["tokens"]), empty, empty)
        for shard in manifest["shards"]
        if shard["split"] == "train"
    ]
    tokens, epochs_read = np.zeros(len(corpus.sources)), np.zeros(len(corpus.sources))
    for shard in shards:
        tokens[shard.source] += len(shard.tokens)
    for index, phase in enumerate(config.phases):
        samples = tokens / means.get(phase.sequence_length, expected_length(phase))
        samples_read = list(epochs_read * samples)
        counts = [max(1, round(count)) if count else 0 for count in samples.tolist()]  # 0 if a source is held out
        try:
            mix = plan_mix(replace(corpus, shards=shards), phase, counts, samples_read, f"phases.{index}")
        except InputError as error:  # not raised: mean lengths give only an estimate
            yield f"phases.{index}: with these mean lengths, the run would be rejected: {error}"
            return
        shares = np.array(mix.shares) / sum(mix.shares)
        epochs = shares * phase.sequences / np.maximum(samples, 1)
        epochs_read = epochs_read + epochs
        columns = zip(shares.tolist(), epochs.tolist(), epochs_read.tolist(), mix.capped, strict=True)
        rows = zip(corpus.sources, columns, strict=True)
        lines = (SourceReading(source["name"], *values).line for source, values in rows if values[0])
        if len(corpus.sources) > 1:
            yield f"phases.{index}: about {'; '.join(lines)}"
        if any(phase.sequence_length != earlier.sequence_length for earlier in config.phases[:index]):
            limit = f"less than twice its share of {WINDOW_BLOCKS} blocks of 1e6 tokens, or of a batch if that is more"
            yield f"phases.{index}: another sequence_length skips the rest of a source's current window, {limit}."


def _has_full_copy(config: PretrainConfig, manifest: dict[str, Any]) -> bool:
    """Return whether this machine has a full copy of the corpus that this manifest describes, not of an older one."""
    folder = config.corpus.folder
    return (folder / MANIFEST).exists() and read_manifest(folder)["shards"] == manifest["shards"]


def _check_weights(config: PretrainConfig, manifest: dict[str, Any]) -> None:
    names = [source["name"] for source in manifest["sources"]]
    for index, phase in enumerate(config.phases):
        if unknown := [name for name in phase.weights if name not in names]:
            advice = "`prepare` adds the sources of a config to its corpus."
            raise InputError(f"phases.{index}.weights: {unknown_name_message(unknown[0], names)} {advice}")


def _card_readings(config: PretrainConfig) -> list[Reading]:
    """Return the `Reading`s in a streamed corpus's card, written by `prepare`, for the config's sequence lengths."""
    if not is_streamed(config.corpus) or config.adaptation.replay_share:
        return []
    card = json.loads((fetch_without_tokens(config.corpus) / "card.json").read_text(encoding="utf-8"))
    readings = [Reading(**values) for values in card.get("readings", [])]
    lengths = {phase.sequence_length for phase in config.phases}
    return [r for r in readings if r.input_format == config.pairs.chosen_format and r.sequence_length in lengths]


def reading_counter(config: PretrainConfig) -> ReadingCounter:
    """Return a function that counts how often text is read, for the card of a prepared corpus."""

    def count(shards: TokenShards) -> tuple[list[dict[str, Any]], list[str]]:
        return count_readings(shards, config), phase_lines(shards, config)

    return count


def _training_shards(config: PretrainConfig) -> TokenShards:
    """Open the training text: the run's corpus, and text replayed from the general corpus."""
    shards, adaptation = open_shards(config.corpus.folder, "train"), config.adaptation
    if not (adaptation.replay_corpus and adaptation.replay_share):
        return shards
    return with_replay(shards, open_shards(local_path(adaptation.replay_corpus), "train"), adaptation.replay_share)


def _measure_phase(phase: PhaseConfig, sampler: Sampler) -> PhaseStatistics:
    # Consecutive sequences are planned together, so sample evenly spaced spans of sequences.
    count = min(phase.sequences, _SAMPLED_SEQUENCES)
    spans = min(_SPANS, count)
    starts = np.arange(spans) * max(0, phase.sequences - count // spans) // max(1, spans - 1)
    lengths = [sampler.plan(start + np.arange(count // spans)).lengths for start in starts.tolist()]
    return PhaseStatistics(float(np.concatenate(lengths).mean()), sampler.samples_per_epoch)
