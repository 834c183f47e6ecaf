"""Checkpoints on disk (invariant 5): sharded, atomic, verified. A run resumes from the newest one that is intact.

    checkpoints/step-00001000/
        state.json                        step, data position, optimizer updates, config, W&B run id, losses
        rank-00000-of-00002.safetensors   1-D fp32 tensors "<kind>|<parameter>|<start>";
                                          kind: weight, exp_avg, exp_avg_sq; average of the last steps' weights;
                                          row_square, where start counts rows
        manifest.json                     sizes and SHA-256 of the files, and where each part of each parameter is
                                          (`pretrain.checkpoint.fragments`)

A checkpoint names its tensors and does not depend on the number of workers that wrote it
(`pretrain.training.engine.Fragment`).
"""

import contextlib
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pretrain.checkpoint.fragments import packed
from pretrain.checkpoint.reading import CheckpointReader, checkpoint_manifest, retried
from pretrain.checkpoint.weight_files import save_weights
from pretrain.common.errors import InputError, MachineError, RunError, of_another_version
from pretrain.common.files import (
    CHECKPOINT_NAME,
    MANIFEST,
    disk_errors,
    existing_parent,
    fsync_folder,
    put_manifest,
    sha256_file,
    verify_content,
    verify_manifest,
    write_json,
)
from pretrain.storage.runs import best_of

FORMAT = 2
_DAMAGED = "damaged-"  # before the name of a checkpoint that was set aside
logger = logging.getLogger(__name__)


class HeldFragment(Protocol):
    """The attributes of a fragment that `save` needs (`pretrain.training.engine.Fragment`)."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...
    @property
    def shared(self) -> bool: ...


class SavingGroup(Protocol):
    """The ranks that save together (`pretrain.training.engine.RankGroup`)."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def collect_objects(self, value: Any) -> list[Any]: ...  # of each rank, on rank 0; elsewhere nothing
    def first_object(self, value: Any) -> Any: ...  # of rank 0, on every rank


def name_of(step: int) -> str:
    """The folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise InputError(f"{checkpoint}: not the name of a checkpoint. Give a folder such as {name_of(1000)}.")
    return int(match[1])


@dataclass(frozen=True)
class CheckpointShard:
    """The part of a checkpoint that one rank writes: fp32 tensors by "<kind>|<parameter>|<start>", and their list."""

    tensors: dict[str, Tensor]
    entries: list[dict[str, Any]]  # name, start, numel, kinds

    @property
    def bytes(self) -> int:
        """Size of all its tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def shard_name(group: SavingGroup) -> str:
    """The file of a checkpoint that this rank writes."""
    return f"rank-{group.rank:05d}-of-{group.world_size:05d}.safetensors"


def save(folder: Path, step: int, fragments: Iterable[HeldFragment], state: dict[str, Any], group: SavingGroup) -> Path:
    """Write the checkpoint of `step` into `folder`, as `write` does; every rank calls this. Returns its path."""
    return write(folder, step, take_shard(fragments, group), state, group)


def take_shard(
    fragments: Iterable[HeldFragment], group: SavingGroup, copy: Callable[[str, Tensor], Tensor] = lambda _, x: x
) -> CheckpointShard:
    """The tensors that this rank writes: those that only it holds, and an equal part of those that all ranks hold.

    What all ranks hold is divided end to end, so that a further rank cuts one fragment in two, not each of them.
    `copy` gets each tensor's key and a view of the optimizer's tensor, which the next step modifies.
    """
    tensors: dict[str, Tensor] = {}
    entries = []
    fragments = list(fragments)
    for fragment, part in zip(fragments, _parts(fragments, group), strict=True):
        if part.start >= part.stop:
            continue
        start = fragment.start + part.start
        for kind, tensor in fragment.tensors.items():
            key = f"{kind}|{fragment.name}|{start}"
            tensors[key] = copy(key, tensor[part].detach())
        entries.append(
            {
                "name": fragment.name,
                "start": start,
                "numel": part.stop - part.start,
                "kinds": list(fragment.tensors),
            }
        )
    return CheckpointShard(tensors, entries)


