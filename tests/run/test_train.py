"""Whole training runs: exact resume, any number of workers, stops, divergence, and what is refused.

`train.main` runs in real processes joined by gloo; the command line in a process of its own.
"""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from corpora import make_corpus, make_corpus_of_two_piece_words

from cluster.workers.actors import PROCESS_TITLE
from finetune.cli import main
from pretrain.config import PretrainConfig, load_config
from pretrain.run import forward_backward, loop, preflight
from tests.distributed import ROOT, Program, run_program, run_workers
from tests.starts import Start, losses, pretraining, records, starts

STEPS = 6  # over both phases


def settings(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run of two phases; section__key changes it."""
    small = {"engine__micro_batch_tokens": 256, "evaluation__every_steps": 3}
    return pretraining(corpus, run_dir, [(32, 12, 4), (64, 6, 2)], **{**small, **changes})


def starts_of_own(given: list[list[Start]]) -> list[str]:
    """Each rank's own starts."""
    return starts(given[dist.get_rank()])


def test_batches_without_a_masked_token_train(tmp_path: Path) -> None:
    """One token of a sequence may be masked, and every word has two: `whole_word` masks none."""
    corpus = make_corpus_of_two_piece_words(tmp_path / "corpus")
    objectives = {"masked": {}, "electra": {"electra__generator_width": 0.5}}
    changes: dict[str, Any] = {"pairs__objective": "none", "pairs__short_share": 0.0, "masking__scheme": "whole_words"}
    changes["engine__zero_stage"] = 3
    plan = [
        Start(pretraining(corpus, tmp_path / name, [(9, 2, 3)], **changes, **own)) for name, own in objectives.items()
    ]
    assert run_workers(2, starts, plan) == [[""] * 2] * 2
    for name in objectives:
        made = records(tmp_path / name)
        assert [record["mlm_loss"] for record in made] == [0.0] * 3
        assert [record["loss"] > 0 for record in made] == [name == "electra"] * 3


# ---- exact resume, any number of workers


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Run folders by (workers, ZeRO stage): never interrupted, and one stopped at step 2 and at step 5 beside it."""
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for world, stages in ((1, (0, 3)), (2, (1, 3))):
        plan = []
        for stage in stages:
            through, broken = (root / f"{world}-{stage}-{name}" for name in ("through", "broken"))
            plan.append(Start(settings(corpus, through, engine__zero_stage=stage)))
            again = settings(corpus, broken, engine__zero_stage=stage)
            plan += [Start(again, stop_at=2), Start(again, resume=True, stop_at=3), Start(again, resume=True)]
            found[world, stage] = through
        for outcomes in run_workers(world, starts, plan):
            for number, outcome in enumerate(outcomes):
                assert outcome.partition(":")[0] == ("", "StoppedError", "StoppedError", "")[number % 4], outcome
    return found


@pytest.mark.parametrize("run", [(1, 0), (1, 3), (2, 1), (2, 3)])
def test_a_resumed_run_has_bitwise_the_losses_of_one_never_interrupted(whole, run: tuple[int, int]) -> None:
    through = whole[run]
    broken = through.with_name(through.name.replace("through", "broken"))
    assert losses(broken) == losses(through)
    assert [step for step, _ in losses(through)] == list(range(1, STEPS + 1))
    assert losses(broken, "validation") == losses(through, "validation")
    assert [step for step, _ in losses(through, "validation")] == [3, 6]
    final = f"checkpoints/step-{STEPS:08d}"
    weights = {path.name: path.read_bytes() for path in (through / final).glob("*.safetensors")}
    assert weights == {path.name: path.read_bytes() for path in (broken / final).glob("*.safetensors")}


def test_losses_do_not_depend_on_workers_or_stage(whole) -> None:
    expected = losses(whole[1, 0])
    for folder in whole.values():
        for (step, loss), (wanted_step, wanted) in zip(losses(folder), expected, strict=True):
            assert step == wanted_step
            assert loss == pytest.approx(wanted, abs=1e-5), (folder.name, step)


def test_a_run_continues_with_other_workers_or_micro_batches(whole, corpus: Path, tmp_path: Path) -> None:
    names = ("more workers", "fewer workers", "smaller")
    more, fewer, smaller = (settings(corpus, tmp_path / name, engine__zero_stage=1) for name in names)
    cut = settings(corpus, tmp_path / "smaller", engine__zero_stage=1, engine__micro_batch_tokens=64)
    given = [Start(more, stop_at=3), Start(smaller, stop_at=3), Start(cut, resume=True)]
    stopped, other, ended = run_workers(1, starts, given)[0]
    resumed, cut_off = run_workers(2, starts, [Start(more, resume=True), Start(fewer, stop_at=3)])[0]
    assert all(outcome.startswith("StoppedError") for outcome in (stopped, other, cut_off))
    assert run_workers(1, starts, [Start(fewer, resume=True)]) == [[ended]] == [[resumed]] == [[""]]
    for name in names:
        for (step, loss), (_, wanted) in zip(losses(tmp_path / name), losses(whole[1, 0]), strict=True):
            assert loss == pytest.approx(wanted, abs=1e-5), (name, step)


def test_records_count_what_was_trained(whole) -> None:
    first, *_, last = records(whole[2, 1])
    assert (first["samples"], last["samples"]) == (12, 4 * 12 + 2 * 6)
    assert first["tokens"] <= 12 * 32
    assert last["loss"] == pytest.approx(last["mlm_loss"] + last["nsp_loss"])
    names = ("epoch", "mlm_accuracy", "nsp_accuracy", "lr", "grad_norm", "tokens_per_second", "mfu")
    for name in (*names, "data_stall_fraction", "seconds"):
        assert isinstance(last[name], (int, float)), name


def test_it_learns(corpus: Path, tmp_path: Path) -> None:
    config = pretraining(corpus, tmp_path / "run", [(32, 32, 60)], engine__precision="bf16")
    config["phases"][0] |= {"peak_learning_rate": 5e-3, "warmup_steps": 6}
    assert run_workers(1, starts, [Start(config)]) == [[""]]
    found = [record["mlm_loss"] for record in records(tmp_path / "run")]
    assert sum(found[-5:]) / 5 < found[0] - 0.3


# ---- what goes wrong


def test_what_is_refused_when_training_starts(corpus: Path, tmp_path: Path) -> None:
    """Another corpus or seed under a checkpoint, too small a corpus, and divergence; each ends in its own words."""
    other = make_corpus(tmp_path / "other", documents=60, vocabulary_size=300, seed=1)
    config = settings(corpus, tmp_path / "run")
    swapped = settings(other, tmp_path / "run")
    phase = config["phases"][0]
    later = settings(corpus, tmp_path / "later", phases=[phase, {**phase, "global_sequences": 1_000_000}])
    reseeded = settings(corpus, tmp_path / "run", seed=9, engine__zero_stage=3)
    wider = settings(corpus, tmp_path / "run", model__max_positions=32, phases=[phase])
    too_big = settings(corpus, tmp_path / "big", phases=[{**phase, "global_sequences": 1_000_000}])
    wild_phase = {**phase, "peak_learning_rate": 1e30, "steps": 40}
    wild = settings(corpus, tmp_path / "wild", phases=[wild_phase], checkpoint__every_steps=1)
    resumed = [Start(values, resume=True) for values in (swapped, reseeded, wider)]
    given = [Start(config, stop_at=1), *resumed, Start(too_big), Start(later), Start(wild)]
    ended, refused, other_seed, reshaped, small, small_later, diverged = run_workers(1, starts, given)[0]
    assert "embeddings.position has shape [64, 32], but [32, 32] with this config" in reshaped
    assert small_later.startswith("InputError: phases.1.global_sequences: 1000000, but")
    assert not (tmp_path / "later/metrics.jsonl").exists() or not records(tmp_path / "later"), "before any step"
    assert ended.startswith("StoppedError")
    assert refused.startswith(f"InputError: {tmp_path}/run/checkpoints/step-00000001: has read source-0 in phases.0, ")
    assert "step-00000001: the run was started with other settings: seed (0 -> 9). Resume with" in other_seed
    assert "phases.0.global_sequences: 1000000, but" in small
    assert small.startswith("InputError")
    assert diverged.startswith("DivergedError: 5 steps in a row")
    steps = [record["step"] for record in records(tmp_path / "wild")]
    assert steps == sorted(set(steps)), "every step is logged once"
    good = diverged.partition("last good checkpoint is ")[2].partition(". ")[0]
    assert (tmp_path / "wild" / "checkpoints" / good / "manifest.json").is_file()


def test_a_damaged_checkpoint_is_skipped(whole, corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, tmp_path / "run", engine__zero_stage=0, checkpoint={"every_steps": 1, "keep_last": 5})
    assert run_workers(1, starts, [Start(config, stop_at=4)])[0][0].startswith("StoppedError")
    damaged = next((tmp_path / "run/checkpoints/step-00000004").glob("*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert run_workers(1, starts, [Start(config, resume=True)]) == [[""]]
    assert losses(tmp_path / "run") == losses(whole[1, 0])


def starts_without_access(given: list[Start]) -> list[str]:
    """Starts of another user, who may not read shards."""
    from pretrain.common import files

    whole = files.sha256_file

    def refused(path: Path) -> str:
        if path.name.startswith("rank-"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sha256_file", refused)
        return starts(given)


def test_a_run_whose_checkpoints_cannot_be_read_is_not_a_new_one(corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, tmp_path / "run", engine__zero_stage=1)
    assert run_workers(1, starts, [Start(config, stop_at=4)])[0][0].startswith("StoppedError")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json*")}
    for outcome in run_workers(2, starts_without_access, [Start(config, resume=True)]):
        assert outcome[0].startswith("MachineError: ")
        assert "rank-00000-of-00001.safetensors: cannot be read (Permission denied). Check" in outcome[0]
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json*")} == before


def starts_with_an_old_listing(given: list[Start]) -> list[str]:
    """Starts that never see the newest checkpoint in a listing of the folder, as with the attribute cache of NFS."""
    from pretrain.checkpoint import store

    whole = store.list_checkpoints
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "list_checkpoints", lambda folder: whole(folder)[:-1])
        return starts(given)


def test_a_resume_does_not_write_the_checkpoint_that_it_reads(corpus: Path, tmp_path: Path) -> None:
    """Each rank would decide on its own listing, and one that lacks the checkpoint waits for the others for ever."""
    config = settings(corpus, tmp_path / "run", checkpoint__keep_last=5)
    assert run_workers(1, starts, [Start(config, stop_at=2)])[0][0].startswith("StoppedError")
    shard = next((tmp_path / "run/checkpoints/step-00000002").glob("*.safetensors"))
    before = shard.read_bytes()
    resumed = run_workers(1, starts_with_an_old_listing, [Start(config, resume=True, stop_at=1)])[0][0]
    assert resumed.startswith("StoppedError: stopped at step 3")
    assert shard.read_bytes() == before


def test_workers_with_other_settings_or_data_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Under torchrun each machine reads its own config, and with any launcher its own disk."""
    other = make_corpus(tmp_path / "other", documents=60, vocabulary_size=300, seed=1)
    same = make_corpus(tmp_path / "same", documents=60, vocabulary_size=300)
    models = [settings(corpus, tmp_path / f"model-{seed}", seed=seed) for seed in (0, 1)]
    assert run_workers(1, starts, [Start(model) for model in models]) == [["", ""]]
    for model in models:
        preflight.record_config(PretrainConfig.model_validate(model))

    def start(name: str, folder: Path = corpus, **changes: Any) -> Start:
        return Start(settings(folder, tmp_path / name, **changes))

    def begins(name: str, **changes: Any) -> Start:
        return start(name, start_from=models[0]["run_dir"], **changes)

    plan = [
        (start("seeds"), start("seeds", seed=9, masking__probability=0.4)),
        (start("corpora"), start("corpora", other)),
        *(
            tuple(start(setting, **{setting: model["run_dir"]}) for model in models)
            for setting in ("start_from", "distillation__teacher")
        ),
        # What one of them has not would be read, and compared, by the others alone.
        (begins("begins"), start("begins")),
        (start("learns"), start("learns", distillation__teacher=models[1]["run_dir"])),
        (begins("replays"), begins("replays", adaptation__replay_corpus=str(other))),
        (begins("replays", adaptation__replay_corpus=str(other)), begins("replays")),
        (start("beats"), start("beats", scheduling__hang_seconds=0)),
        (start("here"), start("there")),
        (replace(start("goes-on"), resume=True), start("goes-on")),
        (start("fine"), start("fine", same, engine__precision="auto", scheduling__max_failures=5)),
    ]
    outcomes = run_workers(2, starts_of_own, [list(one) for one in zip(*plan, strict=True)])
    assert outcomes[0] == outcomes[1]
    seeds, corpora, begun, taught, new, learns, *replays, beats, apart, goes_on, fine = outcomes[0]
    where = f"InputError: worker 1 on {socket.gethostname()} differs from worker 0: "
    for outcome, names in (
        (new, f"start_from ({models[0]['run_dir']} -> none)"),
        (learns, f"distillation.teacher (none -> {models[1]['run_dir']})"),
        (replays[0], f"adaptation.replay_corpus (none -> {other})"),
        (replays[1], f"adaptation.replay_corpus ({other} -> none)"),
        (beats, "scheduling.hang_seconds (180.0 -> 0.0)"),
        (goes_on, "--resume (True -> False)"),
    ):
        assert outcome == f"{where}{names}. Start all workers with the same config and overrides."
    assert apart.startswith(f"InputError: run_dir: {tmp_path / 'here'}: worker 1 does not see {tmp_path / 'here'} of")
    assert seeds.startswith(f"{where}seed (0 -> 9), masking.probability (0.15 -> 0.4). Start all workers with")
    for name, outcome in (("corpus.dir", corpora), ("start_from", begun), ("distillation.teacher", taught)):
        assert re.fullmatch(rf"{re.escape(where)}{name} \(\w{{12}} -> \w{{12}}\)\. Give every machine the .*", outcome)
    assert fine == ""
    assert sorted(path.parent.name for path in tmp_path.glob("*/checkpoints")) == ["fine", "model-0", "model-1"]


# ---- the command line


@pytest.fixture
def config_file(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    phase = {"sequence_length": 32, "global_sequences": 12, "steps": 80, "peak_learning_rate": 1e-3}
    config = settings(corpus, tmp_path / "run", phases=[phase], evaluation__every_steps=80)
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("asked", ["by signal", "by file"])
def test_a_stop_saves_and_exits_75_and_resume_continues(config_file: Path, tmp_path: Path, asked: str) -> None:
    metrics, words = tmp_path / "run/metrics.jsonl", ["pretrain", str(config_file), "--no-ray"]
    with Program(main, words) as process:
        deadline = time.monotonic() + 600
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.returncode is None, process.communicate()
            assert time.monotonic() < deadline, "no step in ten minutes"
            time.sleep(0.02)
        if asked == "by file":
            (tmp_path / "run/stop").touch()
        else:
            process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=300)
    assert process.returncode == 75, error
    assert error.startswith("error: stopped at step ")
    assert "Traceback" not in error
    stopped = int(error.split("step ")[1].split()[0])
    checkpoint = tmp_path / f"run/checkpoints/step-{stopped:08d}"
    assert (checkpoint / "manifest.json").is_file()

    ended = run_program(main, [*words, "--resume"])
    assert ended.returncode == 0, ended.stderr
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 81))
    assert load_config(tmp_path / "run/config.yaml").name == "trial"


