"""The work of a run: sequences, tokens and FLOPs of its phases, by arithmetic alone, without torch.

An objective computes the FLOPs of sequences; this module sums them over a run and adds the optimizer's. Only matrix
products are counted, with 2 FLOPs per multiply-add. The counts depend on the config and the text, never on the machine:
padding is not counted, and layers with local attention count only the keys within windows.
"""

from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.config import ModelConfig, PhaseConfig, PretrainConfig
from pretrain.corpus.stored import prepared_manifest
from pretrain.model import cost
from pretrain.objectives import make_objective

# Mean length of a sequence relative to the maximum, assumed if there is no prepared corpus to measure it.
ASSUMED_FILL = 0.8


def expected_length(phase: PhaseConfig) -> float:
    """Return the mean sequence length that is assumed without a prepared corpus; short documents make it lower."""
    return phase.sequence_length * ASSUMED_FILL


def optimizer_flops(config: PretrainConfig) -> float:
    """Return the FLOPs of Muon's matrix products in a step, over all workers; 0 for other optimizers."""
    if config.optimizer.name != "muon":
        return 0.0
    return float(sum(cost.orthogonalization_flops(shape) for shape in make_objective(config).shapes))


@dataclass(frozen=True)
class Work:
    """Steps, sequences, tokens and FLOPs of one phase."""

    steps: int
    sequences: int
    tokens: float
    mean_length: float  # mean number of tokens per sequence
    masked: float  # mean number of tokens to predict per sequence
    flops: float  # useful FLOPs
    executed: float  # executed FLOPs, including the optimizer's


def phase_work(
    config: PretrainConfig,
    phase: PhaseConfig,
    vocabulary_size: int,
    mean_length: float | None = None,
    frozen_config: ModelConfig | None = None,
) -> Work:
    """Return the sequences, tokens and FLOPs of a phase; all lengths are assumed to equal the mean."""
    mean = min(mean_length or expected_length(phase), phase.sequence_length)
    phase_index = next(index for index, other in enumerate(config.phases) if other is phase)
    share = sum(config.masking_shares(phase_index)) / 2  # mean of the shares of the first and the last step
    limit = phase.max_predictions or round(share * phase.sequence_length)
    masked = min(share * mean, limit)
    objective = make_objective(config, vocabulary_size, frozen_config)
    flop_functions = (objective.useful_flops, objective.executed_flops)
    useful, executed = (phase.sequences * flops([mean], masked) for flops in flop_functions)
    executed += phase.steps * optimizer_flops(config)
    return Work(phase.steps, phase.sequences, phase.sequences * mean, mean, masked, useful, executed)


def read_frozen_config(config: PretrainConfig) -> ModelConfig | None:
    """Return the config of the run's frozen model; None if there is none, or if it cannot be read yet."""
    objective = make_objective(config)
    if not objective.frozen_role:
        return None
    from pretrain.checkpoint.released import read_model_config

    try:
        return read_model_config(attrgetter(objective.setting)(config))
    except InputError:  # the frozen model may not be trained yet
        return None


def vocabulary_rows(config: PretrainConfig) -> int:
    """Return the number of rows of the word embeddings: the vocabulary's entries, plus padding if configured."""
    return config.model.rows(_vocabulary_entries(config))


def _vocabulary_entries(config: PretrainConfig) -> int:
    """Return the vocabulary size: the prepared corpus's, else the vocabulary file's, else the configured one."""
    manifest = prepared_manifest(config.corpus)
    if manifest:
        return int(manifest["vocabulary_size"])
    if config.corpus.vocabulary.path and Path(config.corpus.vocabulary.path).expanduser().exists():
        from pretrain.corpus import vocabulary
        from pretrain.corpus.description import configured_tokenizer

        tokenizer = configured_tokenizer(config.corpus)
        return vocabulary.vocabulary_size(tokenizer) if tokenizer else 0
    return config.corpus.vocabulary.size