def write(folder: Path, step: int, shard: CheckpointShard, state: dict[str, Any], group: SavingGroup) -> Path:
    """Write the checkpoint of `step` into `folder`; every rank calls this with its shard. Returns its path.

    Each rank writes and hashes its own file. Then rank 0 writes the state and the manifest and renames the folder to
    its final name. An error on any rank, such as a full disk, is raised on every rank as `MachineError`, and the
    incomplete folder is removed.
    """
    final = folder / name_of(step)
    aside = folder / f".{final.name}.tmp"
    try:
        agree(group, lambda: write_shard(aside, shard, group), lambda shards: _publish(aside, final, shards, state))
    except RunError:
        if group.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        group.first_object(None)  # no rank may retry before the incomplete folder is removed
        raise
    return final


def agree(group: SavingGroup, work: Callable[[], Any], conclude: Callable[[list[Any]], Any] = itemgetter(0)) -> Any:
    """Run `work` on every rank, then `conclude` on rank 0 with the results of all: by default it takes that of rank 0.

    Returns what `conclude` returned, or raises the first error, on all ranks. Only rank 0 gets the others' results, so
    that the work of another rank does not grow with their number. Every rank of the group calls this. An error that is
    neither a `RunError` nor an `OSError` is logged, and raised as a `MachineError` too: the other ranks wait for it.
    """
    outcomes = group.collect_objects(_outcome(group, work))
    concluded = _outcome(group, lambda: conclude([_result(one) for one in outcomes])) if group.rank == 0 else None
    return _result(group.first_object(concluded))


