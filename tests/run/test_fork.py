"""A run that forks from another: equal to it bit for bit until something differs, and refused where it cannot be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import hf, store
from pretrain.checkpoint.released import read_released
from pretrain.common.errors import InputError
from pretrain.common.run_files import FORK_FILE, read_fork
from pretrain.config import PretrainConfig
from pretrain.run.fork import start_fork
from tests.distributed import run_workers
from tests.starts import Start, all_records, pretraining, records, starts

FORKED = 4  # after this step, in the middle of the first phase
ROTARY = {"positions": "rotary", "rotary_base": 100.0}


def settings(corpus: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """A run with two phases of six and three steps, whose checkpoints of the steps 2 and 4 stay."""
    values = pretraining(corpus, run, [(32, 8, 6), (64, 4, 3)], checkpoint__every_steps=3, **changes)
    values["checkpoint"] |= {"keep_last": 1, "keep_at": [2, FORKED]}
    values["model"] |= ROTARY
    values["evaluation"]["every_steps"] = 3
    return values


@pytest.fixture(scope="module")
def parent(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "parent"
    assert run_workers(2, starts, [Start(settings(corpus, run))]) == [[""], [""]]
    return run


def fork(parent: Path, corpus: Path, run: Path, *, workers: int = 2, at: int = FORKED, **changes: Any) -> Path:
    """The run that forks at a step, trained to its end."""
    assert run_workers(workers, starts, [begun(parent, corpus, run, at=at, **changes)]) == [[""]] * workers
    return run


def begun(parent: Path, corpus: Path, run: Path, *, at: int = FORKED, **changes: Any) -> Start:
    values = {**settings(corpus, run), "name": "child", "fork_from": f"{parent}@{at}", **changes}
    assert start_fork(PretrainConfig.model_validate(values))
    return Start(values, resume=True)


def weights(run: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "checkpoints" / store.name_of(step)).glob("*.safetensors")}


def test_chosen_checkpoints_stay(parent: Path) -> None:
    assert [path.name[-1] for path in store.list_checkpoints(parent / "checkpoints")] == ["2", "4", "9"]


def test_checkpoints_stay_every_so_many_tokens(corpus: Path, tmp_path: Path) -> None:
    values = settings(corpus, tmp_path / "run")
    values["checkpoint"] = {"every_steps": 1, "keep_last": 1, "keep_every_tokens": 500}
    values["evaluation"]["every_steps"] = 100
    assert run_workers(1, starts, [Start(values)]) == [[""]]
    tokens = {one["step"]: one["tokens"] for one in records(tmp_path / "run")}
    crossed = [step for step in tokens if tokens[step] // 500 > tokens.get(step - 1, 0) // 500]
    kept = [store.step_of(path) for path in store.list_checkpoints(tmp_path / "run/checkpoints")]
    assert kept == sorted({*crossed, 9})
    assert 2 < len(crossed) < 9


def test_a_fork_that_differs_in_nothing_is_its_parent(parent: Path, corpus: Path, tmp_path: Path) -> None:
    run = fork(parent, corpus, tmp_path / "run")
    assert [one["loss"] for one in records(run)] == [one["loss"] for one in records(parent)]
    assert weights(run, 9) == weights(parent, 9)
    evaluated = [one["loss"] for one in records(run, "validation")]
    assert evaluated == [one["loss"] for one in records(parent, "validation")]
    (event,) = [one for one in all_records(run) if one.get("event") == "fork"]
    assert event["message"] == f"forked from trial ({parent}) at step {FORKED}"
    assert not [one for one in all_records(run) if one.get("event") == "resume"]


@pytest.mark.parametrize(("stage", "workers"), [(0, 1), (1, 3), (3, 2)])
def test_a_fork_may_have_other_workers_and_stages(
    parent: Path, corpus: Path, tmp_path: Path, stage: int, workers: int
) -> None:
    engine = {**settings(corpus, tmp_path)["engine"], "zero_stage": stage}
    run = fork(parent, corpus, tmp_path / "run", workers=workers, engine=engine)
    for ours, theirs in zip(records(run), records(parent), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


def test_a_fork_ends_a_phase_and_goes_on_otherwise(parent: Path, corpus: Path, tmp_path: Path) -> None:
    """A longer context with its own base, another rate, decay, batch and masks; the parent's steps before it stay."""
    phases = settings(corpus, tmp_path)["phases"]
    own = {"sequence_length": 64, "global_sequences": 6, "rotary_base": 1000.0, "weight_decay": 0.3}
    own |= {"masking_probability": 0.3, "averaged_share": 1.0, "decay": "1-sqrt"}
    run = fork(parent, corpus, tmp_path / "run", phases=[{**phases[0], "steps": FORKED}, {**phases[1], **own}])
    ours, theirs = records(run), records(parent)
    assert [one["loss"] for one in ours[:FORKED]] == [one["loss"] for one in theirs[:FORKED]]
    assert ours[FORKED]["loss"] != theirs[FORKED]["loss"]
    assert [one["samples"] for one in ours] == [8, 16, 24, 32, 38, 44, 50]
    again = fork(parent, corpus, tmp_path / "again", phases=[{**phases[0], "steps": FORKED}, {**phases[1], **own}])
    assert weights(again, 7) == weights(run, 7)
    values = {**settings(corpus, run), "phases": [{**phases[0], "steps": FORKED}, {**phases[1], **own}]}
    (run / "config.yaml").write_text(json.dumps(values))  # as the command line does
    bases = {}
    for step in (FORKED, 7):
        hf.export_run(run, tmp_path / f"out-{step}", store.name_of(step))
        written = json.loads((tmp_path / f"out-{step}/config.json").read_text())
        bases[step] = written["model"]["rotary_base"] if "model" in written else written["rope_theta"]
    assert bases == {FORKED: 100.0, 7: 1000.0}
    assert store.read_state(run / "checkpoints" / store.name_of(7))["averaged"] == 3


