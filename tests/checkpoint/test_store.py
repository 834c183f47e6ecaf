"""Checkpoints are atomic and verified: damaged ones are never resumed from, intact ones are kept."""

import contextlib
import errno
import itertools
import json
import math
import os
import random
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pretrain.checkpoint import store, writing
from pretrain.checkpoint.store import FragmentIndex
from pretrain.checkpoint.writing import merge_entries
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import put_manifest, verify_manifest
from pretrain.run.loop import Fit
from pretrain.run.progress import Progress
from pretrain.run.session import latest_checkpoint
from pretrain.storage.runs import best_of
from pretrain.training.engine import RankGroup
from tests.distributed import Alone, run_workers

SHAPES = {"a": [4, 5], "b": [7]}


@dataclass
class Held:
    name: str
    start: int
    tensors: dict[str, Tensor]
    replicated: bool = False


@dataclass
class Weights:
    """Two parameters with moments, cut into fragments at will."""

    seed: int = 0
    cuts: dict[str, list[int]] = field(default_factory=lambda: {"a": [0, 6, 20], "b": [0, 7]})

    def tensor(self, kind: str, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, len(kind), name == "a")) % 1000)
        return torch.randn(torch.Size(SHAPES[name]).numel(), generator=generator)

    def fragments(self) -> list[Held]:
        return [
            Held(name, a, {kind: self.tensor(kind, name)[a:b] for kind in ("weight", "exp_avg", "exp_avg_sq")})
            for name, cuts in self.cuts.items()
            for a, b in itertools.pairwise(cuts)
        ]


def save(folder: Path, step: int, *, loss: float | None = None, weights: Weights | None = None, phase: int = 0) -> Path:
    state = {"step": step, "shapes": SHAPES, "validation_loss": loss, "validation_set": f"phase {phase}"}
    return writing.save(folder, step, (weights or Weights(step)).fragments(), state, Alone())


def test_any_range_of_any_parameter_reads_back(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save(tmp_path, 3, weights=Weights(2))
        checkpoint = save(tmp_path, 3)  # replaces it
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in checkpoint.iterdir()} == {"0o644"}  # what the umask allows
    assert store.read_state(checkpoint)["step"] == 3
    with store.CheckpointReader(checkpoint) as reader:
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            expected = Weights(3).tensor(kind, "a")
            for start, numel in [(0, 20), (5, 3), (6, 14), (19, 1), (4, 0)]:
                assert torch.equal(reader.read(kind, "a", start, numel), expected[start : start + numel])
        with pytest.raises(InputError, match="no weight of c from element 0"):
            reader.read("weight", "c", 0, 1)
        with pytest.raises(InputError, match="from element 20"):
            reader.read("weight", "a", 10, 11)
    weights = store.read_weights(checkpoint)
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == SHAPES


def damage_flip(checkpoint: Path) -> None:
    path = next(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def damage_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{")


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, path: Path, number: int, left: list[int]) -> None:
    """Make a function raise an error of the system for a path, and for what is in it, as often as `left` says."""
    real = getattr(owner, name)

    def unreliable(given: Any, *arguments: Any, **more: Any) -> Any:
        if left[0] and path in (Path(given), Path(given).parent):
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(given))
        return real(given, *arguments, **more)

    monkeypatch.setattr(store, "READ_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(owner, name, unreliable)


@pytest.mark.parametrize("failures", [1, 99])
def test_an_unreadable_checkpoint_is_retried_then_refused(tmp_path: Path, monkeypatch, failures: int) -> None:
    """The one before it may be much older, and all may be unreadable, which is not a new run."""
    save(tmp_path, 10)
    bad = save(tmp_path, 20)
    fail(monkeypatch, store, "verify_manifest", bad, errno.EIO, [failures])
    if failures == 1:
        assert store.latest(tmp_path, set_aside=True) == bad
    else:
        with pytest.raises(MachineError, match=r"step-00000020: cannot be read \(Input/output error\)\. Check"):
            store.latest(tmp_path, set_aside=True)
    assert bad.exists(), "its content may be whole"


@pytest.mark.parametrize("failures", [1, 99])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("which", ["state.json", "manifest.json", "rank-00000-of-00001.safetensors"])
def test_reading_a_verified_checkpoint_is_retried_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, number: int, failures: int
) -> None:
    """Rank 0 verifies; the machine of another rank may not see a file yet."""
    checkpoint, left = save(tmp_path, 10), [failures]
    for owner, name in ((Path, "read_text"), (Path, "read_bytes"), (store, "safe_open")):
        fail(monkeypatch, owner, name, checkpoint / which, number, left)
    refused = pytest.raises(MachineError, match=rf"{which}: cannot be read \({os.strerror(number)}\)\. Check")
    with contextlib.nullcontext() if failures == 1 else refused:
        assert store.read_state(checkpoint)["step"] == 10
        assert list(store.read_weights(checkpoint)) == list(SHAPES)
    assert left != [failures]