def _outcome(group: SavingGroup, work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": work()}
    except (RunError, OSError) as error:
        return {"error": str(error), "kind": type(error).__name__}
    except Exception as error:
        logger.exception("worker %d failed", group.rank)
        return {"error": f"worker {group.rank}: {type(error).__name__}: {error}", "kind": type(error).__name__}


def _result(outcome: dict[str, Any]) -> Any:
    if "error" not in outcome:
        return outcome["result"]
    raise (InputError if outcome["kind"] == "InputError" else MachineError)(outcome["error"])


def newest(folder: Path, *, set_aside: bool = False, content: bool = True) -> Path | None:
    """The newest intact checkpoint in `folder`; None if there is no checkpoint at all.

    Newer checkpoints that are damaged are skipped and logged. `set_aside` also renames them to `damaged-…`; only the
    run that owns the folder may do that. `content` as in `verify`.

    Raises:
        MachineError: a newer checkpoint cannot be read (`verify`). It may be whole, and the one before it much older.
        InputError: all checkpoints are damaged, those that were set aside before among them.
    """
    tried = set[Path]()
    # Listed again each time: a run that trains may have saved another one, and removed those before it.
    while left := [path for path in _named_as_checkpoints(folder) if path not in tried]:
        checkpoint = left[-1]
        tried.add(checkpoint)
        try:
            verify(checkpoint, content=content)
        except InputError as error:
            logger.warning("%s Trying the checkpoint before it.", error)
            if set_aside:
                _set_aside(checkpoint)
            continue
        return checkpoint
    if damaged := sorted(path.name for path in (*_named_as_checkpoints(folder), *folder.glob(f"{_DAMAGED}*"))):
        raise InputError(
            f"{folder}: all checkpoints are damaged: {', '.join(damaged)}. Restore one from a copy, or remove them to "
            "start from step 0."
        )
    return None


def _set_aside(checkpoint: Path) -> None:
    damaged = checkpoint.with_name(f"{_DAMAGED}{checkpoint.name}")
    shutil.rmtree(damaged, ignore_errors=True)
    checkpoint.replace(damaged)


def damaged_after(checkpoint: Path) -> list[str]:
    """Names of later checkpoints that were set aside, in ascending order of step."""
    own = f"{_DAMAGED}{checkpoint.name}"
    return sorted(path.name for path in checkpoint.parent.glob(f"{_DAMAGED}*") if path.name > own)


def verify(checkpoint: Path, *, content: bool = True) -> None:
    """As `verify_manifest`, but read errors are retried for half a minute: the storage may fail for a moment only.

    Raises:
        InputError: a file is missing or damaged.
        MachineError: a file cannot be read, or the format is one of another version.
    """

    def read() -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            (checkpoint / MANIFEST).open("rb").close()  # `verify_manifest` reports a refusal as damage
        return verify_manifest(checkpoint, content=content)

    if retried(checkpoint, read).get("format") != FORMAT:
        raise MachineError(of_another_version(checkpoint, "Train again."))


def verify_share(checkpoint: Path, rank: int, ranks: int) -> None:
    """Verify the content of a rank's share of the files: its own, and on rank 0 the state, if as many ranks wrote them.

    Raises as `verify`. A file that is missing counts as unreadable: another machine may see it later than rank 0.
    """
    files = checkpoint_manifest(checkpoint)["files"]
    for name in sorted(files)[rank::ranks]:
        path = checkpoint / name
        retried(path, functools.partial(verify_content, path, files[name]))


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ascending order of step; their content is not verified."""
    return [path for path in _named_as_checkpoints(folder) if (path / MANIFEST).is_file()]


def _named_as_checkpoints(folder: Path) -> list[Path]:
    """In ascending order of step. A checkpoint gets its name when complete, so one without a manifest has lost it."""
    return sorted(p for p in folder.iterdir() if CHECKPOINT_NAME.fullmatch(p.name)) if folder.is_dir() else []


def best(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, on ties the newest one; None if none was evaluated.

    Losses are comparable only on the same held-out samples (`validation_set`). So checkpoints of an earlier phase do
    not count once a later phase was evaluated. A checkpoint with a damaged state counts as not evaluated. Raises
    `MachineError` if a state cannot be read.
    """
    states = {}
    for path in list_checkpoints(folder):
        with contextlib.suppress(InputError):
            if (path / "state.json").is_file():  # else it is damaged, or was just removed
                states[path.name] = read_state(path)
    name = best_of(states)
    return folder / name if name else None


def best_intact(folder: Path) -> Path | None:
    """The `best` of the intact checkpoints, else the newest; damaged ones are set aside as by `newest`. Raises as it.

    Only the run that owns the folder may call this.
    """
    while (checkpoint := best(folder)) is not None:
        try:
            verify(checkpoint)
            return checkpoint
        except InputError as error:
            logger.warning("%s Trying the next best checkpoint.", error)
            _set_aside(checkpoint)
    return newest(folder, set_aside=True)


def prune(folder: Path, keep_last: int, saved: Path | None = None) -> None:
    """Remove leftovers and all checkpoints but the `keep_last` newest, those `kept`, the `best` and the `saved` one.

    Raises `MachineError`, and removes nothing, if the best one is not known because a state cannot be read.
    """
    checkpoints = list_checkpoints(folder)
    keep = {*checkpoints[-keep_last:], best(folder), saved}
    for path in checkpoints:
        if path not in keep and not _is_kept(path):
            # Renamed first, so that an interrupted removal leaves nothing that looks like a checkpoint.
            removed = path.with_name(f".{path.name}.tmp")
            shutil.rmtree(removed, ignore_errors=True)
            path.replace(removed)
            shutil.rmtree(removed, ignore_errors=True)
    remove_leftovers(folder)


def _is_kept(checkpoint: Path) -> bool:
    with contextlib.suppress(InputError):  # a damaged one is of no use
        return bool(read_state(checkpoint).get("kept"))
    return False


def remove_leftovers(folder: Path) -> None:
    """Remove the files of interrupted saves. Must not run during a save."""
    for leftover in folder.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state.json of a verified checkpoint, with retries as `verify`.

    Raises `InputError` if it is damaged, `MachineError` if it cannot be read.
    """
    path = checkpoint / "state.json"
    try:
        return json.loads(retried(path, lambda: path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error}). Use another checkpoint.") from None


def read_weights(checkpoint: Path, *, averaged: bool = False) -> dict[str, Tensor]:
    """All parameters of a verified checkpoint: name -> fp32 tensor in the parameter's shape.

    `averaged` reads the mean of the last steps' weights. Raises `InputError` if the checkpoint has none.
    """
    if averaged and not read_state(checkpoint).get("averaged"):
        raise InputError(
            f"{checkpoint}: has no averaged weights. Give a checkpoint of the end of a phase with averaged_share."
        )
    kind = "average" if averaged else "weight"
    shapes = checkpoint_manifest(checkpoint)["shapes"]
    with CheckpointReader(checkpoint) as reader:
        return {
            name: reader.read(kind, name, 0, torch.Size(shape).numel()).view(shape) for name, shape in shapes.items()
        }


def write_shard(aside: Path, shard: CheckpointShard, group: SavingGroup) -> dict[str, Any]:
    """Write this rank's tensors; returns the entry of the file for the manifest."""
    name = shard_name(group)
    path = aside / name
    with _write_errors(path):
        aside.mkdir(parents=True, exist_ok=True)
        check_storage(path, shard.bytes)
        save_weights({key: tensor.cpu() for key, tensor in shard.tensors.items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return {
            "file": name,
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
            "fragments": [{**entry, "rank": group.rank} for entry in shard.entries],
        }


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """As `disk_errors`; other errors of the storage become `MachineError`, too."""
    try:
        with disk_errors(path):
            yield
    except OSError as error:
        raise MachineError(f"{path}: cannot be written ({error.strerror or error}). Check the storage.") from error


def _parts(fragments: Sequence[HeldFragment], group: SavingGroup) -> Iterator[slice]:
    """The part of each fragment that this rank writes."""
    sizes = [next(iter(fragment.tensors.values())).numel() for fragment in fragments]
    shared = sum(size for fragment, size in zip(fragments, sizes, strict=True) if fragment.shared)
    begin, end = (shared * rank // group.world_size for rank in (group.rank, group.rank + 1))
    behind = 0
    for fragment, size in zip(fragments, sizes, strict=True):
        if fragment.shared:
            yield slice(max(0, begin - behind), max(0, min(size, end - behind)))
            behind += size
        else:
            yield slice(0, size)


def check_storage(path: Path, needed: int) -> None:
    """Refuse before writing if the file does not fit on the disk."""
    if shutil.disk_usage(existing_parent(path)).free < needed:
        raise OSError(28, "No space left on device")


def _publish(aside: Path, final: Path, shards: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """On rank 0, after every shard is on disk: write the state and the manifest, then rename the folder."""
    for shard in shards:
        _check_seen(aside / shard["file"], shard["bytes"])
    with _write_errors(final):
        write_json(aside / "state.json", state)
        _write_manifest(aside, shards, state)
        if final.exists():
            shutil.rmtree(final)
        aside.replace(final)
        fsync_folder(final.parent)


def _check_seen(path: Path, size: int) -> None:
    """Raise `MachineError` if the shard that a rank wrote is not in rank 0's folder: that rank's may be another one."""
    seen = retried(path, path.stat).st_size
    if seen != size:
        raise MachineError(f"{path}: has {seen} bytes, not the {size} that were written. Check the storage.")


def _write_manifest(aside: Path, shards: list[dict[str, Any]], state: dict[str, Any]) -> None:
    files = {shard["file"]: {"bytes": shard["bytes"], "sha256": shard["sha256"]} for shard in shards}
    state_file = aside / "state.json"
    files["state.json"] = {"bytes": state_file.stat().st_size, "sha256": sha256_file(state_file)}
    manifest = {
        "format": FORMAT,
        "step": state["step"],
        "shapes": state["shapes"],
        "fragments": packed(entry for shard in shards for entry in shard["fragments"]),
        "files": files,
    }
    put_manifest(aside, manifest)
