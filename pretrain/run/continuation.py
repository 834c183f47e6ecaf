"""The corpora of a run and, for continued pretraining, its initial weights and learning rates.

Without `start_from`, `Continuation` has no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pretrain.batches.replay import with_replay
from pretrain.batches.sampler import SAMPLER_VERSION
from pretrain.checkpoint.sentence_transformers import SENTENCE
from pretrain.checkpoint.start import read_start
from pretrain.common.addresses import local_path
from pretrain.common.files import write_json
from pretrain.common.run_files import START_FILE
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.corpus.stored import open_corpus
from pretrain.corpus.vocabulary import tokenizer_digest
from pretrain.run.session import check_same_data
from pretrain.training.engine import Engine, InitialWeights
from pretrain.training.rates import lr_scales

_WORD_EMBEDDINGS = "embeddings.word"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpora:
    """The token shards of a run: its corpus and, if set, the general corpus (`adaptation.replay_corpus`).

    Attributes:
        domain: training split of the run's corpus.
        training: the shards to train on: `domain`, mixed with replayed text of the general corpus.
        held_out: validation split of the run's corpus.
        general_held_out: validation split of the general corpus; None without such a corpus, or if `held_out` is empty.
    """

    domain: TokenShards
    training: TokenShards
    held_out: TokenShards
    general_held_out: TokenShards | None = None

    @classmethod
    def open(cls, config: PretrainConfig) -> Corpora:
        """Open the corpora that `config` names; raises the errors of `open_shards` and `with_replay`."""
        adaptation = config.adaptation
        domain, held_out = open_corpus(config.corpus, "train"), open_corpus(config.corpus, "validation")
        if not adaptation.replay_corpus:
            return cls(domain, domain, held_out)
        general = local_path(adaptation.replay_corpus)
        training = domain
        if adaptation.replay_share:
            training = with_replay(domain, open_shards(general, "train"), adaptation.replay_share)
        if not held_out.shards:
            return cls(domain, training, held_out)
        return cls(domain, training, held_out, open_shards(general, "validation"))

    def fingerprints(self) -> dict[str, str]:
        """Return {setting: fingerprint of the corpus that it names}."""
        mixed = None if self.training is self.domain else self.training
        shards_by_setting = {
            "corpus.dir": self.domain,
            "adaptation.replay_share": mixed,
            "adaptation.replay_corpus": self.general_held_out,
        }
        return {name: shards.fingerprint for name, shards in shards_by_setting.items() if shards is not None}


class Continuation:
    """Initial weights and learning rates from the checkpoint `start_from`; the run's own checkpoints record its folder.

    Args:
        config: config of the run.
        corpora: corpora of the run.
        parameters: the model's parameters by name, with their random initial values.

    Attributes:
        lr_scales: learning-rate factor of each parameter, for `scaled_groups`.
        identity: fingerprints of the run's data and initial checkpoint, stored in each of its checkpoints.
    """

    def __init__(self, config: PretrainConfig, corpora: Corpora, parameters: Mapping[str, Tensor]) -> None:
        self._config, self._corpora = config, corpora
        self._initial_values = dict(parameters) if config.start_from else {}
        self.lr_scales = lr_scales(parameters, config.adaptation, config.model.layers)
        self._old_rows_scale = self.lr_scales[_WORD_EMBEDDINGS]
        # With added words, one learning rate cannot suit old and added rows: `_scale_old_rows` scales the old ones.
        if config.corpus.vocabulary.added_words:
            self.lr_scales[_WORD_EMBEDDINGS] = 1.0
        self.identity: dict[str, Any] = {
            "fingerprint": corpora.training.fingerprint,
            "sampler": SAMPLER_VERSION,
            "tokenizer": tokenizer_digest(corpora.domain.folder),
        }

    def initialize(self, engine: Engine) -> None:
        """Load the initial checkpoint, which all ranks read; weights that it lacks keep their random initial values."""
        if not self._config.start_from:
            return
        shapes = {name: tuple(tensor.shape) for name, tensor in self._initial_values.items()}
        start = read_start(self._config, shapes, self._corpora.domain)
        check_same_data({"start_from": start.fingerprint})
        engine.load(InitialWeights({**self._initial_values, **start.state}))
        self._initial_values = {}
        self.identity["start"] = {
            "folder": self._config.start_from,
            "fingerprint": start.fingerprint,
            "old_entries": start.old_rows,
        }
        self._scale_old_rows(engine)
        if engine.rank == 0:
            write_json(
                self._config.folder / START_FILE,
                {
                    **self.identity["start"],
                    "initialized": list(start.initialized),
                    "table": start.table.split("\n"),
                    "family": start.family,
                    "config": start.config,
                    SENTENCE: start.sentence_files,
                },
            )
        logger.info("started from %s (%s)\n%s", self._config.start_from, start.fingerprint[:12], start.table)

    def resume(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Restore `identity` and the rates from a checkpoint's `state`. `start_from` is not read again."""
        self._initial_values = {}
        if "start" in state:
            self.identity["start"] = state["start"]
            self._scale_old_rows(engine)

    def _scale_old_rows(self, engine: Engine) -> None:
        """Scale the updates of the word embeddings' rows that come from the initial checkpoint."""
        rows, hidden_size = engine.shapes[_WORD_EMBEDDINGS]
        if self._old_rows_scale != self.lr_scales[_WORD_EMBEDDINGS]:
            old_rows = min(rows, int(self.identity["start"]["old_entries"]))
            engine.scale_updates(_WORD_EMBEDDINGS, old_rows * hidden_size, self._old_rows_scale)
