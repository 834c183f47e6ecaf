"""The command `bench speedrun`: samples the text, prepares the corpus, trains with the budget, scores and logs."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pretrain
from pretrain.checkpoint.released import read_model_config
from pretrain.common import settings
from pretrain.common.commands import add_set, add_workers, overrides, parse_path, program
from pretrain.common.errors import InputError, StoppedError
from pretrain.common.files import atomic_open, locked
from pretrain.common.records import is_training, read_records
from pretrain.common.run_files import ENVIRONMENT_FILE
from pretrain.common.thread_waits import sleep_when_contended
from pretrain.config import CorpusConfig, PretrainConfig, SourceConfig, load_config
from pretrain.run.preflight import with_resolved_precision
from tests.bench.speedrun import results
from tests.bench.speedrun.budget import TOLERANCE, Plan, measured_costs, plan_budget
from tests.bench.speedrun.ground import HELD_OUT, TRAIN, draw_text, text_files
from tests.bench.speedrun.results import Trial, budget_text, measure

_EVALUATIONS = 10  # number of evaluations per run
# Settings that do not affect the result. The name of the corpus folder is a hash of settings that do.
_FREE = ("scheduling", "tracking", "corpus.processes", "run_dir", "corpus.dir", "corpus.sources.*.path")
_DESCRIPTION = """Trains a config on fixed text with a fixed FLOP budget, and scores the model.

The text is sampled from --data: at most 10 million words for training, and more that is held out. The budget counts
every FLOP of matrix products that training executes; the phases of the config keep their proportions. The run is an
ordinary pretraining in --out/runs. Trials are ranked by bits per common word, which compare vocabularies. To resume,
repeat the command.

example: ./launch.sh bench speedrun my.yaml --data text/ --set name=fast --set phases.0.peak_learning_rate=2e-3"""


def main(argv: Sequence[str]) -> int:
    """Run the trial of a config with a budget.

    Raises:
        InputError: a path or setting is wrong, or the budget cannot be spent.
    """
    arguments = _parser().parse_args(argv)
    budget, out = arguments.budget, arguments.out
    if not 0 < budget < 1e30:
        raise InputError(f"--budget: {budget:g}; expected a number of FLOPs above 0 and below 1e30, such as 0.5e15.")
    card = draw_text(arguments.data, out / "corpus")
    print(f"{out / 'corpus'}: {card['words']:,} words, SHA-256 {card['sha256'][:16]}")
    ground = ground_config(arguments.config, overrides(arguments), card, out)
    print(pretrain.prepare(ground).summary.partition("\n")[0])
    teacher = ground.distillation.teacher
    plan = plan_budget(ground, budget, measured_costs(ground, read_model_config(teacher) if teacher else None))
    config = run_config(ground, budget, plan, out)
    path = begin(config, out)
    print(f"{config.folder}: {plan.steps:,} steps, {plan.tokens:,.0f} tokens, {plan.epochs:.2f} epochs", flush=True)
    try:
        pretrain.train(path, resume=True, no_ray=config.scheduling.workers == 1)
    except StoppedError as error:
        raise error.for_rerun() from None
    texts = list(text_files(card, out / "corpus", HELD_OUT).values())
    trial = Trial(run=config.folder.name, ground=card["sha256"], **finished(config, budget, plan, texts))
    kept = out / results.RESULTS
    with locked(kept.with_name(f".{kept.name}.lock")):  # other processes may add trials
        trials = results.with_trial(results.read(kept, card["sha256"]), trial)
        results.write(trials, kept)
    print(results.table(trials), f"{kept}\n{trial.run}: {trial.scores.headline}", sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench speedrun",
        description=_DESCRIPTION.replace("./launch.sh", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    data = "folder with WikiExtractor's files and novels (*.txt), and nothing else"
    parser.add_argument("config", type=parse_path, metavar="CONFIG", help="YAML file; its corpus sources are not used")
    parser.add_argument("--data", type=parse_path, required=True, metavar="DIR", help=data)
    parser.add_argument("--budget", type=float, default=0.5e15, metavar="FLOP", help="FLOPs of training (0.5e15)")
    parser.add_argument("--out", type=parse_path, default="runs/speedrun", metavar="DIR", help="(runs/speedrun)")
    add_set(parser)
    add_workers(parser)
    return parser


def ground_config(path: Path, overrides: Sequence[str], card: Mapping[str, Any], out: Path) -> PretrainConfig:
    """Return the trial's config, with the sampled text as its corpus.

    Trials with equal vocabulary settings share a prepared corpus.

    Raises `InputError` if the config is wrong, or starts from weights or a vocabulary trained on other text.
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
    settings_of_corpus = [card["sha256"], vocabulary.model_dump(mode="json"), config.corpus.language]
    name = hashlib.sha256(json.dumps(settings_of_corpus).encode()).hexdigest()[:12]
    corpus = CorpusConfig(
        dir=str(out / "corpora" / name),
        sources=tuple(
            SourceConfig(kind="jsonl", name=f"{name} {part}", path=str(path), held_out=part == HELD_OUT)
            for part in (TRAIN, HELD_OUT)
            for name, path in text_files(card, out / "corpus", part).items()
        ),
        vocabulary=vocabulary,
        min_document_words=0,
        validation_fraction=0.0,
        language=config.corpus.language,
        processes=config.corpus.processes,
    )
    return config.model_copy(update={"corpus": corpus})


