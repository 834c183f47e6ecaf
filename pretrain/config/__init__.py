"""The config of a run: frozen pydantic models that `load_config` reads from one YAML file.

Every field has a default (unless it is required), limits, and a description with its unit. An unknown key is an error,
which names the line of the file and the most similar known key.
"""

from pretrain.config.adaptation import AdaptationConfig
from pretrain.config.data import (
    MASKING_SCHEMES,
    SOURCES,
    CorpusConfig,
    MaskingConfig,
    PairsConfig,
    SourceConfig,
    VocabularyConfig,
)
from pretrain.config.engine import CheckpointConfig, EngineConfig, Precision, SpikeConfig
from pretrain.config.filters import ContaminationConfig, EvaluationSetConfig, FiltersConfig, NearDuplicatesConfig
from pretrain.config.model import FLASH_WIDTHS, MAX_WIDTH, ModelConfig
from pretrain.config.objectives import DistillationConfig, ElectraConfig
from pretrain.config.resume import (
    FREE_IN_ALL_RUNS,
    forbidden_changes,
    keep_precision,
    run_folder,
    used_start_from,
    with_precision,
)
from pretrain.config.run import (
    ConfigT,
    PretrainConfig,
    RunConfig,
    SchedulingConfig,
    TrackingConfig,
    config_of,
    load_config,
)
from pretrain.config.schedule import EvaluationConfig, OptimizerConfig, PhaseConfig, PretrainOptimizerConfig

__all__ = [
    "FLASH_WIDTHS",
    "FREE_IN_ALL_RUNS",
    "MASKING_SCHEMES",
    "MAX_WIDTH",
    "SOURCES",
    "AdaptationConfig",
    "CheckpointConfig",
    "ConfigT",
    "ContaminationConfig",
    "CorpusConfig",
    "DistillationConfig",
    "ElectraConfig",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "FiltersConfig",
    "MaskingConfig",
    "ModelConfig",
    "NearDuplicatesConfig",
    "OptimizerConfig",
    "PairsConfig",
    "PhaseConfig",
    "Precision",
    "PretrainConfig",
    "PretrainOptimizerConfig",
    "RunConfig",
    "SchedulingConfig",
    "SourceConfig",
    "SpikeConfig",
    "TrackingConfig",
    "VocabularyConfig",
    "config_of",
    "forbidden_changes",
    "keep_precision",
    "load_config",
    "run_folder",
    "used_start_from",
    "with_precision",
]