def test_the_mean_of_forks_is_exported(parent: Path, corpus: Path, tmp_path: Path) -> None:
    phases = settings(corpus, tmp_path)["phases"]
    runs = [tmp_path / name for name in "abc"]
    given = [Start(pretraining(corpus, tmp_path / "other", [(32, 8, 1)], model__layers=1))]
    for run, rate in zip(runs, (1e-3, 5e-4, 2e-3), strict=True):
        own = [{**phases[0], "steps": FORKED}, {**phases[1], "peak_learning_rate": rate}]
        given.append(begun(parent, corpus, run, phases=own, name=run.name))
        values = {**settings(corpus, run), "phases": own, "name": run.name}
        (run / "config.yaml").write_text(json.dumps(values))  # as the command line does
    assert run_workers(1, starts, given) == [[""] * 4]
    hf.export_run(runs[0], tmp_path / "mean", other_runs=runs[1:])
    card = (tmp_path / "mean/README.md").read_text()
    assert "The weights are averaged over this run and b, c. It was forked from trial after step 4." in card
    written = read_released(tmp_path / "mean").backbone["embeddings.word"]
    each = [store.read_weights(run / "checkpoints" / store.name_of(7))["embeddings.word"] for run in runs]
    torch.testing.assert_close(written, torch.stack(each).mean(0))
    assert not torch.equal(written, each[0])
    with pytest.raises(InputError, match=r"has a different shape than .*, so their weights cannot be averaged"):
        hf.export_run(runs[0], tmp_path / "none", other_runs=[tmp_path / "other"])


def test_what_a_phase_has_of_its_own_has_an_effect(parent: Path, corpus: Path, tmp_path: Path) -> None:
    first = settings(corpus, tmp_path)["phases"][0]
    own: dict[str, dict[str, float]] = {"same": {}, "base": {"rotary_base": 0.9}, "decay": {"weight_decay": 0.9}}
    given = [
        begun(parent, corpus, tmp_path / name, phases=[{**first, "steps": FORKED}, {**first, "steps": 2, **changed}])
        for name, changed in own.items()
    ]
    assert run_workers(1, starts, given) == [[""] * 3]
    same, *others = (weights(tmp_path / name, FORKED + 2) for name in own)
    assert same not in others