def run_config(config: PretrainConfig, budget: float, plan: Plan, out: Path) -> PretrainConfig:
    """Return the config of the run with this budget. Raises `InputError` if the name is too long."""
    name = f"{config.name}-{budget_text(budget)}-s{config.seed}"
    interval = max(1, plan.steps // _EVALUATIONS)
    values = {
        **config.model_dump(mode="json"),
        "name": re.sub(r"[^a-z0-9-]", "-", name)[:63],
        "run_dir": str(out / "runs" / name),
        "phases": [phase.model_dump(mode="json") for phase in plan.phases],
        "evaluation": {**config.evaluation.model_dump(), "every_steps": interval},
        "checkpoint": {**config.checkpoint.model_dump(), "every_steps": interval, "keep_last": 1},
    }
    return PretrainConfig.model_validate(values)


def begin(config: PretrainConfig, out: Path) -> Path:
    """Write the config of a run to the folder `configs`, and return its path.

    Raises `InputError` if a run with this name was started with other settings.
    """
    path = out / "configs" / f"{config.folder.name}.yaml"
    if path.is_file() and (others := settings.differences(load_config(path), config, ignore=_FREE)):
        raise InputError(
            f"{path}: a trial of this name was begun with other settings: {', '.join(others)}. Give this one "
            "another name, such as --set name=second."
        )
    with atomic_open(path, "w") as file:
        file.write(settings.dump(config))
    return path


def finished(config: PretrainConfig, budget: float, plan: Plan, texts: Sequence[Path]) -> dict[str, Any]:
    """Return the fields of `Trial` for a finished run."""
    records = read_records(config.folder)
    last = [record for record in records if is_training(record)][-1]
    flops = plan.flops_of(last["tokens"])
    remarks = [f"learned from {config.distillation.teacher}"] if config.distillation.teacher else []
    if abs(flops - budget) > TOLERANCE * budget:
        remarks.append(f"the FLOPs that were counted differ from the budget by {flops / budget - 1:+.1%}")
    rollbacks = [record["passed_over_steps"] for record in records if record.get("event") == "rollback"]
    if rollbacks:
        remarks.append(f"{sum(rollbacks):,} steps were rolled back and are not counted")
    with sleep_when_contended():
        scores = measure(config, texts)
    return {
        "budget": budget,
        "flops": flops,
        "steps": last["step"],
        "epochs": plan.epochs * last["samples"] / plan.sequences,
        "minutes": last["seconds"] / 60,
        "scores": scores,
        "config": with_resolved_precision(config).model_dump(mode="json"),
        "machine": json.loads((config.folder / ENVIRONMENT_FILE).read_text(encoding="utf-8")),
        "remarks": "; ".join([*remarks, *filter(None, [scores.unscored])]),
    }
