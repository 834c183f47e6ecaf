"""The runs that a budget can buy: shapes of the config's family, and for each the batch, the steps and the rate.

The rules that are not measured by the law stand here, with their sources.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pretrain.common.errors import InputError
from pretrain.common.setting_errors import first_problem
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.planning import pace
from pretrain.planning.budget import Budget
from pretrain.planning.law import FLOPS_PER_PARAMETER
from pretrain.planning.speed import Speed
from pretrain.planning.text import RunText
from pretrain.planning.work import Work, optimizer_flops, phase_work, vocabulary_size

# (layers, hidden): from a third of BERT-Mini to BERT-Large (google-research/bert, "smaller models"), about 64 times as
# wide as deep.
SHAPES = ((2, 128), (4, 192), (4, 256), (6, 320), (6, 384), (8, 512), (12, 768), (24, 1024))
MOST_EPOCHS = 10.0  # the rule of BabyLM and of `bench speedrun`; the law has no points beyond
# Tokens of a step: those of a good run of 4 layers of 256 over 12 million tokens, growing with their square root.
# The critical batch grows with the tokens, not with the size: by powers of 0.47 to 0.5 (Zhang et al. 2024,
# arXiv:2410.21676; Bergsma et al. 2025, arXiv:2505.13738). A power of two of sequences of `_LENGTH` tokens.
_BATCH_TOKENS, _AT_TOKENS, _LENGTH = 64 * 128, 12e6, 128
_FEWEST, _MOST = 16, 2048
_ROUNDS = 6  # a batch depends on the tokens, and they on the speed, which depends on the batch
# The best rate falls as training gets longer, by this power of the tokens: Bjorck et al. 2024 (arXiv:2409.19913) for
# AdamW, Ren et al. 2026 (arXiv:2603.28743) for Muon. docs/decisions, 0120.
_RATE_POWER = -0.32
_INTERMEDIATE = 32  # widths of feed-forward networks are multiples of this


@dataclass(frozen=True)
class Plan:
    """A run that a budget buys.

    Attributes:
        config: of the run, whole.
        size: effective parameters.
        tokens: trained on.
        unique: tokens of one epoch.
        flops: executed.
        seconds: of the whole run, with evaluations and checkpoints; 0 if the speed is unknown.
        is_capped: whether it stops at `MOST_EPOCHS` and leaves budget.
    """

    config: PretrainConfig
    size: float
    tokens: float
    unique: float
    flops: float
    seconds: float
    is_capped: bool

    @property
    def shape(self) -> str:
        return shape_name(self.config.model)

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique


def shape_name(model: ModelConfig) -> str:
    """LAYERSxHIDDEN."""
    return f"{model.layers}x{model.hidden}"


def volume(shape: str) -> int:
    """Of a shape named LAYERSxHIDDEN, what shapes are ordered by: layers times the square of hidden."""
    layers, hidden = map(int, shape.split("x"))
    return layers * hidden**2


def with_shape(config: PretrainConfig, layers: int, hidden: int) -> PretrainConfig:
    """The config with another shape of its family; head width and ratio of widths stay about those of the config.

    Rates are inverse to the width (Yang et al. 2022, arXiv:2203.03466, table 8), as in the runs of the law.
    """
    model = config.model
    if (layers, hidden) == (model.layers, model.hidden):
        return config
    width = model.head_width if hidden % model.head_width == 0 else 64
    heads = hidden // width
    shape: dict[str, Any] = {"size": "custom", "layers": layers, "hidden": hidden, "heads": heads}
    shape["intermediate"] = _INTERMEDIATE * round(model.intermediate / model.hidden * hidden / _INTERMEDIATE)
    if model.kv_heads:
        shape["kv_heads"] = math.gcd(heads, max(1, heads * model.kv_heads // model.heads))
    if model.embedding == model.hidden:
        shape["embedding"] = 0
    phases = [
        {**phase.model_dump(), "peak_learning_rate": _rate(phase.peak_learning_rate * model.hidden / hidden)}
        for phase in config.phases
    ]
    return _changed(config, model={**model.model_dump(), **shape}, phases=phases)


def with_workers(config: PretrainConfig, workers: int) -> PretrainConfig:
    """The config for another number of workers. It is valid only with a batch for them (`with_batch`)."""
    fewest = min(config.scheduling.min_workers, workers)
    scheduling = config.scheduling.model_copy(update={"workers": workers, "min_workers": fewest})
    return config.model_copy(update={"scheduling": scheduling})


def with_batch(config: PretrainConfig, tokens: float, longer: float = 1.0) -> PretrainConfig:
    """The config with the batch for a training on `tokens` tokens, and the rate for this batch and length.

    Batches of all phases change by one factor, by which every worker has a sequence in every phase. So the phases keep
    their proportions; there is no ramp. Muon's updates have one size at every batch, so its rate does not depend on it
    (Jordan et al. 2024). Those of Adam-like optimizers change with the square root of the batch (Malladi et al. 2022,
    arXiv:2205.10287).

    Args:
        longer: `tokens` over those of the config's own steps, for which its rate is.
    """
    sequences = _BATCH_TOKENS * math.sqrt(tokens / _AT_TOKENS) / _LENGTH
    whole = min(_MOST, max(_FEWEST, 2 ** round(math.log2(sequences)))) * _LENGTH
    first = config.phases[0]
    factor = max(1, round(whole / first.sequence_length)) / first.global_sequences
    factor = max(factor, config.scheduling.workers / min(phase.global_sequences for phase in config.phases))
    phases: list[dict[str, Any]] = []
    for number, phase in enumerate(config.phases):
        batch = _balanced(config, number, round(factor * phase.global_sequences))
        larger = 1.0 if config.optimizer.name == "muon" else batch / phase.global_sequences
        rate = _rate(longer**_RATE_POWER * math.sqrt(larger) * phase.peak_learning_rate)
        changes = {"global_sequences": batch, "peak_learning_rate": rate, "ramp_from": 0, "ramp_steps": 0}
        phases.append({**phase.model_dump(), **changes})
    return _changed(config, phases=phases)


def works(config: PretrainConfig, text: RunText) -> list[Work]:
    """The work of each phase on this text."""
    rows = vocabulary_size(config)
    pairs = zip(config.phases, text.phases, strict=True)
    return [phase_work(config, phase, rows, one.mean_length) for phase, one in pairs]


def effective_size(config: PretrainConfig, work: Sequence[Work]) -> float:
    """Effective parameters (`pretrain.planning.law`) of a config whose phases have the work `work`."""
    flops = sum(one.executed - one.repeated - one.steps * optimizer_flops(config) for one in work)
    return flops / FLOPS_PER_PARAMETER / sum(one.tokens for one in work)


def plan(config: PretrainConfig, budget: Budget, text: RunText, speed: Speed | None) -> Plan:
    """The run of the config's shape that spends the budget, or reads the text `MOST_EPOCHS` times.

    `speed` may be None if the budget is in FLOPs.
    """
    tokens, batched, factor, is_capped = _AT_TOKENS, config, 1.0, False
    own_tokens = sum(one.tokens for one in works(config, text))
    for _ in range(_ROUNDS):
        batched = with_batch(config, tokens, tokens / own_tokens)
        work = works(batched, text)
        epochs = sum(one.sequences / part.samples_per_epoch for one, part in zip(work, text.phases, strict=True))
        affordable, most = _affordable(batched, work, budget, speed), MOST_EPOCHS / epochs if epochs else math.inf
        factor, is_capped = min(affordable, most), most < affordable
        tokens = factor * sum(one.tokens for one in work)
    scaled = pace.scale(batched, factor)
    work = works(scaled, text)
    tokens = sum(one.tokens for one in work)
    epochs = sum(one.sequences / part.samples_per_epoch for one, part in zip(work, text.phases, strict=True))
    return Plan(
        scaled,
        effective_size(scaled, work),
        tokens,
        tokens / epochs if epochs else math.inf,
        sum(one.executed for one in work),
        speed.seconds(scaled, work) / pace.TRAINING_SHARE if speed else 0.0,
        is_capped,
    )


def _balanced(config: PretrainConfig, phase: int, sequences: int) -> int:
    """The smallest batch of at least `sequences` that can be balanced across the workers, as the config's own can."""
    return next(count for count in itertools.count(max(1, sequences)) if not config.why_no_batch(phase, count))


def _rate(rate: float) -> float:
    """With three digits."""
    return float(f"{rate:.3g}")


def _affordable(config: PretrainConfig, work: Sequence[Work], budget: Budget, speed: Speed | None) -> float:
    """How many times the config's steps the budget pays for."""
    if budget.flops:
        return budget.flops / sum(one.executed for one in work)
    assert speed is not None
    return pace.TRAINING_SHARE * budget.seconds / speed.seconds(config, work)


def _changed(config: PretrainConfig, **values: Any) -> PretrainConfig:
    try:
        return PretrainConfig.model_validate({**config.model_dump(), **values})
    except ValidationError as error:
        shape = "{layers}x{hidden}".format(**values.get("model", config.model.model_dump()))
        raise InputError(
            f"--budget: this config has no size {shape}: {first_problem(error)}. Give --minutes "
            "instead, which scales the steps of this config."
        ) from None