def test_a_fork_has_a_group_and_a_past(parent: Path, corpus: Path, tmp_path: Path) -> None:
    values = {**settings(corpus, tmp_path / "a"), "name": "a", "fork_from": f"{parent}@{FORKED}"}
    assert start_fork(PretrainConfig.model_validate(values))
    assert start_fork(PretrainConfig.model_validate(values))  # not begun yet: once more is no error
    assert not start_fork(PretrainConfig.model_validate({**values, "fork_from": f"{parent}@2"})), "which is another"
    second = {**settings(corpus, tmp_path / "b"), "name": "b", "fork_from": f"{tmp_path / 'a'}@{FORKED}"}
    assert start_fork(PretrainConfig.model_validate(second))
    first, found = read_fork(tmp_path / "a"), read_fork(tmp_path / "b")
    expected = {"run": str(tmp_path / "a"), "name": "trial", "step": FORKED, "run_id": first["run_id"]}
    assert found == {**expected, "id": found["id"], "group": "trial", "earlier": [{"name": "trial", "step": FORKED}]}
    assert (tmp_path / "b" / FORK_FILE).is_file()
    trained = {**second, "run_dir": str(tmp_path / "b")}
    assert run_workers(1, starts, [Start(trained, resume=True)]) == [[""]]
    state = store.read_state(store.list_checkpoints(tmp_path / "b/checkpoints")[-1])
    assert state["run_id"] == read_fork(tmp_path / "b")["id"] != read_fork(tmp_path / "b")["run_id"]
    assert not start_fork(PretrainConfig.model_validate(trained))


@pytest.mark.parametrize(
    ("at", "changes", "message"),
    [
        (3, {}, "has no checkpoint of step 3; the nearest are 2 and 4. Use one of these; to keep"),
        (9, {}, "step 9, but the phases end after 9 steps"),
        (4, {"model": {"layers": 3}}, r"different settings before step 4: model.layers \(2 -> 3\)"),
        (4, {"seed": 5}, r"different settings before step 4: seed \(0 -> 5\)"),
        (4, {"phases": [{"global_sequences": 16}, {}]}, r"phases.0.global_sequences \(8 -> 16\)"),
    ],
)
def test_a_fork_that_cannot_be_is_refused(
    parent: Path, corpus: Path, tmp_path: Path, at: int, changes: dict[str, Any], message: str
) -> None:
    values: dict[str, Any] = settings(corpus, tmp_path / "run") | {"fork_from": f"{parent}@{at}"}
    for name, change in changes.items():
        if name == "phases":
            values[name] = [before | after for before, after in zip(values[name], change, strict=True)]
        else:
            values[name] = values[name] | change if isinstance(change, dict) else change
    with pytest.raises(InputError, match=message):
        start_fork(PretrainConfig.model_validate(values))
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_damaged_checkpoint_is_no_start(parent: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(parent, tmp_path / "parent")
    file = next((tmp_path / "parent/checkpoints" / store.name_of(FORKED)).glob("*.safetensors"))
    file.write_bytes(b"x" * file.stat().st_size)
    values = settings(corpus, tmp_path / "run") | {"fork_from": f"{tmp_path / 'parent'}@{FORKED}"}
    with pytest.raises(InputError, match=f"{file}: "):
        start_fork(PretrainConfig.model_validate(values))


def test_what_is_no_run_and_step_is_refused(corpus: Path, tmp_path: Path) -> None:
    for text in ("runs/mini", "runs/mini@", "@4", "runs/mini@x"):
        with pytest.raises(ValueError, match="is not RUN@STEP, such as runs/mini@2000"):
            PretrainConfig.model_validate(settings(corpus, tmp_path) | {"fork_from": text})
