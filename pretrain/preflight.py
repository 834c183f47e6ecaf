"""What is settled in the driver before a worker starts: is the run possible, is it new, what is it."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, atomic_open, disk_errors, locked, verify_manifest, write_json
from pretrain.common.settings import dump, load
from pretrain.config import PretrainConfig, R, RunConfig, VocabularyConfig
from pretrain.config import as_begun as config_as_begun

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"

_PACKAGES = (
    "bertrain",
    "torch",
    "deepspeed",
    "ray",
    "tokenizers",
    "transformers",
    "numpy",
    "pydantic",
    "wandb",
)


def check_corpus(config: PretrainConfig) -> None:
    """Open the corpus and compare its vocabulary with what the config asks for.

    Raises:
        InputError: the corpus is missing, damaged, or made with another vocabulary.
    """
    from pretrain.corpus.shards import open_shards, verify_shards

    folder = Path(config.corpus.dir)
    shards = open_shards(folder, "train")
    size = shards.vocabulary_size
    weights, made = ([s.weight for s in config.corpus.sources], [s["weight"] for s in shards.sources])
    if weights and weights != made:
        raise InputError(
            f"{folder}: was prepared with the weights {made} of its sources; the config has {weights}. "
            "Run `prepare` again: it keeps the tokens and takes over the weights."
        )
    verify_shards(folder)
    asked = config.corpus.vocabulary
    advice = "Prepare into another corpus.dir, or set corpus.vocabulary to what was used."
    # A small corpus trains fewer entries than asked for, never more.
    if not asked.path and size > asked.size:
        found = f"{size} vocabulary entries; the config asks for {asked.size}"
        raise InputError(f"{folder}: has {found}. {advice}")
    given = Path(asked.path).expanduser()
    if asked.path and given.exists():
        wanted, found = _entries(given), _entries(folder / "vocab.txt")
        if wanted != found:
            raise InputError(
                f"{folder}: its vocabulary ({len(found)} entries) is not {asked.path} ({len(wanted)} entries). {advice}"
            )
    _check_case(folder, asked, advice)


def only_run(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """Hold the run folder for this process; a second one that trains in it is refused with `InputError`."""
    return locked(
        folder / ".lock",
        f"{folder}: another process trains in it. Wait for it or stop it, or choose another name or run_dir.",
    )


def check_run_folder(config: R, resume: bool, changed: Callable[[R, R], list[str]]) -> None:
    """See that the run folder can be written, and that what it holds already agrees with `resume`.

    `changed` names the settings in which a resumed run must not differ from its beginning, but does.

    Raises:
        InputError: it cannot be written; it holds checkpoints and `resume` is off; or a resumed run's config
            differs in more than where and how fast it runs.
    """
    folder = config.folder
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    checkpoints = sorted(path.parent.name for path in folder.glob(f"checkpoints/*/{MANIFEST}"))
    if checkpoints and not resume:
        raise InputError(
            f"{folder}: already holds checkpoints (newest {checkpoints[-1]}). Add --resume to "
            "continue that run, or choose another name or run_dir to begin a new one."
        )
    before = folder / CONFIG_FILE
    if checkpoints and before.exists():
        others = changed(load(before, type(config)), config)
        if others:
            raise InputError(
                f"{before}: the run was begun with other settings: {', '.join(others)}. "
                "Resume with the old values, or choose another name or run_dir to begin a new run."
            )


def is_finished(config: PretrainConfig) -> bool:
    """Whether the run folder holds the checkpoint of the last step, undamaged."""
    last = config.folder / "checkpoints" / f"step-{config.total_steps:08d}"
    if not (last / MANIFEST).is_file():
        return False
    with contextlib.suppress(InputError):
        verify_manifest(last)
        return True
    return False


def as_begun(config: R) -> R:
    """`config` with what an earlier start in its run folder settled (`pretrain.config.as_begun`)."""
    before = config.folder / CONFIG_FILE
    return config_as_begun(config, load(before, type(config))) if before.is_file() else config


def record_config(config: RunConfig) -> None:
    """Write the config into the run folder."""
    with atomic_open(config.folder / CONFIG_FILE, "w") as file:
        file.write(dump(config))


def record_run(config: RunConfig, command: Sequence[str]) -> None:
    """Write the resolved config and the environment into the run folder."""
    record_config(config)
    write_json(config.folder / ENVIRONMENT_FILE, environment(command))


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Versions, machine and command line of this run."""
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "working_dir": str(Path.cwd()),
        "git_commit": _git_commit(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _line_of(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [_line_of(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))],
    }


def _entries(path: Path) -> list[str]:
    """The entries of a vocab.txt or tokenizer.json, or of a folder with one, in the order of their ids."""
    from pretrain.corpus.vocabulary import split_entries

    if path.is_dir():
        path /= "tokenizer.json" if (path / "tokenizer.json").exists() else "vocab.txt"
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return split_entries(text)
        vocabulary: dict[str, int] = json.loads(text)["model"]["vocab"]
        return sorted(vocabulary, key=vocabulary.__getitem__)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as a vocabulary ({error}).") from None


def _check_case(folder: Path, asked: VocabularyConfig, advice: str) -> None:
    """Cased text must not meet an uncased vocabulary; a tokenizer taken over whole keeps its own case."""
    settings = folder / "tokenizer_config.json"
    if asked.path.endswith(".json") or not settings.exists():
        return
    lowercase = json.loads(settings.read_text(encoding="utf-8")).get("do_lower_case", asked.lowercase)
    if lowercase != asked.lowercase:
        made, wanted = ("uncased" if lower else "cased" for lower in (lowercase, asked.lowercase))
        raise InputError(f"{folder}: its vocabulary is {made}; the config asks for a {wanted} one. {advice}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the code that runs, with `-dirty` if it was changed; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _line_of(path: Path, key: str) -> str | None:
    """The value of the first `key : value` line of a file under /proc."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