def test_a_manifest_that_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = save(tmp_path, 10) / "manifest.json"
    fail(monkeypatch, Path, "open", manifest, errno.EACCES, [99])
    with pytest.raises(MachineError, match=r"manifest\.json: cannot be read \(Permission denied\)"):
        store.latest(tmp_path, set_aside=True)
    assert manifest.is_file()


def test_a_checkpoint_that_is_saved_while_the_one_before_is_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one that is kept, the run that trains removes the one that another program verifies."""
    save(tmp_path, 10)
    verify, later = store.verify_manifest, []

    def slow(checkpoint: Path, **how: Any) -> Any:
        if not later:
            later.append(save(tmp_path, 20))
            store.prune(tmp_path, 1)
        return verify(checkpoint, **how)

    monkeypatch.setattr(store, "verify_manifest", slow)
    assert [store.latest(tmp_path)] == later


@pytest.mark.parametrize("written", [{}, {"format": 1}, {"format": 3}])
def test_a_checkpoint_of_another_version_is_refused_and_not_set_aside(tmp_path: Path, written: dict[str, int]) -> None:
    save(tmp_path, 10)
    other = save(tmp_path, 20)
    manifest = json.loads((other / "manifest.json").read_text())
    put_manifest(other, {key: x for key, x in manifest.items() if key not in ("manifest_sha256", "format")} | written)
    with pytest.raises(MachineError, match=r"step-00000020: made by another version of bertrain\. Train again\.$"):
        store.latest(tmp_path, set_aside=True)
    assert other.is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_is_not_a_new_one(tmp_path: Path) -> None:
    for step in (10, 20):
        damage_manifest(save(tmp_path, step))
    with pytest.raises(InputError, match=r"all checkpoints are damaged: step-00000010, step-00000020\."):
        store.latest(tmp_path)
    for _ in range(2):
        with pytest.raises(InputError, match=r"all checkpoints are damaged.*start from step 0"):
            store.latest(tmp_path, set_aside=True)


def test_a_half_written_checkpoint_does_not_exist(tmp_path: Path) -> None:
    """A process killed while saving leaves a folder without a name."""
    good = save(tmp_path, 10)
    shutil.copytree(good, tmp_path / ".step-00000030.tmp")
    assert store.latest(tmp_path) == good
    store.prune(tmp_path, 5)
    assert not (tmp_path / ".step-00000030.tmp").exists()
    assert store.latest(tmp_path / "nowhere") is None


def test_the_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)]:
        save(tmp_path, step, loss=loss)
        store.prune(tmp_path, 2)
    assert [store.step_of(path) for path in store.list_checkpoints(tmp_path)] == [2, 4, 5]


def test_the_checkpoint_that_was_just_saved_is_kept(tmp_path: Path) -> None:
    """Also if there are newer ones, of a run that went back."""
    checkpoints = [save(tmp_path, step) for step in (4, 20, 30)]
    store.prune(tmp_path, 1, checkpoints[0])
    assert store.list_checkpoints(tmp_path) == [checkpoints[0], checkpoints[2]]


def test_the_best_is_of_the_latest_phase_and_the_earliest_of_equals(tmp_path: Path) -> None:
    assert store.best(tmp_path) is None
    for step, loss, phase in [(1, 1.0, 0), (2, 3.0, 1), (3, 2.0, 1), (4, 2.0, 1), (5, None, 1)]:
        save(tmp_path, step, loss=loss, phase=phase)
    assert store.best(tmp_path) == tmp_path / store.name_of(3)


def test_loop_patience_and_store_agree_on_ties() -> None:
    """Of equal scores the lower held-out loss is better, then the earlier step; a resume changes nothing."""
    fit, states, gains = object.__new__(Fit), {}, []
    fit.task, fit.progress = cast(Any, SimpleNamespace(to_minimize=lambda means: -means["f1"])), Progress()
    evaluations = [(0.8, 0.7), (0.8, 0.5), (0.8, 0.5), (0.7, 0.1), (0.8, 0.6), (0.9, math.nan), (0.8, 0.4)]
    for step, (score, loss) in enumerate(evaluations, 1):
        fit.progress = Progress.from_state(json.loads(json.dumps({**asdict(fit.progress), "step": step})))
        fit.update_best({"f1": score, "loss": loss})
        gains.append(fit.progress.evaluations_without_gain)
        states[store.name_of(step)] = {**fit.validation, "validation_set": "dev"}
        assert best_of(states) == store.name_of(int((fit.progress.best or [0])[-1]))
    assert gains == [0, 0, 1, 2, 3, 4, 0]


def test_a_damaged_best_checkpoint_gives_way_to_the_next_best(tmp_path: Path) -> None:
    losses = {1: 2.0, 2: 1.0, 3: 3.0, 4: None}
    first, best, worse, last = (save(tmp_path, step, loss=loss) for step, loss in losses.items())
    damage_flip(best)
    assert store.best_intact(tmp_path) == first
    assert (tmp_path / "damaged-step-00000002").is_dir()
    for checkpoint in (first, worse):
        damage_manifest(checkpoint)
    assert store.best_intact(tmp_path) == last, "none is evaluated"
    damage_flip(last)
    with pytest.raises(InputError, match="all checkpoints are damaged"):
        store.best_intact(tmp_path)


def test_a_torn_state_stops_neither_pruning_nor_resuming(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, loss=4.0 - step)
    (tmp_path / store.name_of(3) / "state.json").write_text('{"step"')
    assert store.best(tmp_path) == tmp_path / store.name_of(2)
    (tmp_path / store.name_of(3) / "state.json").unlink()
    assert store.best(tmp_path) == tmp_path / store.name_of(2)
    store.prune(tmp_path, 5)
    assert store.latest(tmp_path) == tmp_path / store.name_of(2)


def test_kept_checkpoints_stay_and_a_damaged_old_state_stops_nothing(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    for step, text in ((10, '{"kept": true}'), (20, "not JSON")):
        (tmp_path / store.name_of(step) / "state.json").write_text(text)
    store.prune(tmp_path, 1)
    assert [store.step_of(path) for path in store.list_checkpoints(tmp_path)] == [10, 40]


def test_nothing_is_pruned_while_the_best_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = [save(tmp_path, step, loss=float(step)) for step in (1, 2, 3)]
    with monkeypatch.context() as patch:
        fail(patch, Path, "read_text", checkpoints[0], errno.ESTALE, [99])
        with pytest.raises(MachineError, match=r"step-00000001/state\.json: cannot be read \(Stale file handle\)"):
            store.prune(tmp_path, 1)
    assert store.list_checkpoints(tmp_path) == checkpoints
    store.prune(tmp_path, 1)
    assert store.list_checkpoints(tmp_path) == [checkpoints[0], checkpoints[2]]


def test_what_all_workers_hold_is_written_once(tmp_path: Path) -> None:
    fragments = [
        Held("a", 0, {"weight": torch.arange(20.0)}, replicated=True),
        Held("own", 0, {"weight": torch.arange(3.0)}),
        *(Held(f"b{number}", 0, {"weight": torch.arange(7.0)}, replicated=True) for number in range(9)),
    ]
    for world_size in (1, 3, 8, 100):
        shards = [writing.take_shard(fragments, Alone(rank, world_size)) for rank in range(world_size)]
        held = [fragment for fragment in fragments if fragment.replicated]
        for fragment in held:
            entries = [entry for shard in shards for entry in shard.entries if entry["name"] == fragment.name]
            assert [entry["start"] for entry in entries] == [0, *np.cumsum([e["numel"] for e in entries])[:-1]]
            written = [shard.tensors[key] for shard in shards for key in shard.tensors if f"|{fragment.name}|" in key]
            assert torch.cat(written).equal(fragment.tensors["weight"])
        own = [entry for shard in shards for entry in shard.entries if entry["name"] == "own"]
        assert [entry["numel"] for entry in own] == [3] * world_size
        # A further rank cuts one of them in two; entries do not multiply.
        assert sum(len(shard.entries) for shard in shards) - len(own) <= len(held) + world_size - 1
        sizes = [sum(e["numel"] for e in shard.entries if e["name"] != "own") for shard in shards]
        assert max(sizes) - min(sizes) <= 1


@dataclass
class OfTwo(Alone):
    """Rank 0 of two. Rank 1 says that it has written a file like rank 0's."""

    world_size: int = 2

    def collect_objects(self, value: Any) -> list[Any]:
        return [value, {"result": {**value["result"], "file": writing.shard_name(Alone(1, 2))}}]