def compile_for_ever(passes: int, words: list[str]) -> int:
    """The command line, in which the pass after so many compiles for ever, and gets SIGTERM meanwhile."""
    loop.STOP_SECONDS, launch, done = 0.0, forward_backward.ForwardBackward.run_without_graph, []

    def slow(*arguments: Any, **options: Any) -> Any:
        if len(done) == passes:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        done.append(True)
        return launch(*arguments, **options)

    forward_backward.ForwardBackward.run_without_graph = slow  # type: ignore[method-assign]
    return main(words)


@pytest.mark.parametrize("passes", [0, 12])
def test_a_stop_during_a_compilation_saves_the_steps_before_it(config_file: Path, tmp_path: Path, passes: int) -> None:
    ended = run_program(compile_for_ever, passes, ["pretrain", str(config_file), "--no-ray"])
    steps = len(losses(tmp_path / "run")) if passes else 0
    saved = f"stopped at step {steps} of 80; checkpoint step-{steps:08d}" if passes else "the next step. No step"
    assert ended.stderr.endswith(f"{saved} is saved. Continue with --resume.\n")
    assert ended.returncode == (75 if passes else 130)
    assert (tmp_path / f"run/checkpoints/step-{steps:08d}/manifest.json").is_file()
    assert steps > 0 or not passes


