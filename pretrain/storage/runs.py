"""A run in an object store: checkpoints with their manifests last, and the small files that a resume needs.

The run trains in the local folder of its address (`addresses.local_run`). What is stored:

    checkpoints/step-00001000/...     as on disk; deleting begins with the manifest
    checkpoints/index.json            names of the checkpoints, for stores whose listings lag
    config.yaml, metrics.jsonl, ...   as they were when the last checkpoint was stored, or when the run ended
    writer.json                       which start of the run may write, and on which machine: the last one

A checkpoint without a manifest does not exist; the index and the listing only say where to look for one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretrain.common.addresses import is_remote, join, local
from pretrain.common.errors import InputError
from pretrain.common.files import (
    MANIFEST,
    atomic_open,
    checkpoint_names,
    read_manifest,
    verify_manifest,
    write_json,
)
from pretrain.storage import folders
from pretrain.storage.objects import RETRY_SECONDS, ObjectStore

INDEX = "index.json"
WRITER = "writer.json"
RUN_FILES = (
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "start.json",
    "attention.json",
    "adaptation.json",
    "scores.json",
)
_STATE, _MODEL = "state.json", "model"
_FETCHING = ".fetching"  # a file that is there until the run's small files have been fetched behind a checkpoint
_CHECKPOINT = re.compile(r"step-\d{8}")

logger = logging.getLogger(__name__)


@functools.cache
def fetched_model(location: Path | str) -> Path:
    """The local folder of a model: of one at an address, which is fetched once per process; a path, with ~ expanded.

    At the address may be an export, a run, of which the newest checkpoint is fetched, or a released model.
    Raises `InputError` if there is nothing.
    """
    if not is_remote(location):
        return local(location)
    address, objects = str(location), ObjectStore()
    if folders.read_stored_manifest(address, objects) is not None:
        return folders.fetch(address, objects)
    run = StoredRun(address, local(address))
    if run.names() or run.has_model():
        run.bring()
    elif not folders.fetch_files(address, objects=objects):
        raise InputError(f"{address}: nothing is stored there. Check the address.")
    return local(address)


class StoredRun:
    """The run at an address.

    Args:
        address: of the run.
        folder: the local run folder.
        retry_seconds: as for `ObjectStore`, whose errors every method raises.
    """

    def __init__(self, address: str, folder: Path, retry_seconds: float = RETRY_SECONDS) -> None:
        self.address, self._folder = address, folder
        self._objects = ObjectStore(retry_seconds)
        self._names: set[str] | None = None  # of the stored checkpoints, once they are known
        self._states: dict[str, dict[str, Any]] = {}

    def names(self) -> list[str]:
        """Names of the stored checkpoints, the oldest first."""
        if self._names is None:
            listed = self._objects.listing(self._at("checkpoints"))
            names = {name.partition("/")[0] for name in listed if name.endswith(f"/{MANIFEST}")}
            for name in {*self._index(), *names}:
                if self._manifest(name) is None:  # listed late, or deleted
                    names.discard(name)
                else:
                    names.add(name)
            self._names = {name for name in names if _CHECKPOINT.fullmatch(name)}
        return sorted(self._names)

    def has_model(self) -> bool:
        """Whether the model of a finished fine-tuning is stored."""
        return self._objects.facts(self._at(_MODEL, MANIFEST)) is not None

    def bring(self) -> None:
        """Fetch the newest stored checkpoint and the run's files, if the local folder has no newer checkpoint.

        The model of a finished fine-tuning is fetched too. One process per machine fetches; others wait.
        """
        model, begun = self._folder / _MODEL, self._folder / _FETCHING
        with folders.alone(self._folder):
            fetched = self._bring_newest(begun)
            if self.has_model():
                if not (model / MANIFEST).is_file():
                    fetched = True
                    write_json(begun, {})
                folders.fetch(self._at(_MODEL), self._objects, folder=model)
            if fetched or begun.is_file():  # else a run may be writing these files
                self._bring_files()
                begun.unlink(missing_ok=True)

    def bring_all(self) -> None:
        """Fetch all stored checkpoints."""
        for name in self.names():
            self._fetch(name)

    def claim(self) -> None:
        """Become the only start of the run that may write at the address, for all processes that share the folder.

        An earlier start that still runs elsewhere cannot store anything from now on. Raises `InputError` if nothing may
        be written at the address, before hours of training.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        writer = json.dumps({"id": uuid.uuid4().hex, "host": socket.gethostname(), "since": since}).encode()
        self._objects.write(self._at(WRITER), writer)
        with atomic_open(self._folder / WRITER) as file:
            file.write(writer)
        self._write_index()

    def withdraw(self, name: str) -> None:
        """Before a checkpoint is stored: if it is written once more, delete its manifest.

        Raises `InputError` if this start may not write any more.
        """
        self._check_claim()
        if name in self.names():
            self._objects.delete(self._at("checkpoints", name, MANIFEST))
            self._forget(name)

    def put(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Store these files of a checkpoint."""
        for name in names:
            self._objects.upload(checkpoint / name, self._at("checkpoints", checkpoint.name, name))

    def publish(self, checkpoint: Path) -> None:
        """Store the rest of a checkpoint whose tensors are stored: state, run files, then the manifest; the index."""
        self.put(checkpoint, [_STATE])
        self._check_claim()  # storing the tensors took time
        self.put_files()
        self._objects.write(self._at("checkpoints", checkpoint.name, MANIFEST), (checkpoint / MANIFEST).read_bytes())
        self._names = {*self.names(), checkpoint.name}
        self._write_index()

    def put_files(self) -> None:
        """Store the run's small files as they are now."""
        for name in RUN_FILES:
            path = self._folder / name
            if path.is_file():
                content = path.read_bytes()
                # A record may be half-written.
                end = content.rfind(b"\n") + 1 if path.suffix == ".jsonl" else len(content)
                self._objects.write(self._at(name), content[:end])

    def state(self, name: str) -> dict[str, Any]:
        """state.json of a stored checkpoint; {} if it cannot be read."""
        if name not in self._states:
            content = self._objects.read(self._at("checkpoints", name, _STATE))
            try:
                self._states[name] = json.loads(content or b"{}")
            except ValueError:
                self._states[name] = {}
        return self._states[name]

    def keep(self, names: Iterable[str]) -> None:
        """Delete all other stored checkpoints, and what interrupted saves left of steps before the newest."""
        kept, newest = set(names), max(self.names(), default="")
        files: dict[str, set[str]] = {name: set() for name in self.names() if name not in kept}
        for name, _, file in (one.partition("/") for one in self._objects.listing(self._at("checkpoints"))):
            if name in files or (_CHECKPOINT.fullmatch(name) and name < newest and name not in kept):
                files.setdefault(name, set()).add(file)
        for name, listed in sorted(files.items()):
            self._delete(name, listed)
        self._write_index()

    def complete(self) -> None:
        """Store what the local folder has and the store lacks: the newest checkpoint, the run's files, the results.

        Once the model of a fine-tuning is stored, no checkpoint is, as in the folder.
        """
        self._check_claim()
        newest, self._names = self._newest_intact(), None  # the workers have stored others
        if newest and newest not in self.names():
            checkpoint = self._folder / "checkpoints" / newest
            self.put(checkpoint, [name for name in read_manifest(checkpoint)["files"] if name != _STATE])
            self.publish(checkpoint)
        self.put_files()
        for result in (_MODEL, "export"):
            if (self._folder / result / MANIFEST).is_file():
                folders.store(self._folder / result, self._at(result), self._objects)
        if (self._folder / _MODEL / MANIFEST).is_file() and not newest:
            self.keep(())

    def _check_claim(self) -> None:
        """Raise `InputError` if the run was started elsewhere since `claim`. Without a claim, nothing is checked."""
        ours = self._folder / WRITER
        stored = self._objects.read(self._at(WRITER)) if ours.is_file() else None
        if stored is None or stored == ours.read_bytes():
            return
        other = json.loads(stored)
        raise InputError(
            f"{self.address}: the run was started again on {other['host']} at {other['since']}, and only the last "
            f"start may write there. Stop one of the two; this one keeps its checkpoints in {self._folder}."
        )

    def _at(self, *names: str) -> str:
        return join(self.address, *names)

    def _bring_newest(self, begun: Path) -> bool:
        """Fetch the newest intact stored checkpoint, unless the local folder has it or a newer one; whether it did.

        The file `begun` is written first.
        """
        ours = self._newest_intact()
        for name in reversed(self.names()):
            if ours >= name:
                return False
            try:
                write_json(begun, {})
                self._fetch(name)
                return True
            except InputError as error:
                logger.warning("%s Trying the checkpoint before it.", error)
        return False

    def _fetch(self, name: str) -> None:
        folders.fetch(self._at("checkpoints", name), self._objects, folder=self._folder / "checkpoints" / name)

    def _delete(self, name: str, files: set[str]) -> None:
        """Delete a checkpoint, the manifest first; `files` are those of its files that a listing showed."""
        with contextlib.suppress(ValueError, KeyError):  # a damaged manifest
            files = files | set(json.loads(self._manifest(name) or b'{"files": {}}')["files"])
        self._objects.delete(self._at("checkpoints", name, MANIFEST))
        self._forget(name)
        for file in sorted(files - {MANIFEST}):
            self._objects.delete(self._at("checkpoints", name, file))

    def _newest_intact(self) -> str:
        """The name of the newest intact checkpoint of the local folder; "" if there is none."""
        for name in reversed(checkpoint_names(self._folder)):
            try:
                verify_manifest(self._folder / "checkpoints" / name)
            except (InputError, OSError) as error:
                logger.warning("%s", error)
                continue
            return name
        return ""

    def _manifest(self, name: str) -> bytes | None:
        return folders.read_stored_manifest(self._at("checkpoints", name), self._objects)

    def _index(self) -> list[str]:
        try:
            return [str(name) for name in json.loads(self._objects.read(self._at("checkpoints", INDEX)) or b"[]")]
        except (ValueError, TypeError):
            return []

    def _write_index(self) -> None:
        self._objects.write(self._at("checkpoints", INDEX), json.dumps(self.names()).encode())

    def _forget(self, name: str) -> None:
        self._names = set(self.names()) - {name}
        self._states.pop(name, None)

    def _bring_files(self) -> None:
        for name in RUN_FILES:
            content = self._objects.read(self._at(name))
            if content is not None:
                with atomic_open(self._folder / name) as file:
                    file.write(content)
