"""Checkpoints on disk: sharded, atomic, verified (invariant 5 in docs/invariants.md).

    checkpoints/step-00001000/
        state.json                        step, data position, optimizer updates, config, W&B run id, losses
        rank-00000-of-00002.safetensors   1-D fp32 tensors "<kind>|<parameter>|<start>";
                                          kind: weight, exp_avg, exp_avg_sq; average (mean of the last steps' weights);
                                          row_square (one value per row, so start counts rows)
        manifest.json                     sizes and SHA-256 of the files, and the file of each part of each parameter
                                          (`FragmentIndex`)

A run resumes from the latest intact checkpoint, with any number of workers: tensors are stored by name
(`pretrain.training.engine.Fragment`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain.common.errors import InputError, MachineError, RunError, version_mismatch
from pretrain.common.files import CHECKPOINT_NAME, MANIFEST, parse_manifest, verify_content, verify_manifest
from pretrain.storage.runs import best_of

FORMAT = 2  # version of the format of checkpoints
_DAMAGED = "damaged-"  # prefix of the names of damaged checkpoints that were renamed
# Number of attempts to read a file if the storage fails, and the wait before the second attempt; it then doubles.
_READ_ATTEMPTS, READ_WAIT_SECONDS = 6, 1.0
# Number of bytes read after which files are closed: their mapped pages count toward the process's memory.
_MAX_MAPPED_BYTES = 128 << 20
T = TypeVar("T")
logger = logging.getLogger(__name__)


class SavingGroup(Protocol):
    """The ranks that save together (`pretrain.training.engine.RankGroup`)."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def collect_objects(self, value: Any) -> list[Any]: ...  # values of all ranks on rank 0; [] on others
    def broadcast_object(self, value: Any) -> Any: ...  # the value of rank 0, on every rank


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    match = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise InputError(f"{checkpoint}: not the name of a checkpoint. Use a folder such as {name_of(1000)}.")
    return int(match[1])


def latest(folder: Path, *, set_aside: bool = False, check_hashes: bool = True) -> Path | None:
    """Return the latest intact checkpoint in `folder`; None if there is no checkpoint at all.

    Later checkpoints that are damaged are skipped and logged. `set_aside` also renames them to `damaged-…`; only the
    run that owns the folder may do that. `check_hashes` as in `verify_manifest`.

    Raises:
        MachineError: a later checkpoint cannot be read (`verify`); it may be intact, and the previous one much older.
        InputError: all checkpoints are damaged, including the ones set aside before.
    """
    tried = set[Path]()
    # Listed again each time: a run in progress may have saved another checkpoint and removed earlier ones.
    while untried := [path for path in _all_checkpoints(folder) if path not in tried]:
        checkpoint = untried[-1]
        tried.add(checkpoint)
        try:
            verify(checkpoint, check_hashes=check_hashes)
        except InputError as error:
            logger.warning("%s Trying the checkpoint before it.", error)
            if set_aside:
                _set_aside(checkpoint)
            continue
        return checkpoint
    if damaged := sorted(path.name for path in (*_all_checkpoints(folder), *folder.glob(f"{_DAMAGED}*"))):
        raise InputError(
            f"{folder}: all checkpoints are damaged: {', '.join(damaged)}. Restore one from a copy, or remove them to "
            "start from step 0."
        )
    return None


def choose(folder: Path, name: str | None) -> Path:
    """Return a checkpoint in `folder`, verified: `name`, the best one for "best", or the latest intact one for None.

    Raises `InputError` if there is none.
    """
    if name is None:
        path = latest(folder)
        if path is None:
            raise InputError(f"{folder}: has no complete checkpoint. Train first.")
        return path
    if name == "best":
        path = best(folder)
        if path is None:
            raise InputError(
                f"{folder}: no checkpoint was evaluated, so there is no best one. "
                "Pass a checkpoint such as step-00001000, or omit --checkpoint."
            )
    else:
        path = folder / name
        if path not in list_checkpoints(folder):
            existing = ", ".join(p.name for p in list_checkpoints(folder)) or "none"
            raise InputError(f"{path}: no such checkpoint. Available: {existing}.")
    verify(path)
    return path


def _set_aside(checkpoint: Path) -> None:
    damaged = checkpoint.with_name(f"{_DAMAGED}{checkpoint.name}")
    shutil.rmtree(damaged, ignore_errors=True)
    checkpoint.replace(damaged)


def damaged_after(checkpoint: Path) -> list[str]:
    """Return the names of later checkpoints that were set aside, in ascending order of step."""
    renamed = f"{_DAMAGED}{checkpoint.name}"
    return sorted(path.name for path in checkpoint.parent.glob(f"{_DAMAGED}*") if path.name > renamed)