@pytest.mark.parametrize(
    ("there", "message"), [(None, r"cannot be read \(No such file"), (b"old", "has 3 bytes, not the")]
)
def test_a_checkpoint_without_the_file_that_a_rank_wrote_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bytes | None, message: str
) -> None:
    """Each machine may have a folder of its own at the run's path."""
    monkeypatch.setattr(store, "READ_WAIT_SECONDS", 0.0)
    if there is not None:
        aside = tmp_path / ".step-00000002.tmp"
        aside.mkdir()
        (aside / writing.shard_name(Alone(1, 2))).write_bytes(there)
    held, state = [Held("a", 0, {"weight": torch.ones(20)})], {"step": 2, "shapes": {"a": [20]}}
    with pytest.raises(MachineError, match=f"rank-00001-of-00002.safetensors: {message}"):
        writing.save(tmp_path, 2, held, state, OfTwo())
    assert not list(tmp_path.iterdir())


def own_group() -> RankGroup:
    return RankGroup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.new_group(backend="gloo"))


def save_and_count_bytes(folder: Path) -> tuple[int, str]:
    """Save 200 pieces, then a checkpoint that fails on rank 1: (bytes of objects that this rank received, error)."""
    group = own_group()
    read, received = distributed_c10d._tensor_to_object, []

    def counted(tensor: Tensor, size: Any, *more: Any) -> Any:
        received.append(int(size))
        return read(tensor, size, *more)

    distributed_c10d._tensor_to_object = counted
    mine = [Held(f"parameter {number}", 2 * group.rank, {"weight": torch.ones(2)}) for number in range(200)]
    shapes = {held.name: [2 * group.world_size] for held in mine}
    writing.save(folder, 1, mine, {"step": 1, "shapes": shapes}, group)
    if group.rank == 1:
        writing.save_weights = None  # type: ignore[assignment]
    with pytest.raises(MachineError) as failed:
        writing.save(folder, 2, mine, {"step": 2, "shapes": shapes}, group)
    return sum(received), str(failed.value)


