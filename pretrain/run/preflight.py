"""Checks a run before it starts, and records its config and environment in its folder."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pretrain.common.errors import InputError, version_mismatch
from pretrain.common.extensions import module_hashes
from pretrain.common.files import MANIFEST, atomic_open, checkpoint_names, locked, verify_manifest, write_json
from pretrain.common.run_files import CONFIG_FILE, ENVIRONMENT_FILE
from pretrain.common.settings import dump, load_recorded
from pretrain.config import ConfigT, CorpusConfig, PretrainConfig, RunConfig, VocabularyConfig, keep_precision

# (old config, new config, steps done) -> the changed settings that a resumed run must not change.
FindChanged = Callable[[ConfigT, ConfigT, int], list[str]]
_PACKAGES = ("bertrain", "torch", "deepspeed", "ray", "tokenizers", "transformers", "numpy", "pydantic", "wandb")


def check_corpus(config: PretrainConfig) -> None:
    """Open the corpus and compare its sources and vocabulary with the config.

    Raises:
        InputError: the corpus is missing or damaged, was prepared with other source weights or another vocabulary, or
            lacks a source for which a phase sets a weight.
    """
    from pretrain.corpus.manifest import source_name
    from pretrain.corpus.shards import verify_shards
    from pretrain.corpus.stored import fetch_corpus, is_streamed, open_corpus

    folder = fetch_corpus(config.corpus)
    shards = open_corpus(config.corpus, "train", needs_tokens=False)
    num_entries = shards.vocabulary_size
    weights = {source_name(source): source.weight for source in config.corpus.sources}
    old_weights = {source["name"]: source["weight"] for source in shards.sources if source.get("name") in weights}
    if missing := [name for name in weights if name not in old_weights]:
        raise InputError(f"{folder}: has no source {missing[0]}. Run `prepare` again; it adds sources to the corpus.")
    if weights != old_weights:
        raise InputError(
            f"{folder}: was prepared with source weights {old_weights}, but the config has {weights}. "
            "Run `prepare` again; it keeps the tokens and updates the weights."
        )
    for index, phase in enumerate(config.phases):
        shards.weights(phase.weights, f"phases.{index}.weights")
    if not is_streamed(config.corpus):  # a streamed corpus is verified block by block, when it is read
        verify_shards(folder)
    if config.adaptation.replay_corpus and not open_corpus(config.corpus, "validation").shards:
        print(
            f"warning: adaptation.replay_corpus is not evaluated, since {folder} has no held-out text. Prepare it with "
            "a corpus.validation_fraction above 0.",
            file=sys.stderr,
        )
    vocabulary = config.corpus.vocabulary
    advice = "Prepare into another corpus.dir, or set corpus.vocabulary to the vocabulary that was used."
    # A small corpus yields fewer entries than the config allows, never more.
    if not vocabulary.path and num_entries > vocabulary.size:
        raise InputError(f"{folder}: has {num_entries} vocabulary entries; the config has {vocabulary.size}. {advice}")
    if 0 < config.model.vocabulary_rows < num_entries:
        raise InputError(
            f"model.vocabulary_rows: {config.model.vocabulary_rows}, but the vocabulary of {folder} has {num_entries} "
            "entries. Set at least as many, or 0."
        )
    if vocabulary.path and Path(vocabulary.path).expanduser().exists():
        _check_vocabulary(folder, config.corpus, advice)
    _check_case(folder, vocabulary, advice)


def locked_run(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """Lock the run folder; raises `InputError` if another process holds the lock."""
    return locked(
        folder / ".lock",
        f"{folder}: another process is training in it. Wait for it, stop it, or choose another name or run_dir.",
    )


def recorded_config(config: ConfigT) -> ConfigT | None:
    """Read the config that an earlier start recorded in the run's folder; None before the first start."""
    path = config.folder / CONFIG_FILE
    return load_recorded(path, type(config)) if path.is_file() else None


def config_of_checkpoint(config_type: type[ConfigT], state: Mapping[str, Any], checkpoint: Path) -> ConfigT:
    """Return the config in a checkpoint's state. Raises `InputError` if another version of bertrain wrote it."""
    try:
        return config_type.model_validate(state["config"])
    except ValidationError:
        raise InputError(version_mismatch(checkpoint, "Train again.")) from None


