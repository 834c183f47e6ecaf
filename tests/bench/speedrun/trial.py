"""The runs of a trial: its config on the fixed text, with as many steps as each budget has."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.common import settings
from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open
from pretrain.config import CorpusConfig, PretrainConfig, SourceConfig, load_config
from tests.bench.speedrun.budget import Plan
from tests.bench.speedrun.ground import HELD_OUT, TRAIN, text_files

_EVALUATIONS = 10  # in a run
# Settings of a run that do not change what it comes to. The name of the corpus folder is a hash of what does.
_FREE = ("scheduling", "tracking", "corpus.processes", "run_dir", "corpus.dir", "corpus.sources.*.path")


def ground_config(
    path: Path, overrides: Sequence[str], card: Mapping[str, Any], out: Path, seed: int | None
) -> PretrainConfig:
    """The trial's config, with the drawn text as its corpus.

    Trials with equal settings of the vocabulary share a prepared corpus.

    Raises `InputError` if the config is wrong, or begins with what other text has taught.
    """
    config = load_config(path, overrides)
    if config.start_from:
        raise InputError(f"{path}: start_from ({config.start_from}): a trial begins with random weights. Remove it.")
    vocabulary = config.corpus.vocabulary
    if vocabulary.path and not config.distillation.teacher:
        raise InputError(
            f"{path}: corpus.vocabulary.path ({vocabulary.path}): the vocabulary is trained on the drawn text; only a "
            "distillation takes its teacher's. Remove it, and set size and kind."
        )
    decisive = [card["sha256"], vocabulary.model_dump(mode="json"), config.corpus.language]
    name = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:12]
    corpus = CorpusConfig(
        dir=str(out / "corpora" / name),
        sources=tuple(_sources(card, out)),
        vocabulary=vocabulary,
        min_document_words=0,
        validation_fraction=0.0,
        language=config.corpus.language,
        processes=config.corpus.processes,
    )
    return config.model_copy(update={"corpus": corpus, **({} if seed is None else {"seed": seed})})


def run_config(config: PretrainConfig, budget: float, plan: Plan, out: Path) -> PretrainConfig:
    """The run of a trial that spends `budget`: an ordinary pretraining. Raises `InputError` for a name too long."""
    name = run_name(config, budget)
    every = max(1, plan.steps // _EVALUATIONS)
    values = {
        **config.model_dump(mode="json"),
        "name": re.sub(r"[^a-z0-9-]", "-", name)[:63],
        "run_dir": str(out / "runs" / name),
        "phases": [phase.model_dump(mode="json") for phase in plan.phases],
        "evaluation": {**config.evaluation.model_dump(), "every_steps": every},
        "checkpoint": {**config.checkpoint.model_dump(), "every_steps": every, "keep_last": 1},
    }
    return PretrainConfig.model_validate(values)


def run_name(config: PretrainConfig, budget: float) -> str:
    """NAME-BUDGET-sSEED, such as bert-mini-5e14-s0."""
    return f"{config.name}-{budget_text(budget)}-s{config.seed}"


def budget_text(budget: float) -> str:
    """500000000000000.0 -> 5e14."""
    mantissa, exponent = f"{budget:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def check_unbegun(name: str, out: Path, config: PretrainConfig | None) -> None:
    """Raise `InputError` if a run of that name was begun with other settings; None are those of no possible run."""
    path = _config_path(name, out)
    if not path.is_file():
        return
    others = ["phases"] if config is None else settings.differences(load_config(path), config, free=_FREE)
    if others:
        raise InputError(
            f"{path}: a trial of this name was begun with other settings: {', '.join(others)}. Give this one "
            "another name, such as --set name=second."
        )


def write_run_config(config: PretrainConfig, out: Path) -> Path:
    """Write the run's config beside the runs; returns its path."""
    path = _config_path(config.folder.name, out)
    with atomic_open(path, "w") as file:
        file.write(settings.dump(config))
    return path


def _config_path(name: str, out: Path) -> Path:
    return out / "configs" / f"{name}.yaml"


def _sources(card: Mapping[str, Any], out: Path) -> list[SourceConfig]:
    """The training text of each source, and then what is held out."""
    folder, sources = out / "corpus", []
    for part in (TRAIN, HELD_OUT):
        for name, path in text_files(card, folder, part).items():
            title = name if part == TRAIN else f"{name} {part}"
            sources.append(SourceConfig(kind="jsonl", name=title, path=str(path), held_out=part == HELD_OUT))
    return sources