def find_newest_and_note_reads(folder: Path, trouble: str = "") -> tuple[Path | str | None, list[str]]:
    """(the checkpoint to resume from, or the error; the files that this rank read as its share)."""
    group = own_group()
    read, verify, bytes_of = [], store.verify_content, Path.read_bytes
    failures = [FileNotFoundError(errno.ENOENT, "No such file")] if trouble == "late" and group.rank == 1 else []

    def noted(path: Path, expected: Any) -> None:
        read.append(path.name)
        verify(path, {"sha256": "other"} if trouble == "stale" and group.rank == 1 else expected)

    def late(self: Path) -> bytes:
        if failures:
            raise failures.pop()
        return bytes_of(self)

    store.verify_content, Path.read_bytes, store.READ_WAIT_SECONDS = noted, late, 0.0
    try:
        return latest_checkpoint(folder, group), read
    except MachineError as error:
        return str(error), read


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two checkpoints of two and of three ranks, which nobody writes to."""
    folders = {ranks: tmp_path_factory.mktemp("saved") for ranks in (2, 3)}
    for ranks, folder in folders.items():
        run_workers(ranks, save_two_checkpoints, folder)
    return folders


@pytest.mark.parametrize("damaged", ["", "rank-00001-of-00003.safetensors", "state.json"])
def test_each_rank_verifies_its_own_file(saved: dict[int, Path], tmp_path: Path, damaged: str) -> None:
    shutil.copytree(saved[3], tmp_path, dirs_exist_ok=True)
    if damaged:
        path = tmp_path / "step-00000002" / damaged
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    found = run_workers(3, find_newest_and_note_reads, tmp_path)
    newest = "step-00000001" if damaged else "step-00000002"
    assert [checkpoint for checkpoint, _ in found] == [tmp_path / newest] * 3
    for rank, (_, read) in enumerate(found):
        assert read == [writing.shard_name(Alone(rank, 3)), *(["state.json"] if rank == 0 else [])]
    assert (tmp_path / "damaged-step-00000002").is_dir() == bool(damaged)


def test_a_manifest_that_another_machine_sees_later_is_no_damage(saved: dict[int, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[2], tmp_path, dirs_exist_ok=True)
    found = run_workers(2, find_newest_and_note_reads, tmp_path, "late")
    assert [checkpoint for checkpoint, _ in found] == [tmp_path / "step-00000002"] * 2


def test_a_checkpoint_that_only_one_machine_reads_as_damaged_is_kept(saved: dict[int, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[2], tmp_path, dirs_exist_ok=True)
    for error, _ in run_workers(2, find_newest_and_note_reads, tmp_path, "stale"):
        assert "rank-00001-of-00002.safetensors: its SHA-256 differs" in str(error)
        assert str(error).endswith("Another machine reads the file correctly: check the storage.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def save_two_checkpoints(folder: Path) -> None:
    group = own_group()
    for step in (1, 2):
        held = [Held("a", 2 * group.rank, {"weight": torch.full((2,), 1.0 * step)})]
        writing.save(folder, step, held, {"step": step, "shapes": {"a": [6]}}, group)


def test_only_the_rank_that_writes_the_manifest_receives_the_others_pieces(tmp_path: Path) -> None:
    (first, error), *others = run_workers(3, save_and_count_bytes, tmp_path)
    assert first > 3 * 200 * 10
    assert all(received < 1000 for received, _ in others)
    assert "worker 1: TypeError" in error
    assert [error] * 2 == [theirs for _, theirs in others]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert all(len(weights) == 6 for weights in store.read_weights(tmp_path / "step-00000001").values())


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 2 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_keeps_what_was_good(small_disk: Path) -> None:
    good = save(small_disk, 1)
    large = [Held("a", 0, {"weight": torch.zeros(1 << 20)})]
    with pytest.raises(MachineError, match=r"disk full \(0\.00 GB free\).*free some space"):
        writing.save(small_disk, 2, large, {"step": 2, "shapes": {"a": [1 << 20]}}, Alone())
    assert [path.name for path in small_disk.iterdir()] == [good.name]
    verify_manifest(good)


@pytest.mark.parametrize("seed", range(20))
def test_a_disk_that_fills_up_at_any_byte_keeps_what_was_good(small_disk: Path, monkeypatch, seed: int) -> None:
    """The free space varies from 0 to just below the checkpoint's size, so the write can fail in any of its files."""
    rng = random.Random(seed)
    numel = 1 << 17
    held = [Held("a", 0, {"weight": torch.zeros(numel), "exp_avg": torch.zeros(numel)})]
    state = {"step": 2, "shapes": {"a": [numel]}}
    good, tried = save(small_disk, 1), writing.save(small_disk, 2, held, state, Alone())
    needed = sum(-(-path.stat().st_size // 4096) * 4096 for path in tried.iterdir())
    shutil.rmtree(tried)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "ballast").write_bytes(bytes(free - rng.randrange(0, needed, 4096)))
    monkeypatch.setattr(writing, "check_storage", lambda path, needed: None)
    with pytest.raises(MachineError, match="disk full"):
        writing.save(small_disk, 2, held, state, Alone())
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", good.name]
    assert store.latest(small_disk) == good
    (small_disk / "ballast").unlink()
    assert store.latest(small_disk) == good
    assert writing.save(small_disk, 2, held, state, Alone()) == tried


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write here"):
        save(tmp_path / "file" / "checkpoints", 1)


def damage(checkpoint: Path, seed: int) -> str:
    """Damage one file of a checkpoint in ways that disks and people do; returns a description."""
    rng = random.Random(seed)
    if seed == 0:  # one flipped bit, 0 to 1, that leaves valid JSON and the files' right hashes
        path = checkpoint / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["fragments"][0]["start"] ^= 1
        path.write_text(json.dumps(manifest))
        return "a number in the manifest"
    path = rng.choice(sorted(checkpoint.iterdir()))
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "remove", "garbage", "grow"])
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "garbage":
        data = bytearray(rng.randbytes(len(data)))
    elif kind == "grow":
        data += b"x"
    path.write_bytes(data)
    if kind == "remove":
        path.unlink()
    return f"{kind} {path.name}"


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_is_noticed_and_the_checkpoint_before_taken(tmp_path: Path, seed: int, caplog) -> None:
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    what = damage(bad, seed)
    with caplog.at_level("WARNING"):
        assert store.latest(tmp_path) == good, what
        assert bad.exists(), "only the run itself may rename"
        assert store.latest(tmp_path, set_aside=True) == good, what
    assert not store.list_checkpoints(tmp_path)[1:]
    assert (tmp_path / "damaged-step-00000020").is_dir()
    assert store.damaged_after(good) == ["damaged-step-00000020"]
    assert store.damaged_after(save(tmp_path, 20)) == []
    assert "step-00000020" in caplog.text
    assert "Trying the checkpoint before it" in caplog.text


