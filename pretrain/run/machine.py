"""What a machine can do for a run, measured: for the command `doctor`, which is handed this module's name."""

from pretrain.batches.synthetic import VOCABULARY_SIZE, loader_rate
from pretrain.config import CorpusConfig, ModelConfig, PhaseConfig, PretrainConfig
from pretrain.model.precision import is_faster_in_fp32, measure_matmul
from pretrain.objectives import objective_of

__all__ = ["deepspeed_version", "is_faster_in_fp32", "loader_rate", "measure_matmul", "sequence_flops"]


def deepspeed_version() -> str:
    """The version of DeepSpeed; fails as its import does."""
    from pretrain.training.engine import import_deepspeed

    return import_deepspeed().__version__


def sequence_flops() -> float:
    """FLOPs of training BERT-Base on a sequence of 128 tokens."""
    phase = PhaseConfig(sequence_length=128, global_sequences=1, steps=1, peak_learning_rate=1e-4)
    config = PretrainConfig(
        name="doctor", corpus=CorpusConfig(dir="nowhere"), model=ModelConfig(size="base"), phases=(phase,)
    )
    return objective_of(config, VOCABULARY_SIZE).model_flops([128], round(0.15 * 128))
