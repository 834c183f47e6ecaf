"""Writes the checkpoints that `store` reads: every rank writes a shard, then rank 0 the state and the manifest."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pretrain.checkpoint.store import FORMAT, SavingGroup, agree, name_of, read_with_retries
from pretrain.checkpoint.weight_files import save_weights
from pretrain.common.errors import MachineError, RunError
from pretrain.common.files import (
    disk_errors,
    existing_parent,
    fsync_folder,
    put_manifest,
    sha256_file,
    write_json,
)


class FragmentLike(Protocol):
    """The attributes of a fragment (`pretrain.training.engine.Fragment`) that `take_shard` reads."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...
    @property
    def replicated(self) -> bool: ...


@dataclass(frozen=True)
class CheckpointShard:
    """The part of a checkpoint that one rank writes: fp32 tensors by "<kind>|<parameter>|<start>", and an index."""

    tensors: dict[str, Tensor]
    entries: list[dict[str, Any]]  # the index: name, start, numel and kinds of each fragment


def shard_name(group: SavingGroup) -> str:
    """Return the name of the file that this rank writes in a checkpoint."""
    return f"rank-{group.rank:05d}-of-{group.world_size:05d}.safetensors"


def save(folder: Path, step: int, fragments: Iterable[FragmentLike], state: dict[str, Any], group: SavingGroup) -> Path:
    """Write the checkpoint of `step` to `folder`, as `write` does; every rank calls this. Returns its path."""
    return write(folder, step, take_shard(fragments, group), state, group)


def take_shard(
    fragments: Iterable[FragmentLike], group: SavingGroup, copy: Callable[[str, Tensor], Tensor] = lambda _, x: x
) -> CheckpointShard:
    """Return the shard that this rank writes: its sharded tensors, and an equal part of the replicated ones.

    Replicated tensors are split as one concatenated sequence, so each further rank splits at most one more fragment.
    `copy` is called with each tensor's key and a view of the optimizer's tensor, which the next step modifies.
    """
    tensors: dict[str, Tensor] = {}
    entries = []
    fragments = list(fragments)
    for fragment, span in zip(fragments, _slices_to_write(fragments, group), strict=True):
        if span.start >= span.stop:
            continue
        start = fragment.start + span.start
        for kind, tensor in fragment.tensors.items():
            key = f"{kind}|{fragment.name}|{start}"
            tensors[key] = copy(key, tensor[span].detach())
        entry = {"name": fragment.name, "start": start, "numel": span.stop - span.start}
        entries.append({**entry, "kinds": list(fragment.tensors)})
    return CheckpointShard(tensors, entries)


def write(folder: Path, step: int, shard: CheckpointShard, state: dict[str, Any], group: SavingGroup) -> Path:
    """Write the checkpoint of `step` to `folder`; every rank calls this with its shard. Returns its path.

    Each rank writes and hashes one file. Then rank 0 writes the state and the manifest and renames the folder to
    its final name. An error on any rank, such as a full disk, is raised on every rank as `MachineError`, and the
    incomplete folder is removed.
    """
    final = folder / name_of(step)
    tmp = folder / f".{final.name}.tmp"
    try:
        agree(group, lambda: write_shard(tmp, shard, group), lambda shards: _publish(tmp, final, shards, state))
    except RunError:
        if group.rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        group.broadcast_object(None)  # no rank may retry before the incomplete folder is removed
        raise
    return final


def write_shard(tmp: Path, shard: CheckpointShard, group: SavingGroup) -> dict[str, Any]:
    """Write this rank's tensors to a file in the folder `tmp`, and return the file's entry for the manifest."""
    name = shard_name(group)
    path = tmp / name
    with _write_errors(path):
        tmp.mkdir(parents=True, exist_ok=True)
        check_storage(path, sum(tensor.numel() * tensor.element_size() for tensor in shard.tensors.values()))
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
    """Convert errors as `disk_errors` does, and other errors of the storage to `MachineError`."""
    try:
        with disk_errors(path):
            yield
    except OSError as error:
        raise MachineError(f"{path}: cannot be written ({error.strerror or error}). Check the storage.") from error


def _slices_to_write(fragments: Sequence[FragmentLike], group: SavingGroup) -> Iterator[slice]:
    """Yield the slice of each fragment that this rank writes."""
    sizes = [next(iter(fragment.tensors.values())).numel() for fragment in fragments]
    replicated_size = sum(size for fragment, size in zip(fragments, sizes, strict=True) if fragment.replicated)
    start, end = (replicated_size * rank // group.world_size for rank in (group.rank, group.rank + 1))
    offset = 0
    for fragment, size in zip(fragments, sizes, strict=True):
        if fragment.replicated:
            yield slice(max(0, start - offset), max(0, min(size, end - offset)))
            offset += size
        else:
            yield slice(0, size)


def check_storage(path: Path, needed: int) -> None:
    """Raise `OSError` before writing if the file does not fit on the disk."""
    if shutil.disk_usage(existing_parent(path)).free < needed:
        raise OSError(28, "No space left on device")


def _publish(tmp: Path, final: Path, shards: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """On rank 0, after every shard is on disk: write the state and the manifest, then rename the folder."""
    for shard in shards:
        _check_visible(tmp / shard["file"], shard["bytes"])
    with _write_errors(final):
        write_json(tmp / "state.json", state)
        _write_manifest(tmp, shards, state)
        if final.exists():
            shutil.rmtree(final)
        tmp.replace(final)
        fsync_folder(final.parent)


def _check_visible(path: Path, size: int) -> None:
    """Raise `MachineError` if rank 0 does not see the shard that a rank wrote: their storage may differ."""
    seen = read_with_retries(path, path.stat).st_size
    if seen != size:
        raise MachineError(f"{path}: has {seen} bytes, not the {size} that were written. Check the storage.")


def _write_manifest(tmp: Path, shards: list[dict[str, Any]], state: dict[str, Any]) -> None:
    files = {shard["file"]: {"bytes": shard["bytes"], "sha256": shard["sha256"]} for shard in shards}
    state_file = tmp / "state.json"
    files["state.json"] = {"bytes": state_file.stat().st_size, "sha256": sha256_file(state_file)}
    manifest = {
        "format": FORMAT,
        "step": state["step"],
        "shapes": state["shapes"],
        "fragments": merge_entries(entry for shard in shards for entry in shard["fragments"]),
        "files": files,
    }
    put_manifest(tmp, manifest)


def merge_entries(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the entries {name, start, numel, kinds, rank} of all ranks: equal parts on consecutive ranks become one.

    A merged entry has the start and rank of its first part, and `parts`, the number of parts.
    """
    merged: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: (entry["name"], entry["kinds"], entry["start"])):
        if merged and _continues(merged[-1], entry):
            merged[-1]["parts"] = merged[-1].get("parts", 1) + 1
        else:
            merged.append(dict(entry))
    return merged


def _continues(merged: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    parts = merged.get("parts", 1)
    return (
        all(merged[key] == entry[key] for key in ("name", "kinds", "numel"))
        and entry["start"] == merged["start"] + parts * merged["numel"]
        and entry["rank"] == merged["rank"] + parts
    )