@pytest.mark.slow
def test_a_worker_killed_under_ray_costs_no_step(config_file: Path, tmp_path: Path) -> None:
    """Two Ray workers; one is killed with SIGKILL; the run ends with the losses of a run of one process."""
    import psutil

    text = config_file.read_text().replace("every_steps: 100\n", "every_steps: 20\n")
    config_file.write_text(text)
    metrics = tmp_path / "run/metrics.jsonl"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    command = [sys.executable, "-m", "finetune.cli", "pretrain", str(config_file), "--workers", "2"]
    with subprocess.Popen(command, **pipes) as process:
        deadline = time.monotonic() + 240
        while not (metrics.exists() and metrics.read_text().count("\n") >= 25):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if any(PROCESS_TITLE in part for part in (child.name(), *child.cmdline()))
        ]
        assert len(workers) == 2, workers
        os.kill(workers[1].pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    through = settings(Path(yaml.safe_load(text)["corpus"]["dir"]), tmp_path / "alone")
    alone = {**through, "phases": yaml.safe_load(text)["phases"], "evaluation": {"every_steps": 80}}
    assert run_workers(1, starts, [Start(alone)]) == [[""]]
    found = losses(tmp_path / "run")
    assert [step for step, _ in found] == list(range(1, 81))
    for (step, loss), (_, wanted) in zip(found[:60], losses(tmp_path / "alone")[:60], strict=True):
        assert loss == pytest.approx(wanted, abs=1e-4), step
