"""Published training speeds, to compare with the limit that `pretrain --dry-run --on` computes. Needs no GPU.

A result above the limit would refute the roofline model. The dry run assumes the share that public trainers reach.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from pretrain.config import PretrainConfig
from pretrain.objectives import make_objective
from pretrain.planning.roofline import GPUS, step_times
from pretrain.planning.work import phase_work

_VOCABULARY = {"bert": 30_528, "modernbert": 50_368}


@dataclass(frozen=True)
class Record:
    """A published training speed.

    Attributes:
        published: speed of one GPU in sequences/s, or in tokens/s if `in_tokens`.
        mean: mean number of tokens per sequence without padding, from the source or its data.
        each: number of sequences per GPU in an optimizer step; assumed if the source does not state it.
    """

    name: str
    source: str
    gpu: str
    workers: int
    length: int
    mean: float
    each: int
    published: float
    in_tokens: bool = False
    micro_batch_tokens: int = 32_768
    model: dict[str, Any] = field(default_factory=lambda: {"size": "large"})


def _modernbert(size: str, length: int, published: float) -> Record:
    return Record(
        f"ModernBERT-{size} @{length:,}",
        "Warner et al. 2024, from tokens and hours",
        "H100",
        8,
        length,
        length,
        576 * 1024 // 8 // length,
        published,
        in_tokens=True,
        micro_batch_tokens=98_304 if size == "base" else 57_344,
        model={"family": "modernbert", "size": size, "max_positions": 8192},
    )


_NVIDIA = "NVIDIA DeepLearningExamples, BERT for PyTorch, fp16"
_MICROSOFT = "DeepSpeed, 28 May 2020"
RECORDS = (
    Record("BERT-Large @128", _NVIDIA, "A100", 1, 128, 128, 8192, 580),
    Record("BERT-Large @128", _NVIDIA, "A100", 8, 128, 128, 8192, 4591 / 8),
    Record("BERT-Large @128", _NVIDIA, "A100", 256, 128, 128, 256, 138_294 / 256),
    Record("BERT-Large @512", _NVIDIA, "A100", 8, 512, 254, 4096, 1657 / 8),
    Record("BERT-Large @512", _NVIDIA, "A100", 256, 512, 254, 128, 49_663 / 256),
    Record("BERT-Large @128", _MICROSOFT, "V100", 1, 128, 128, 4096, 272),
    Record("BERT-Large @512", _MICROSOFT, "V100", 1, 512, 512, 512, 52),
    Record("BERT-Large @512", "MLPerf Training 1.1, NVIDIA", "A100", 8, 512, 254, 56, 285),
    Record("BERT-Large @512, FP8", "MLPerf Training 4.0, NVIDIA", "H100", 8, 512, 254, 48, 970),
    Record("BERT-Large @512, FP8", "MLPerf Training 5.0", "B200", 8, 512, 254, 48, 1500),
    _modernbert("base", 1024, 312_000),
    _modernbert("large", 1024, 142_000),
    _modernbert("base", 8192, 239_000),
    _modernbert("large", 8192, 116_000),
)


def share(record: Record) -> float:
    """Return the published speed as a share of the roofline limit for the same step in bf16 (even for FP8 records)."""
    config = _config(record)
    objective = make_objective(config, _VOCABULARY[config.model.family])
    work = phase_work(config, config.phases[0], objective.vocabulary, record.mean)
    times = step_times(objective, config.phases[0], work, GPUS[record.gpu], record.workers)
    times = replace(times, host=0.0)  # the host time of our program does not apply
    return record.published * times.limit / (record.each * (record.mean if record.in_tokens else 1))


def _config(record: Record) -> PretrainConfig:
    modern = record.model.get("family") == "modernbert"
    phase = {"sequence_length": record.length, "global_sequences": record.each * record.workers}
    return PretrainConfig.model_validate(
        {
            "name": "record",
            "corpus": {"dir": "corpus"},
            "model": record.model,
            "pairs": {"objective": "none" if modern else "nsp"},
            "masking": {"probability": 0.3 if modern else 0.15},
            "engine": {"precision": "bf16", "micro_batch_tokens": record.micro_batch_tokens},
            "phases": [{**phase, "steps": 1, "peak_learning_rate": 1e-4}],
        }
    )