def verify(checkpoint: Path, *, check_hashes: bool = True) -> None:
    """Verify as `verify_manifest` does; read errors are retried for half a minute, as storage may fail temporarily.

    Raises:
        InputError: a file is missing or damaged.
        MachineError: a file cannot be read, or the checkpoint has another version's format.
    """

    def read() -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            (checkpoint / MANIFEST).open("rb").close()  # `verify_manifest` reports a denied permission as damage
        return verify_manifest(checkpoint, check_hashes=check_hashes)

    if read_with_retries(checkpoint, read).get("format") != FORMAT:
        raise MachineError(version_mismatch(checkpoint, "Train again."))


def verify_rank_files(checkpoint: Path, rank: int, world_size: int) -> None:
    """Verify the SHA-256 of every `world_size`-th file from index `rank` on: all ranks together verify all files.

    Raises as `verify` does. A missing file is treated as unreadable: another machine may see it later than rank 0.
    """
    files = checkpoint_manifest(checkpoint)["files"]
    for name in sorted(files)[rank::world_size]:
        path = checkpoint / name
        read_with_retries(path, functools.partial(verify_content, path, files[name]))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints in ascending order of step; their content is not verified."""
    return [path for path in _all_checkpoints(folder) if (path / MANIFEST).is_file()]


def _all_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in order of step, even without a manifest: each was complete when it got its name."""
    return sorted(p for p in folder.iterdir() if CHECKPOINT_NAME.fullmatch(p.name)) if folder.is_dir() else []


def best(folder: Path) -> Path | None:
    """Return the checkpoint with the lowest `pretrain.storage.runs.evaluation_key`; None if none was evaluated.

    Losses are comparable only on the same held-out samples (`validation_set`), so checkpoints of earlier phases are
    ignored once a later phase was evaluated. Checkpoints with a damaged state are ignored, too. Raises `MachineError`
    if a state cannot be read.
    """
    states = {}
    for path in list_checkpoints(folder):
        with contextlib.suppress(InputError):
            if (path / "state.json").is_file():  # else it is damaged, or was just removed
                states[path.name] = read_state(path)
    name = best_of(states)
    return folder / name if name else None


def best_intact(folder: Path) -> Path | None:
    """Return the `best` intact checkpoint, else the latest; damaged ones are set aside. Raises as `latest` does.

    Only the run that owns the folder may call this.
    """
    while (checkpoint := best(folder)) is not None:
        try:
            verify(checkpoint)
            return checkpoint
        except InputError as error:
            logger.warning("%s Trying the next best checkpoint.", error)
            _set_aside(checkpoint)
    return latest(folder, set_aside=True)


def prune(folder: Path, keep_last: int, just_saved: Path | None = None) -> None:
    """Remove leftovers and all checkpoints but the `keep_last` latest, the `best`, `just_saved`, and any marked `kept`.

    Raises `MachineError`, and removes nothing, if a state cannot be read, so that the best checkpoint is unknown.
    """
    checkpoints = list_checkpoints(folder)
    keep = {*checkpoints[-keep_last:], best(folder), just_saved}
    for path in checkpoints:
        if path not in keep and not _is_kept(path):
            # Renamed first, so that an interrupted removal leaves nothing that looks like a checkpoint.
            removed = path.with_name(f".{path.name}.tmp")
            shutil.rmtree(removed, ignore_errors=True)
            path.replace(removed)
            shutil.rmtree(removed, ignore_errors=True)
    remove_leftovers(folder)


def _is_kept(checkpoint: Path) -> bool:
    with contextlib.suppress(InputError):  # a damaged checkpoint is not kept
        return bool(read_state(checkpoint).get("kept"))
    return False