# ---- the list of fragments in a manifest: short, and every part of it is found


KINDS = ["weight", "exp_avg"]


def files(ranks: int) -> list[str]:
    return [f"rank-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]


def entry(name: str, start: int, stop: int, rank: int) -> dict[str, Any]:
    return {"name": name, "start": start, "numel": stop - start, "kinds": KINDS, "rank": rank}


def cut_equally(name: str, numel: int, ranks: int) -> list[dict[str, Any]]:
    part = -(-numel // ranks)
    bounds = [(part * rank, min(numel, part * (rank + 1))) for rank in range(ranks)]
    return [entry(name, start, stop, rank) for rank, (start, stop) in enumerate(bounds) if start < stop]


@pytest.mark.parametrize("ranks", [1, 8, 1024])
def test_equal_parts_are_one_entry(ranks: int) -> None:
    names = [f"layers.{number}" for number in range(10)]
    shards = [cut_equally(name, 100_001, ranks) for name in names]
    listed = merge_entries(itertools.chain(*zip(*shards, strict=True)))
    assert len(listed) <= 2 * len(names), "the parts, and the shorter last one"


def test_any_range_is_found_whatever_the_fragments() -> None:
    choose = random.Random(0)
    for _ in range(300):
        ranks, numel = choose.randint(1, 9), choose.randint(1, 60)
        cuts = sorted({0, numel, *(choose.randint(1, numel) for _ in range(choose.randint(0, 6)))})
        uneven = [entry("a", a, b, choose.randrange(ranks)) for a, b in itertools.pairwise(cuts)]
        for fragments in (uneven, cut_equally("a", numel, ranks)):
            choose.shuffle(fragments)
            index = FragmentIndex(merge_entries(fragments), files(ranks))
            start = choose.randrange(numel)
            stop = choose.randint(start + 1, numel)
            found = list(index.covering("exp_avg", "a", start, stop))
            expected = sorted(
                (p["start"], p["start"] + p["numel"], files(ranks)[p["rank"]])
                for p in fragments
                if p["start"] < stop and p["start"] + p["numel"] > start
            )
            assert [tuple(fragment) for fragment in found] == expected


def test_another_name_or_kind_has_no_fragments() -> None:
    index = FragmentIndex(merge_entries([entry("a", 0, 5, 0)]), files(1))
    assert not list(index.covering("weight", "b", 0, 5))
    assert not list(index.covering("average", "a", 0, 5))


def test_parts_on_other_ranks_in_turn_are_not_joined() -> None:
    fragments = [entry("a", 0, 5, 0), entry("a", 5, 10, 2), entry("a", 10, 15, 3), entry("b", 15, 20, 4)]
    assert [(run["start"], run.get("parts", 1)) for run in merge_entries(fragments)] == [(0, 1), (5, 2), (15, 1)]
