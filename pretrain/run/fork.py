"""Forks a run: a new run, with another config, continues from a checkpoint of its parent run.

The checkpoint is copied into the new run's folder as if the new run had written it; then the new run resumes from it.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pretrain.common.addresses import is_remote, local_run
from pretrain.common.errors import InputError
from pretrain.common.files import (
    MANIFEST,
    atomic_open,
    checkpoint_names,
    disk_errors,
    find_run,
    fsync_folder,
    write_json,
)
from pretrain.common.records import read_records
from pretrain.common.run_files import FORK_FILE, METRICS, PROBES, START_FILE, read_fork
from pretrain.config import PretrainConfig, forbidden_changes
from pretrain.tracking.mirror import new_id


def start_fork(config: PretrainConfig) -> bool:
    """Copy the checkpoint `fork_from` into the run's folder, unless the folder already has checkpoints.

    The records of the steps up to it are copied, too. On the same file system, the checkpoint is hard-linked.
    Returns whether the run starts from this checkpoint.

    Raises:
        InputError: the checkpoint is missing or damaged, or `config` changes settings of the steps before it.
    """
    from pretrain.run.preflight import locked_run
    from pretrain.storage.runs import StoredRun

    run, step = _parse_fork_from(config)
    with locked_run(config.folder):
        names = checkpoint_names(config.folder)
        if names or (config.address and StoredRun(config.address, config.folder).checkpoint_names()):
            fork = read_fork(config.folder)
            is_same_fork = fork.get("run") == _run_location(run, find_run(local_run(run))) and fork.get("step") == step
            return is_same_fork and names == [_checkpoint_name(step)]  # an earlier start forked, but saved no step
        _, checkpoint = find_parent_checkpoint(config)
        if is_remote(run):
            StoredRun(run, local_run(run)).download_checkpoints([checkpoint.name])
        _check_parent(config, step, checkpoint)
        with disk_errors(config.folder):
            _copy_checkpoint(config, step, checkpoint)
        return True


@contextlib.contextmanager
def undo_fork_if_refused(config: PretrainConfig) -> Iterator[None]:
    """Remove the copied checkpoint and records if the fork's training raises `InputError` before its first step."""
    try:
        yield
    except InputError:
        folder, step = config.folder, read_fork(config.folder)["step"]
        latest = max((record.get("step", 0) for record in read_records(folder)), default=0)
        if latest <= step and checkpoint_names(folder) == [_checkpoint_name(step)]:
            shutil.rmtree(folder / "checkpoints" / _checkpoint_name(step))
            for name in (FORK_FILE, METRICS, PROBES, START_FILE):
                (folder / name).unlink(missing_ok=True)
        raise


def find_parent_checkpoint(config: PretrainConfig) -> tuple[int, Path]:
    """Return (step, local path) of the checkpoint `fork_from`, not fetched yet; `InputError` if it cannot be forked."""
    from pretrain.storage.runs import StoredRun

    run, step = _parse_fork_from(config)
    folder = find_run(local_run(run))
    names = StoredRun(run, folder).checkpoint_names() if is_remote(run) else checkpoint_names(folder)
    name = _checkpoint_name(step)
    if name not in names:
        nearest = sorted((int(other.removeprefix("step-")) for other in names), key=lambda other: abs(other - step))[:2]
        if not nearest:
            raise InputError(f"fork_from: {run} has no checkpoint. Check the name, or wait until the run writes one.")
        advice = f"the nearest are {' and '.join(map(str, sorted(nearest)))}. Use one of these"
        raise InputError(
            f"fork_from: {run} has no checkpoint of step {step}; {advice}; to keep the "
            "checkpoint of another step, list it in that run's checkpoint.keep_at."
        )
    if step >= config.total_steps:
        raise InputError(
            f"fork_from: step {step}, but the phases end after {config.total_steps} steps. Add steps to the last "
            "phase, or add a phase."
        )
    return step, folder / "checkpoints" / name


def _checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def _parse_fork_from(config: PretrainConfig) -> tuple[str, int]:
    """Return (run, step) of `fork_from`."""
    run, _, step = config.fork_from.rpartition("@")
    return run, int(step)


def _run_location(run: str, folder: Path) -> str:
    return run if is_remote(run) else str(folder.resolve())


def _check_parent(config: PretrainConfig, step: int, checkpoint: Path) -> None:
    """Raise `InputError` if the checkpoint is damaged, or `config` changes settings of the steps before it."""
    from pretrain.checkpoint import store
    from pretrain.run.preflight import config_of_checkpoint

    store.verify(checkpoint)
    old_config = config_of_checkpoint(PretrainConfig, store.read_state(checkpoint), checkpoint)
    if changed := forbidden_changes(old_config, config, step):
        raise InputError(
            f"fork_from: {config.fork_from}: different settings before step {step}: {', '.join(changed)}. Restore the "
            f"old values; to change settings from step {step} on, end the phase there and add another."
        )


def _copy_checkpoint(config: PretrainConfig, step: int, checkpoint: Path) -> None:
    """Copy the records and write fork.json into the run folder, then copy the checkpoint."""
    parent, folder = checkpoint.parents[1], config.folder
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    parent_fork, parent_config = read_fork(parent), state["config"]
    for name in (METRICS, PROBES):
        records = [record for record in read_records(parent, name) if record.get("step", 0) <= step]
        with atomic_open(folder / name, "w") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in records)
    fork = {
        "id": new_id(config),  # W&B id, stored so that a repeated first start has the same one
        "run": _run_location(_parse_fork_from(config)[0], parent),
        "name": parent_config["name"],
        "step": step,
        "run_id": state.get("run_id"),
        "group": parent_config["tracking"]["group"] or parent_fork.get("group") or parent_config["name"],
        "earlier": [
            *parent_fork.get("earlier", ()),
            *([{"name": parent_fork["name"], "step": parent_fork["step"]}] if parent_fork else []),
        ],
    }
    write_json(folder / FORK_FILE, fork)
    if (parent / START_FILE).is_file():  # the origin of the parent's initial weights, which exports need
        shutil.copyfile(parent / START_FILE, folder / START_FILE)
    final = folder / "checkpoints" / checkpoint.name
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in sorted(checkpoint.iterdir(), key=lambda path: path.name == MANIFEST):
        try:
            os.link(path, temporary / path.name)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, temporary / path.name)
    fsync_folder(temporary)
    temporary.replace(final)
    fsync_folder(final.parent)
