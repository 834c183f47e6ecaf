"""Stores a run in an object store: checkpoints with their manifests last, and the small files needed to resume.

The run trains in the local folder of its address (`addresses.local_run`). These files are stored:

    checkpoints/step-00001000/...     as in the local folder, but file names other than the manifest's contain the
                                      SHA-256, so an earlier start that is still uploading does not overwrite a
                                      later start's files. Storing a checkpoint again first deletes its manifest
    config.yaml, metrics.jsonl, ...   as of the last stored checkpoint or the end of the run
    writers/writer-3                  machine and time of the run's third start; only the latest start may write

A checkpoint without a manifest counts as missing.
"""

import contextlib
import functools
import json
import logging
import math
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.common.addresses import is_remote, join, local_path
from pretrain.common.errors import InputError, MachineError, RunError
from pretrain.common.files import (
    CHECKPOINT_NAME,
    MANIFEST,
    UNTRAINED,
    atomic_open,
    checkpoint_names,
    is_our_manifest,
    locked,
    read_manifest,
    verify_manifest,
    write_json,
)
from pretrain.common.run_files import METRICS, STORED
from pretrain.storage import folders
from pretrain.storage.objects import RETRY_SECONDS, AccessError, ContentError, ObjectStore
from pretrain.storage.released import fetch_released, must_use_local_copy

SAVE_RETRY_SECONDS = 60.0  # time limit for retries of a failing save, to a disk or an address
_LOCAL_WRITER = "writer.json"  # copy of the writer file of the last start in this local folder
_WRITERS_FOLDER, _WRITER_NAME = "writers", "writer-{}"
_CONCURRENT_DELETES = 32  # number of concurrent requests; a checkpoint has a file per worker
_OVERWRITE_WARNING = "%s: the store ignores If-None-Match, so two launchers could train this run. Start only one."
_STATE, _MODEL, _LOCK = "state.json", "model", ".fetch.lock"
_FETCHING = ".fetching"  # marker file that exists while a checkpoint, and then the run's small files, are fetched

logger = logging.getLogger(__name__)


@functools.cache
def fetched_model(location: Path | str) -> Path:
    """Return the local folder of a model, with ~ expanded; a model at an address is fetched, once per process.

    The address may contain an export, a run (its latest checkpoint is fetched) or a released model. Raises `InputError`
    if it contains none of these, or if the local folder contains another run.
    """
    if not is_remote(location):
        return local_path(location)
    address, objects = str(location), ObjectStore()
    if must_use_local_copy(address):
        return local_path(address)
    if _is_bertrain_manifest(folders.read_stored_manifest(address, objects)):
        return folders.fetch(address, objects)
    run = StoredRun(address, local_path(address))
    if run.checkpoint_names() or run.has_model():
        run.download()
    else:
        fetch_released(address, objects)
    return local_path(address)


def _is_bertrain_manifest(manifest: bytes | None) -> bool:
    """Return whether bertrain wrote a manifest.json, intact or damaged."""
    try:
        return manifest is not None and is_our_manifest(json.loads(manifest))
    except ValueError:
        return True


