"""The command `bench speedrun`: text, corpus, one run for each budget, scores, table and log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pretrain
from pretrain.common.commands import add_set, add_workers, local_path, overrides, program
from pretrain.common.errors import DivergedError, InputError, RunError, StoppedError
from pretrain.common.files import locked
from pretrain.common.records import is_training, read_records
from pretrain.common.run_files import ENVIRONMENT_FILE
from pretrain.common.thread_waits import sleeping_when_crowded
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.run.preflight import with_resolved_precision
from tests.bench.speedrun import results, trial
from tests.bench.speedrun.budget import TOLERANCE, Plan, measured_costs, plan_budget
from tests.bench.speedrun.ground import HELD_OUT, NOVELS, TRAIN, draw_text, drawn_novels, novels_of, text_files
from tests.bench.speedrun.results import Trial
from tests.bench.speedrun.scores import measure

DEFAULT_BUDGETS = (0.5e15, 2e15, 4e15)
_DESCRIPTION = """Trains a config on a fixed text with fixed budgets of FLOPs, and says what it learned.

The text is drawn from --data: at most 10 million words, and others that are held out. A budget counts every FLOP of
matrix products that training executes; the phases of the config keep their proportions. Each budget is an ordinary
pretraining in --out/runs. Bits of common words decide: they compare vocabularies. The same command again continues
what was stopped and skips what is finished."""
_EPILOG = """examples:
  ./launch.sh bench speedrun configs/pretrain/bert-mini.yaml --data text/ --budget 0.5e15
  ./launch.sh bench speedrun configs/pretrain/modernbert-mini.yaml --data text/ --workers 2
  ./launch.sh bench speedrun my.yaml --data text/ --set name=fast --set phases.0.peak_learning_rate=2e-3

