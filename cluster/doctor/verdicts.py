"""What one machine has, judged: nothing is measured here, so that made values can be judged too."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping

from cluster.doctor.machine import GIB, NONE, Device, Disk, Facts
from cluster.doctor.rows import FAIL, PASS, WARN, Row, above, below
from pretrain.model.precision import is_faster_in_fp32

_BUSY = 0.25
_NEEDED = ("torch", "gloo", "DeepSpeed", "Ray", "bertrain")


def rows_here(facts: Facts) -> list[Row]:
    """What there is to say of this machine alone, in the order of the table."""
    return [Row("system", facts.system), *judge_versions(facts.versions), *rows(facts)]


def rows(facts: Facts, where: str = "") -> list[Row]:
    """What can differ from node to node; versions are compared elsewhere."""
    found = [
        judge_cores(facts.cores, facts.busy),
        judge_memory(facts.memory, facts.memory_free),
        *map(judge_disk, facts.disks),
        judge_compiler(facts.compiler, facts.headers, facts.compile_error),
        judge_ops(facts.ops, facts.built_ops, facts.old_locks),
        judge_gpus(facts.gpu_files, facts.gpus, facts.versions, facts.visible),
        *map(judge_matmul, facts.devices),
        *([judge_loader(facts.sequences_per_second, facts.devices)] if facts.devices else []),
    ]
    return [Row(row.what, row.found, row.mark, row.advice, where) for row in found]


def judge_versions(found: Mapping[str, str]) -> list[Row]:
    """A row for each library: there, or not."""
    advice = "Run ./launch.sh doctor, which sets up .venv; where it has, remove .venv and run it again."
    rows = []
    for name, version in found.items():
        if name == "Python":
            right = (3, 10) <= tuple(map(int, version.split(".")[:2])) < (3, 14)
            rows.append(Row(name, version, PASS if right else FAIL, "Use Python 3.10 to 3.13."))
        else:
            lacks = name in _NEEDED and version.startswith(NONE)
            rows.append(Row(name, version, FAIL if lacks else PASS, advice))
    return rows


def judge_cores(cores: int, busy: float) -> Row:
    advice = "Other programs are at work here: what is measured below is less than this machine can do."
    return Row("cores", f"{cores}, {busy:.0%} busy", above(busy, _BUSY, 1.0), advice)


def judge_memory(total: int, free: int) -> Row:
    mark = below(free, 4 * GIB, GIB)
    advice = "Under 4 GiB is little even for a small model; close other programs."
    return Row("memory", f"{total / GIB:.0f} GiB, {free / GIB:.1f} free", mark, advice)


def judge_disk(disk: Disk) -> Row:
    other = {
        "disk": "or work in another folder",
        "disk, temporary": "or set TMPDIR to another folder",
        "shared memory": "or give the container more (docker run --shm-size)",
    }[disk.what]
    advice = f"Free {disk.wanted / GIB:g} GiB, {other}."
    mark = below(disk.free, disk.wanted, disk.least)
    return Row(disk.what, f"{disk.free / GIB:.1f} GiB free on {disk.path}", mark, advice)


def judge_compiler(compiler: str, headers: str, error: str) -> Row:
    rest = ", or set engine.compile: false."
    if not compiler:
        return Row("C++ compiler", NONE, FAIL, f"Install g++ (apt-get install g++){rest}")
    if not headers:
        advice = f"torch.compile needs Python.h (apt-get install python3-dev){rest}"
        return Row("C++ compiler", f"{compiler}, but no Python.h", FAIL, advice)
    if error:
        return Row("C++ compiler", f"{compiler} makes no extension: {error}", FAIL, f"Mend it{rest}")
    return Row("C++ compiler", f"{compiler} makes an extension for Python")


def judge_ops(ops: Mapping[str, bool], built: tuple[str, ...], old_locks: tuple[str, ...]) -> Row:
    """DeepSpeed's compiled ops. We need none; `engine.deepspeed` may ask for some, which are compiled then."""
    could = [name for name, can in ops.items() if can]
    found = f"{len(built)} of {len(ops)} built, {len(could)} can be compiled here; our engine needs none"
    if not ops:
        return Row("DeepSpeed ops", "not known: DeepSpeed cannot be imported", WARN, "See the row of DeepSpeed.")
    if old_locks:
        advice = f"Remove {old_locks[0]}, if nothing compiles there: whatever needs that op waits for it for ever."
        return Row("DeepSpeed ops", f"{found}; {len(old_locks)} compilations were left unfinished", WARN, advice)
    return Row("DeepSpeed ops", found)


def judge_gpus(files: int, count: int, found: Mapping[str, str], visible: str | None) -> Row:
    """Whether torch sees (`count`) the GPUs that the driver shows (`files`), and can join them."""
    if count and found["NCCL"] == NONE:
        return Row("GPUs", f"{count}, but torch has no NCCL", FAIL, "Install a torch with NCCL.")
    if count:
        return Row("GPUs", str(count))
    if not files:
        return Row("GPUs", "none: workers train on the CPU")
    if visible is not None:
        return Row("GPUs", f"{files}, hidden by CUDA_VISIBLE_DEVICES={visible}", WARN, "Unset it to train on them.")
    advice = (
        f"This torch ({found['torch']}) is made for CPUs; install one for CUDA."
        if found["CUDA"] == NONE
        else f"The driver does not serve CUDA {found['CUDA']} (nvidia-smi tells which it does): renew it."
    )
    return Row("GPUs", f"{files} that torch cannot use", FAIL, advice)


def judge_matmul(device: Device) -> Row:
    found = f"{device.bf16 / 1e9:,.0f} GFLOP/s in bf16, {device.fp32 / 1e9:,.0f} in fp32"
    slow = is_faster_in_fp32(device.bf16, device.fp32)
    advice = "Faster in fp32 than in bf16: engine.precision: auto trains in fp32 here; leave bf16 out of the config."
    return Row("matmul", f"{found} ({device.name})", WARN if slow else PASS, advice)


def judge_loader(rate: float, devices: tuple[Device, ...]) -> Row:
    """Batches of one worker against what its device could take of BERT-Base, if it did nothing but matrix products."""
    wanted = max(max(device.bf16, device.fp32) for device in devices) / _flops_per_sequence()
    found = f"{rate:,.0f} sequences/s of 128 for one worker"
    advice = f"A worker could take {wanted:,.0f} of BERT-Base: faster cores are needed, or other programs closed."
    return Row("loader", found, WARN if rate < wanted else PASS, advice)


def _flops_per_sequence() -> float:
    from pretrain.bench.loader import VOCABULARY_SIZE
    from pretrain.config import Corpus, Model, Phase, RunConfig
    from pretrain.estimate import executed_flops

    phase = Phase(sequence_length=128, global_sequences=1, steps=1, peak_learning_rate=1e-4)
    config = RunConfig(name="doctor", corpus=Corpus(dir="nowhere"), model=Model(size="base"), phases=(phase,))
    return executed_flops(config, VOCABULARY_SIZE, [128], round(0.15 * 128))


def wandb_key() -> Row:
    key = "present" if _has_wandb_key() else f"{NONE}: runs are recorded offline, `wandb sync` sends them later"
    return Row("W&B key", key)


def _has_wandb_key() -> bool:
    """Whether wandb would find a key in the environment or in netrc. The key itself is never read out."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return "api.wandb.ai" in netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