def _read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def best_of(states: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the checkpoint with the lowest `evaluation_key`, or ""; `states` maps sorted names to state.json.

    Only checkpoints evaluated on the same held-out samples as the last evaluated one are compared.
    """
    keys = {name: key for name, state in states.items() if (key := evaluation_key(state)) is not None}
    if not keys:
        return ""
    latest = states[list(keys)[-1]]["validation_set"]
    return min((name for name in keys if states[name]["validation_set"] == latest), key=keys.__getitem__)


def evaluation_key(state: Mapping[str, Any]) -> tuple[float, float, int] | None:
    """Return a sort key, the lowest is best: (the task's objective, the held-out loss, the step).

    `state` is state.json of a checkpoint, or the current state. None if it was not evaluated or a value is not finite.
    """
    if state.get("validation_loss") is None:
        return None
    key = state["validation_loss"], state.get("held_out_loss", 0.0), state["step"]
    return key if all(map(math.isfinite, key)) else None


@contextlib.contextmanager
def storing(address: str, folder: Path, *, resume: bool) -> Iterator[None]:
    """On exit, store the results in a run's `folder` at its `address` ("" does nothing), even after a failure.

    Raises:
        InputError: a run is stored there, and `resume` is false.
        MachineError: a successful run cannot be stored; its checkpoints remain in the folder.
    """
    if not address:
        yield
        return
    run = StoredRun(address, folder, SAVE_RETRY_SECONDS)
    if not resume and (run.checkpoint_names() or run.has_model()):
        content = f"checkpoints (latest {run.checkpoint_names()[-1]})" if run.checkpoint_names() else "a finished model"
        raise InputError(
            f"{address}: already holds {content}. Add --resume to continue that run, or choose another run_dir "
            "to start a new one."
        )
    run.claim()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        run.end(failure)
    print(f"{address}: stored")


class _StoredState(NamedTuple):
    """The content stored at a run's address.

    Attributes:
        checkpoints: the manifests of the stored checkpoints, by name.
        model: the manifest of a finished fine-tuning's model.
        writer: the writer file of the run's last start.
    """

    checkpoints: dict[str, bytes]
    model: bytes | None
    writer: bytes | None

    @property
    def latest(self) -> str:
        """The name of the latest checkpoint; "" if there is none."""
        return max(self.checkpoints, default="")


class StoredRun:
    """A run at an address.

    Args:
        address: the run's address.
        folder: the local run folder.
        retry_seconds: as for `ObjectStore`, whose errors every method raises.
    """

    def __init__(self, address: str, folder: Path, retry_seconds: float = RETRY_SECONDS) -> None:
        self.address, self._folder = address, folder
        self._objects = ObjectStore(retry_seconds)
        self._manifests: dict[str, bytes] | None = None  # stored checkpoint -> manifest; None before they are read
        self._states: dict[str, dict[str, Any]] = {}  # stored checkpoint -> state.json
        # If this start took over from one elsewhere: this start's number, and the results in the folder at that time.
        self._takeover: tuple[int, set[bytes]] | None = None

    def checkpoint_names(self) -> list[str]:
        """Return the names of the stored checkpoints, oldest first."""
        return sorted(self._stored_manifests())

    def has_model(self) -> bool:
        """Return whether the model of a finished fine-tuning is stored."""
        return self._objects.info(self._at(_MODEL, MANIFEST)) is not None

    def best(self) -> str:
        """Return the name of the best stored checkpoint (`best_of`)."""
        return best_of({name: self.state(name) for name in self.checkpoint_names()})

    def download(self, *, best: bool = False, is_follower: bool = False) -> None:
        """Fetch the latest stored checkpoint and the run's files, unless the local folder has a later checkpoint.

        Also fetches the model of a finished fine-tuning and, if `best`, the best checkpoint. One process fetches and
        verifies; others that share the folder wait. A follower calls this after another process has fetched, and only
        compares the latest manifests. Raises `InputError` if the folder contains another run, such as one that was
        deleted at the address and trained again.
        """
        marker = self._folder / _FETCHING
        stored = self._read_state() if is_follower else None
        with locked(self._folder / _LOCK):  # a lock file in the folder, which several machines may share
            # Hundreds of followers take this lock one after another, so they make no request while they hold it.
            if stored is not None and self._is_downloaded(stored) and not marker.is_file():
                return
            stored = self._read_state(refresh=is_follower)
            fetched = self._download_latest(stored, marker)
            if best:
                self._download_best()
            if stored.model is not None:
                if not self._is_local(stored.model, _MODEL):
                    fetched = True
                    write_json(marker, {})
                folders.fetch(self._at(_MODEL), self._objects, folder=self._folder / _MODEL)
            if fetched or marker.is_file():  # otherwise a run may be writing these files
                self.download_files()
                marker.unlink(missing_ok=True)

    def download_checkpoints(self, names: Iterable[str]) -> None:
        """Fetch the stored checkpoints `names`, and the run's files if they are missing."""
        for name in names:
            self._fetch(name)
        if not (self._folder / METRICS).is_file():
            self.download_files()

    def claim(self) -> None:
        """Let only this start, with all processes that share the folder, write at the address.

        An earlier start that still runs elsewhere can no longer store anything. If the address is not writable, this
        raises `InputError` before hours of training.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        writer = json.dumps({"id": uuid.uuid4().hex, "host": socket.gethostname(), "since": since}).encode()
        local_writer, (number, last_writer) = self._folder / _LOCAL_WRITER, self._last_writer()
        number += 1
        while not self._objects.create(self._writer_address(number), writer):  # another start took the number
            number += 1
        if self._objects.create_can_overwrite(self._writer_address(number), writer):
            logger.warning(_OVERWRITE_WARNING, self.address)
        if last_writer not in (None, _read_bytes(local_writer)):
            self._takeover = number, self._result_manifests()
        try:
            with atomic_open(local_writer) as file:
                file.write(writer)
        except BaseException:
            with contextlib.suppress(RunError):
                self._objects.delete(self._writer_address(number))
            raise

    def end(self, failure: BaseException | None = None) -> None:
        """Store the results of this start, as `complete` does, unless it failed without results.

        In that case, the claim is withdrawn, as the previous start may still be running. If a `RunError` ended the run
        (not a bug or Ctrl-C), a failure to store is appended to its message.
        """
        try:
            if failure and self._takeover and self._result_manifests() <= self._takeover[1]:
                self._objects.delete(self._writer_address(self._takeover[0]))
                (self._folder / _LOCAL_WRITER).unlink()
            else:
                self.complete()
        except RunError as error:
            if isinstance(failure, RunError):
                raise type(failure)(f"{failure} Not stored: {error}") from failure
            if failure is None:
                raise MachineError(
                    f"{self._folder}: finished, but its last checkpoint or results are not stored: {error} "
                    "Run the command with --resume to store them."
                ) from error

    def unpublish(self, name: str) -> None:
        """Delete the manifest of a stored checkpoint before it is stored again.

        Raises `InputError` if this start may no longer write.
        """
        self._check_claim()
        if name in self.checkpoint_names():
            self._objects.delete(self._at("checkpoints", name, MANIFEST))
            self._drop_cached(name)

    def put(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Store the files `names` of a local checkpoint."""
        entries = read_manifest(checkpoint)["files"]
        for name in names:
            stored = folders.hashed_name(name, entries[name])
            self._objects.upload(checkpoint / name, self._at("checkpoints", checkpoint.name, stored))

    def publish(self, checkpoint: Path) -> None:
        """Complete a checkpoint whose tensors are stored: store its state, the run's files, then the manifest."""
        self.put(checkpoint, [_STATE])
        self._check_claim()  # again, since storing the tensors took time
        self.put_files()
        manifest = (checkpoint / MANIFEST).read_bytes()
        self._objects.write(self._at("checkpoints", checkpoint.name, MANIFEST), manifest)
        self._stored_manifests()[checkpoint.name] = manifest

    def put_files(self) -> None:
        """Store the current content of the run's small files."""
        for name in STORED:
            path = self._folder / name
            if path.is_file():
                content = path.read_bytes()
                # The last record may be incomplete.
                end = content.rfind(b"\n") + 1 if path.suffix == ".jsonl" else len(content)
                self._objects.write(self._at(name), content[:end])

    def state(self, name: str) -> dict[str, Any]:
        """Read state.json of a stored checkpoint; {} if it cannot be read."""
        if name not in self._states:
            try:
                entry = folders.file_entries(self._stored_manifests().get(name))[_STATE]
                content = self._objects.read(self._at("checkpoints", name, folders.hashed_name(_STATE, entry)))
                self._states[name] = json.loads(content or b"{}")
            except (ValueError, KeyError):
                self._states[name] = {}
        return self._states[name]

    def delete_except(self, names: Iterable[str]) -> None:
        """Delete all stored checkpoints except `names`, and leftovers of interrupted saves, up to the latest step."""
        self._check_claim()  # another start may be storing one of these steps
        kept, latest = set(names), max(self.checkpoint_names(), default="")
        listed = [path.partition("/") for path in self._objects.listing(self._at("checkpoints"))]
        deleted = {
            name for name, _, _ in listed if CHECKPOINT_NAME.fullmatch(name) and name <= latest and name not in kept
        }
        files = [
            (name, file) for name, _, file in listed if name in deleted or (name in kept and self._is_stale(name, file))
        ]
        # Manifests first: a checkpoint without one counts as missing.
        for are_manifests in (True, False):
            paths = [self._at("checkpoints", name, f) for name, f in files if (f == MANIFEST) == are_manifests]
            folders.run_concurrently(self._objects.delete, paths, _CONCURRENT_DELETES)
        for name in deleted:
            self._drop_cached(name)

    def complete(self) -> None:
        """Store what the address lacks: the latest checkpoint, the run's files, a fine-tuned model, the export.

        Once a fine-tuned model is stored, the stored checkpoints are deleted; the local ones are already gone.
        """
        self._check_claim()
        self.put_files()
        latest, self._manifests = self._latest_intact(), None  # read again, as the workers have stored checkpoints
        missing = [f"checkpoints/{latest}"] if latest > UNTRAINED and latest not in self.checkpoint_names() else []
        for name in (*missing, _MODEL, "export"):
            if (self._folder / name / MANIFEST).is_file():
                hashed, check = name in missing, self._check_claim
                folders.store(self._folder / name, self._at(name), self._objects, hashed=hashed, check=check)
        if (self._folder / _MODEL / MANIFEST).is_file() and not latest:
            self.delete_except(())

    def _result_manifests(self) -> set[bytes]:
        """Return the manifests of the local training results: checkpoints and a fine-tuning's model."""
        paths = [*self._folder.glob(f"checkpoints/step-*/{MANIFEST}"), self._folder / _MODEL / MANIFEST]
        return {path.read_bytes() for path in paths if path.is_file() and path.parent.name != UNTRAINED}

    def _check_claim(self) -> None:
        """Raise `InputError` if the run was started elsewhere since `claim`. Without a claim, nothing is checked."""
        local_writer = self._folder / _LOCAL_WRITER
        last_writer = self._last_writer()[1] if local_writer.is_file() else None
        if last_writer is None or last_writer == local_writer.read_bytes():
            return
        start = json.loads(last_writer)
        raise InputError(
            f"{self.address}: the run was started again on {start['host']} at {start['since']}, and only the last "
            f"start may write there. Stop one of the two; this one keeps its checkpoints in {self._folder}."
        )

    def _at(self, *names: str) -> str:
        return join(self.address, *names)

    def _writer_address(self, number: int) -> str:
        return self._at(_WRITERS_FOLDER, _WRITER_NAME.format(number))

    def _last_writer(self) -> tuple[int, bytes | None]:
        """Return the number and the writer file of the run's last start; (0, None) before the first start."""
        names = self._objects.listing(self._at(_WRITERS_FOLDER))
        number = max((int(n) for name in names if (n := name.removeprefix("writer-")).isdecimal()), default=0)
        return number, self._objects.read(self._writer_address(number)) if number else None

    def _stored_manifests(self) -> dict[str, bytes]:
        """Return the manifests of the stored checkpoints by name; the first call reads them."""
        if self._manifests is None:
            listed = self._objects.listing(self._at("checkpoints"))
            names = (name for name, _, file in (path.partition("/") for path in listed) if file == MANIFEST)
            names = [name for name in names if CHECKPOINT_NAME.fullmatch(name)]
            read = folders.read_stored_manifest
            manifests = {name: read(self._at("checkpoints", name), self._objects) for name in names}
            # None: the checkpoint was deleted in the meantime.
            self._manifests = {name: manifest for name, manifest in manifests.items() if manifest is not None}
        return self._manifests

    def _read_state(self, *, refresh: bool = False) -> _StoredState:
        """Read the state at the address; `refresh` ignores cached manifests."""
        if refresh:
            self._manifests = None
        model = self._objects.read(self._at(_MODEL, MANIFEST))
        return _StoredState(dict(self._stored_manifests()), model, self._last_writer()[1])

    def _is_downloaded(self, stored: _StoredState) -> bool:
        """Return whether the local folder is up to date with the `stored` state, judging only by manifests."""
        local_name = max(checkpoint_names(self._folder), default="")
        has_latest = not stored.latest or self._prefers_local(local_name, stored.latest, stored)
        return has_latest and (stored.model is None or self._is_local(stored.model, _MODEL))

    def _download_latest(self, stored: _StoredState, marker: Path) -> bool:
        """Fetch the latest intact stored checkpoint if it is later than the local one; return whether it was fetched.

        The file `marker` is written first.
        """
        local_name = self._latest_intact()
        self._check_same_run(local_name, stored)
        for name in sorted(stored.checkpoints, reverse=True):
            if self._prefers_local(local_name, name, stored):
                return False
            try:
                write_json(marker, {})
                self._fetch(name)
                return True
            except AccessError:
                raise
            except (InputError, ContentError) as error:
                current = self._read_state(refresh=True)
                if current.latest > stored.latest:  # the run has saved a later one, and perhaps deleted this one
                    return self._download_latest(current, marker)
                logger.warning("%s Trying the checkpoint before it.", error)
        return False

    def _check_same_run(self, local_name: str, stored: _StoredState) -> None:
        """Raise `InputError` if the folder has results that the stored run neither contains nor was resumed from.

        `local_name` is the folder's latest checkpoint.
        """
        has_latest = self._is_local(stored.checkpoints.get(stored.latest), "checkpoints", stored.latest)
        is_later = local_name > stored.latest and not has_latest
        result = "a finished model" if (self._folder / _MODEL / MANIFEST).is_file() else local_name if is_later else ""
        if result and stored.model is None and not self._started_here(stored):
            raise InputError(
                f"{self._folder}: holds {result}, but {self.address} does not: the run was started again elsewhere, or "
                "deleted there. Move this folder away or remove it, then run the command again."
            )

    def _prefers_local(self, local_name: str, name: str, stored: _StoredState) -> bool:
        """Return whether the run continues from the local checkpoint `local_name` rather than the stored `name`."""
        is_same = self._is_local(stored.checkpoints.get(name), "checkpoints", name)
        return local_name > name or (local_name == name and (is_same or self._started_here(stored)))

    def _started_here(self, stored: _StoredState) -> bool:
        """Return whether the last start of the run was in the local folder."""
        writer = _read_bytes(self._folder / _LOCAL_WRITER)
        return writer is not None and stored.writer in (None, writer)

    def _is_local(self, manifest: bytes | None, *names: str) -> bool:
        """Return whether the subfolder `names` of the local folder has this `manifest`."""
        return manifest is not None and manifest == _read_bytes(self._folder.joinpath(*names, MANIFEST))

    def _download_best(self) -> None:
        """Fetch the best stored checkpoint, which a fine-tuning exports at its end, unless it is local."""
        name = self.best()
        if name and name not in checkpoint_names(self._folder):
            try:
                self._fetch(name)
            except AccessError:
                raise
            except (InputError, ContentError) as error:
                logger.warning("%s The run continues without its best checkpoint.", error)

    def _fetch(self, name: str) -> None:
        folder, address = self._folder / "checkpoints" / name, self._at("checkpoints", name)
        folders.fetch(address, self._objects, folder=folder, trust_sizes=False, hashed=True)

    def _is_stale(self, name: str, file: str) -> bool:
        """Return whether `file` is a leftover of an earlier save of the stored checkpoint `name`, by its manifest."""
        entries = folders.file_entries(self._stored_manifests().get(name))
        names = {folders.hashed_name(other, entry) for other, entry in entries.items()}
        return bool(entries) and file not in {MANIFEST, *names}

    def _latest_intact(self) -> str:
        """Return the name of the latest local checkpoint that `verify_manifest` accepts; "" if there is none."""
        for name in reversed(checkpoint_names(self._folder)):
            try:
                verify_manifest(self._folder / "checkpoints" / name)
            except (InputError, OSError) as error:
                logger.warning("%s", error)
                continue
            return name
        return ""

    def _drop_cached(self, name: str) -> None:
        self._stored_manifests().pop(name, None)
        self._states.pop(name, None)

    def download_files(self) -> None:
        """Fetch the small files of the run."""
        for name in STORED:
            content = self._objects.read(self._at(name))
            if content is None and not (self._folder / _LOCAL_WRITER).is_file():  # the file is from an earlier run
                (self._folder / name).unlink(missing_ok=True)
            elif content is not None:
                with atomic_open(self._folder / name) as file:
                    file.write(content)