@contextlib.contextmanager
def checked_run_folder(
    config: ConfigT, old_config: ConfigT | None, find_changed: FindChanged[ConfigT], *, resume: bool
) -> Iterator[ConfigT]:
    """Lock the run folder, and check W&B's names and the folder's checkpoints, which must match this config.

    Args:
        config: config of the run.
        old_config: the `recorded_config` of a run that resumes; None for a new run.
        resume: whether to continue from the latest checkpoint, if there is one.

    Yields the config; if the run resumes, with the precision that an earlier start resolved.

    Raises:
        InputError: W&B would reject a name; another process trains in the folder; the folder is not writable, has a
            config.yaml that no run wrote, or has checkpoints although `resume` is off; or a resumed run's config
            changes which samples are used or how they are weighted.
    """
    config.tracking.check_names()
    folder = config.folder
    with locked_run(folder):
        checkpoints = checkpoint_names(folder)
        if checkpoints and not resume:
            raise InputError(
                f"{folder}: already has checkpoints (latest {checkpoints[-1]}). Add --resume to "
                "continue that run, or choose another name or run_dir to start a new one."
            )
        path = folder / CONFIG_FILE
        if path.exists() and not checkpoints and not (folder / ENVIRONMENT_FILE).exists():
            raise InputError(f"{path}: no run wrote it, and it would be overwritten. Choose another name or run_dir.")
        if old_config is not None and checkpoints:
            check_unchanged(path, old_config, config, int(checkpoints[-1].removeprefix("step-")), find_changed)
        yield config if old_config is None else keep_precision(config, old_config)


def check_unchanged(path: Path, old: ConfigT, config: ConfigT, steps: int, find_changed: FindChanged[ConfigT]) -> None:
    """Raise `InputError` if `config` changes settings of the `old` config, from `path`, that a resume must keep."""
    if differing := find_changed(old, config, steps):
        raise InputError(
            f"{path}: the run was started with other settings: {', '.join(differing)}. "
            "Resume with the old values, or choose another name or run_dir to start a new run."
        )


def is_finished(config: PretrainConfig) -> bool:
    """Return whether the run folder has an intact checkpoint of the last step."""
    last = config.folder / "checkpoints" / f"step-{config.total_steps:08d}"
    if not (last / MANIFEST).is_file():
        return False
    with contextlib.suppress(InputError, OSError):  # a resumed run reports the error
        verify_manifest(last)
        return True
    return False


def run_state(folder: Path, *, finished: bool) -> str:
    """Describe the state of the run folder, for a dry run."""
    if finished:
        return "finished already"
    checkpoints = checkpoint_names(folder)
    return f"has checkpoints (latest {checkpoints[-1]}); --resume continues the run" if checkpoints else "new"


def with_resolved_precision(config: ConfigT) -> ConfigT:
    """Return `config` with the precision that an earlier start in its run folder resolved (`keep_precision`)."""
    old_config = recorded_config(config)
    return keep_precision(config, old_config) if old_config else config


def record_config(config: RunConfig) -> None:
    """Write the config into the run folder."""
    text = dump(config)
    with atomic_open(config.folder / CONFIG_FILE, "w") as file:
        file.write(text)


def record_run(config: RunConfig, command: Sequence[str]) -> None:
    """Write the resolved config and the environment into the run folder; warn about changed custom modules."""
    record_config(config)
    path, hashes = config.folder / ENVIRONMENT_FILE, module_hashes()
    resumes = checkpoint_names(config.folder) and path.is_file()
    old_hashes = json.loads(path.read_text(encoding="utf-8")).get("modules", {}) if resumes else {}
    if changed := [name for name, digest in hashes.items() if old_hashes.get(name, digest) != digest]:
        print(f"warning: {', '.join(changed)}: changed since the run was last started.", file=sys.stderr)
    write_json(path, {**environment(command), **({"modules": hashes} if hashes else {})})


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Return the versions, machine and command line of this run, for environment.json."""
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "working_dir": str(Path.cwd()),
        "git_commit": _git_commit(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _proc_value(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [_proc_value(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))],
    }


def _check_vocabulary(folder: Path, corpus: CorpusConfig, advice: str) -> None:
    """Raise `InputError` if the vocabulary of the corpus in `folder` is not the one that the config names."""
    from pretrain.corpus.description import configured_tokenizer
    from pretrain.corpus.vocabulary import entries_of, read_vocabulary

    tokenizer, actual = configured_tokenizer(corpus), read_vocabulary(folder / "vocab.txt")
    if tokenizer and (expected := entries_of(tokenizer)) != actual:
        raise InputError(
            f"{folder}: its vocabulary ({len(actual)} entries) is not {corpus.vocabulary.path} ({len(expected)} "
            f"entries). {advice}"
        )


def _check_case(folder: Path, vocabulary: VocabularyConfig, advice: str) -> None:
    """Raise `InputError` if the corpus's casing differs from the config's; a tokenizer.json determines its casing."""
    settings = folder / "tokenizer_config.json"
    if vocabulary.path.endswith(".json") or vocabulary.kind == "released" or not settings.exists():
        return
    recorded = json.loads(settings.read_text(encoding="utf-8"))
    lowercase, accents = recorded.get("do_lower_case", vocabulary.lowercase), recorded.get("strip_accents")
    for name, actual in (("lowercase", lowercase), ("strip_accents", lowercase if accents is None else accents)):
        if (expected := getattr(vocabulary, name)) not in (None, actual):
            raise InputError(
                f"{folder}: its vocabulary was created with {name}: {json.dumps(actual)}; the config has "
                f"{json.dumps(expected)}. {advice}"
            )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Return the commit of the running code, with `-dirty` if files were changed; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _proc_value(path: Path, key: str) -> str | None:
    """Return the value of the first `key : value` line of a file under /proc."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