def remove_leftovers(folder: Path) -> None:
    """Remove the files of interrupted saves. Must not run during a save."""
    for leftover in folder.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read state.json of a verified checkpoint, with retries as in `verify`.

    Raises `InputError` if it is damaged, `MachineError` if it cannot be read.
    """
    path = checkpoint / "state.json"
    try:
        return json.loads(read_with_retries(path, lambda: path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error}). Use another checkpoint.") from None


def read_weights(checkpoint: Path, *, averaged: bool = False) -> dict[str, Tensor]:
    """Read all parameters of a verified checkpoint: name -> fp32 tensor in the parameter's shape.

    `averaged` reads the mean of the last steps' weights. Raises `InputError` if the checkpoint has none.
    """
    if averaged and not read_state(checkpoint).get("averaged"):
        raise InputError(
            f"{checkpoint}: has no averaged weights. Use a checkpoint from the end of a phase with averaged_share."
        )
    with CheckpointReader(checkpoint, averaged=averaged) as reader:
        return {
            name: reader.read("weight", name, 0, torch.Size(shape).numel()).view(shape)
            for name, shape in reader.shapes.items()
        }


def agree(group: SavingGroup, work: Callable[[], Any], conclude: Callable[[list[Any]], Any] = itemgetter(0)) -> Any:
    """Run `work` on every rank, then `conclude` on rank 0 with all results; by default, it returns rank 0's result.

    Every rank of the group calls this, and gets the result of `conclude` or the first error. Only rank 0 collects the
    results, so that the work of other ranks does not grow with the world size. An error that is neither a `RunError`
    nor an `OSError` is a bug: it is logged, and raised as a `MachineError`, so that no rank waits forever.
    """
    outcomes = group.collect_objects(_outcome(group, work))
    conclusion = _outcome(group, lambda: conclude([_result(item) for item in outcomes])) if group.rank == 0 else None
    return _result(group.broadcast_object(conclusion))


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


# ---- the files of one checkpoint


def read_with_retries(path: Path, read: Callable[[], T]) -> T:
    """Return the result of `read`; retry read errors for half a minute, then raise `MachineError`.

    Reading a missing file is retried, too: machines that share a folder may see a new file late.
    """
    attempt = 0
    while True:
        try:
            return read()
        except OSError as error:
            if attempt == _READ_ATTEMPTS - 1 or isinstance(error, PermissionError):
                raise MachineError(
                    f"{error.filename or path}: cannot be read ({error.strerror or error}). Check the storage and the "
                    "file's permissions."
                ) from error
            wait = READ_WAIT_SECONDS * 2**attempt
            logger.warning("%s: cannot be read (%s). Retrying in %.0f s.", path, error, wait)
            time.sleep(wait)
            attempt += 1


def checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, with retries."""
    path = checkpoint / MANIFEST
    return parse_manifest(read_with_retries(path, path.read_bytes), path)


class CheckpointReader:
    """Reads any range of any parameter, regardless of the ranks that wrote it. Use as a context manager.

    Files are opened with retries as in `verify`.

    Args:
        checkpoint: the folder of a verified checkpoint.
        averaged: whether to read the mean of the last steps' weights instead of the weights.
    """

    def __init__(self, checkpoint: Path, *, averaged: bool = False) -> None:
        self._averaged = averaged
        self._files: dict[str, Any] = {}
        self._mapped = 0  # bytes read since files were last closed
        self._checkpoint = checkpoint
        manifest = checkpoint_manifest(checkpoint)
        self.shapes: dict[str, list[int]] = manifest["shapes"]  # shape of each parameter
        files = sorted(name for name in manifest["files"] if name.startswith("rank-"))
        self._fragments = FragmentIndex(manifest["fragments"], files)

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Read entries [start, start + numel) of the flattened parameter `name`, fp32; `InputError` if not stored."""
        out, position, stop = torch.empty(numel), start, start + numel
        kind = "average" if self._averaged and kind == "weight" else kind
        for fragment in self._fragments.covering(kind, name, start, stop):
            if not fragment.start <= position < fragment.stop:
                continue
            end = min(stop, fragment.stop)
            stored = self._file(fragment.file).get_slice(f"{kind}|{name}|{fragment.start}")
            out[position - start : end - start] = stored[position - fragment.start : end - fragment.start]
            self._mapped += out.element_size() * (end - position)
            position = end
        if position < stop:
            raise InputError(
                f"{self._checkpoint}: no {kind} of {name} from element {position}; the checkpoint belongs to another "
                "model or optimizer. Resume with the config of the run that wrote it."
            )
        return out

    def _file(self, name: str) -> Any:
        if self._mapped > _MAX_MAPPED_BYTES:
            self._close()
        if name not in self._files:
            path = self._checkpoint / name
            try:
                self._files[name] = read_with_retries(path, lambda: safe_open(path, framework="pt").__enter__())
            except SafetensorError as error:
                raise InputError(f"{path}: cannot be read ({error}). Use another checkpoint.") from None
        return self._files[name]

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files, self._mapped = {}, 0


class StoredFragment(NamedTuple):
    """Entries [start, stop) of a flattened parameter, stored in `file` as "<kind>|<parameter>|<start>"."""

    start: int
    stop: int
    file: str


class FragmentIndex:
    """Finds the fragments that contain a range of a parameter.

    Args:
        entries: the result of `merge_entries`.
        files: names of the ranks' files, by rank.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]], files: Sequence[str]) -> None:
        self._files = files
        self._entries: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for entry in entries:
            for kind in entry["kinds"]:
                self._entries[kind, entry["name"]].append(entry)
        for entries_of_parameter in self._entries.values():
            entries_of_parameter.sort(key=lambda entry: entry["start"])

    def covering(self, kind: str, name: str, start: int, stop: int) -> Iterator[StoredFragment]:
        """Yield the fragments that overlap [start, stop), in ascending order."""
        for entry in self._entries.get((kind, name), ()):
            offset, numel, parts = entry["start"], entry["numel"], entry.get("parts", 1)
            first_part = max(0, (start - offset) // numel)
            stop_part = min(parts, -(-(stop - offset) // numel))
            for part in range(first_part, stop_part):
                file = self._files[int(entry["rank"]) + part]
                yield StoredFragment(offset + part * numel, offset + (part + 1) * numel, file)