Exit codes: 0 success, 2 invalid input, or no budget can be spent, 4 all runs diverged, 75 stopped; the same command
continues."""


def main(argv: Sequence[str]) -> int:
    """Run the trial of a config with each budget.

    Returns the exit code of a run that stopped or failed, or else that of a divergence if all runs diverged, or 0.

    Raises:
        InputError: a path or setting is wrong, or none of the budgets can be spent.
    """
    arguments = _parser().parse_args(argv)
    budgets = sorted(set(arguments.budget or DEFAULT_BUDGETS))
    _check(arguments, budgets)
    out: Path = arguments.out
    card = draw_text(arguments.data, out / "corpus", novels=arguments.novels)
    print(_text_line(card, out / "corpus"))
    config = trial.ground_config(arguments.config, overrides(arguments), card, out, arguments.seed)
    print(pretrain.prepare(config).summary.partition("\n")[0])
    return _Trials(config, card, arguments).run(budgets)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench speedrun",
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("./launch.sh", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", type=local_path, metavar="CONFIG", help="YAML file of a pretraining; its text is not used"
    )
    parser.add_argument(
        "--data",
        type=local_path,
        required=True,
        metavar="DIR",
        help="folder with WikiExtractor's files and novels (*.txt), and nothing else",
    )
    parser.add_argument(
        "--novels",
        type=float,
        default=NOVELS,
        metavar="SHARE",
        help=f"share of the words that is drawn from novels (default: {NOVELS}, as in BERT's text); what is held out "
        "is the same for every share",
    )
    parser.add_argument(
        "--budget",
        type=float,
        action="append",
        metavar="FLOP",
        help="FLOPs to train with; may be repeated (default: 0.5e15, 2e15 and 4e15)",
    )
    parser.add_argument(
        "--out", type=local_path, default="runs/speedrun", metavar="DIR", help="all results (default: runs/speedrun)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the run (default: that of the config)")
    add_set(parser)
    add_workers(parser)
    return parser


def _check(arguments: argparse.Namespace, budgets: Sequence[float]) -> None:
    wrong = [budget for budget in budgets if not 0 < budget < 1e30]
    if wrong:
        raise InputError(f"--budget: {wrong[0]:g}; expected a number of FLOPs above 0 and below 1e30, such as 0.5e15.")
    if not 0 < arguments.novels < 1:
        raise InputError(f"--novels: {arguments.novels:g}; expected a share above 0 and below 1, such as {NOVELS}.")
    if arguments.seed is not None and arguments.seed < 0:
        raise InputError(f"--seed: {arguments.seed}; expected a whole number from 0.")


def _text_line(card: dict[str, Any], folder: Path) -> str:
    parts = [
        f"{name} {source[TRAIN]['words']:,} words in {source[TRAIN]['documents']:,} documents "
        f"({source[HELD_OUT]['words']:,} in {source[HELD_OUT]['documents']:,} held out)"
        for name, source in card["sources"].items()
    ]
    return f"{folder}: {card['words']:,} words, SHA-256 {card['sha256'][:16]}: {', '.join(parts)}"


class _Trials:
    """The runs of one config, one for each budget."""

    def __init__(self, config: PretrainConfig, card: dict[str, Any], arguments: argparse.Namespace) -> None:
        self._config, self._card, self._arguments = config, card, arguments
        self._out: Path = arguments.out
        self._results = results.read(self._out / results.RESULTS, card["sha256"])
        self._texts = list(text_files(card, self._out / "corpus", HELD_OUT).values())
        self._teacher = _teacher(config)

    def run(self, budgets: Sequence[float]) -> int:
        """Plan all runs, then train and score them one after another."""
        plans = self._plans(budgets)
        configs = {budget: trial.run_config(self._config, budget, plan, self._out) for budget, plan in plans.items()}
        for config in configs.values():
            trial.check_unbegun(config.folder.name, self._out, config)
        codes: dict[str, int] = {}
        try:
            for budget, plan in plans.items():
                config = configs[budget]
                code = codes[config.folder.name] = self._train(config, budget, plan)
                if code not in (0, DivergedError.exit_code):
                    break
        finally:  # what has finished is shown whatever the next one comes to
            over = [name for name, code in codes.items() if code in (0, DivergedError.exit_code)]
            if over:
                self._report(over)
        code = next((code for code in codes.values() if code not in (0, DivergedError.exit_code)), 0)
        if code == StoppedError.exit_code:
            print(f"The trial stopped. Run the same command again to continue it in {self._out}.")
        return code or min(codes.values())

    def _plans(self, budgets: Sequence[float]) -> dict[float, Plan]:
        """Budget -> its run; those that cannot be spent become rows that say why."""
        costs = measured_costs(self._config, self._teacher)
        plans: dict[float, Plan] = {}
        refused: dict[float, str] = {}
        for budget in budgets:
            try:
                plans[budget] = plan_budget(self._config, budget, costs)
            except InputError as error:
                refused[budget] = str(error)
        for budget in refused:
            trial.check_unbegun(trial.run_name(self._config, budget), self._out, None)
        for budget, why in refused.items():
            self._keep(self._trial(budget, remarks=why))
        if not plans:
            raise InputError("\n".join(refused.values()))
        return plans

    def _train(self, config: PretrainConfig, budget: float, plan: Plan) -> int:
        """Train and score one run; returns the exit code of the training."""
        path = trial.write_run_config(config, self._out)
        print(
            f"\n{config.folder}: {budget:.3g} FLOP, {plan.steps:,} steps, {plan.tokens:,.0f} tokens, "
            f"{plan.epochs:.2f} epochs",
            flush=True,
        )
        try:
            pretrain.train(path, resume=True, no_ray=config.scheduling.workers == 1)
        except RunError as error:
            print(f"error: {str(error).removesuffix(StoppedError.CONTINUE)}", file=sys.stderr)
            if isinstance(error, DivergedError):
                self._keep(self._trial(budget, remarks="the training diverged"))
            return error.exit_code
        self._keep(self._finished(config, budget, plan))
        return 0

    def _finished(self, config: PretrainConfig, budget: float, plan: Plan) -> Trial:
        """The row of a finished run."""
        records = read_records(config.folder)
        last = [record for record in records if is_training(record)][-1]
        flops = plan.flops_of(last["tokens"])
        given = novels_of(self._card) != NOVELS
        remarks = [f"{drawn_novels(self._card):.0%} of the words from novels"] if given else []
        if config.distillation.teacher:
            remarks.append(f"learned from {config.distillation.teacher}")
        if abs(flops - budget) > TOLERANCE * budget:
            remarks.append(f"the FLOPs that were counted differ from the budget by {flops / budget - 1:+.1%}")
        rollbacks = [record["passed_over_steps"] for record in records if record.get("event") == "rollback"]
        if rollbacks:
            remarks.append(f"{sum(rollbacks):,} steps were rolled back and are not counted")
        with sleeping_when_crowded():
            scores = measure(config, self._texts)
        return self._trial(
            budget,
            flops=flops,
            steps=last["step"],
            tokens=last["tokens"],
            epochs=plan.epochs * last["samples"] / plan.sequences,
            minutes=last["seconds"] / 60,
            scores=scores,
            config=with_resolved_precision(config).model_dump(mode="json"),
            machine=json.loads((config.folder / ENVIRONMENT_FILE).read_text(encoding="utf-8")),
            remarks="; ".join([*remarks, *filter(None, [scores.unscored])]),
        )

    def _trial(self, budget: float, **values: Any) -> Trial:
        name = trial.run_name(self._config, budget)
        common = {"trial": self._config.name, "run": name, "seed": self._config.seed, "budget": budget}
        return Trial(**common, words=self._card["words"], ground=self._card["sha256"], **values)

    def _keep(self, one: Trial) -> None:
        """Add a row to speedrun.json, to which trials of other processes may add theirs."""
        path = self._out / results.RESULTS
        with locked(path.with_name(f".{path.name}.lock")):
            self._results = results.with_trial(results.read(path, self._card["sha256"]), one)
            results.write(self._results, path)

    def _report(self, names: Sequence[str]) -> None:
        """The table, the rows of the log, and the one number: bits of common words at the largest budget."""
        print(f"\n{results.table(self._results)}\n\n{self._out / results.RESULTS}")
        own = [one for one in self._results.trials if one.run in names]
        print("\n".join(["Rows of the log:", *(results.log_row(one) for one in own if one.flops)]))
        largest = max((one for one in own if one.flops), key=lambda one: one.budget, default=None)
        if largest is not None:
            print(f"{largest.run}: {largest.scores.headline}")


def _teacher(config: PretrainConfig) -> ModelConfig | None:
    if not config.distillation.teacher:
        return None
    from pretrain.checkpoint.released import read_shape

    return read_shape(config.distillation.teacher)
