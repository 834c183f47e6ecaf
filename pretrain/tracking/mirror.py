"""A run's records in W&B, in a thread of their own."""

from __future__ import annotations

import logging
import netrc
import os
import queue
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pretrain.common.errors import InputError
from pretrain.config import RunConfig

_log = logging.getLogger(__name__)

# Our field -> the name that users of the HF Trainer and of Composer look for in W&B. What is not named here
# goes under train/ (or eval/) by its own name.
_WANDB_TRAIN = {
    "step": "train/global_step",
    "lr": "train/learning_rate",
    "tokens": "train/num_input_tokens_seen",
    "samples": "time/sample",
    "seconds": "time/train",
    "tokens_per_second": "throughput/tokens_per_sec",
    "mfu": "throughput/device/mfu",
    "data_stall_fraction": "throughput/data_stall_fraction",
    "memory_bytes": "memory/peak_allocated_bytes",
}
_WANDB_EVALUATION = {"step": "train/global_step", "epoch": "train/epoch", "seconds": "eval/runtime"}

# For W&B to answer at all; then the run is kept offline. It blocks nobody meanwhile.
_INIT_SECONDS = 10.0
# For the last records to be uploaded at the end; what is left then, `wandb sync` sends later.
_FINISH_SECONDS = 30.0
# For W&B's process to end after that; it gives itself 10 s.
_TEARDOWN_SECONDS = 12.0


def wandb_names(record: dict[str, Any]) -> dict[str, Any]:
    """The record under the names of the HF Trainer and Composer; x axis is train/global_step.

    A list, with a number for each rank, becomes a name for each. An event becomes its rank, or 1, under its kind.
    """
    if "event" in record:
        named = {_WANDB_TRAIN["step"]: record.get("step"), f"events/{record['event']}": record.get("rank", 1)}
        return {**named, "events/message": record.get("message", "")}
    evaluation = "split" in record
    names, section = (_WANDB_EVALUATION, "eval") if evaluation else (_WANDB_TRAIN, "train")
    named = {names.get(key, f"{section}/{key}"): value for key, value in record.items() if key != "split"}
    for name in [name for name, value in named.items() if isinstance(value, list)]:
        named.update({f"{name}/{number}": one for number, one in enumerate(named.pop(name))})
    return named


def wandb_mode(mode: str) -> str:
    """online, offline or off for `tracking.wandb`; `auto` obeys WANDB_MODE and otherwise goes online with a key."""
    if mode == "auto":
        asked = os.environ.get("WANDB_MODE", "")
        if asked in ("disabled", "dryrun", "offline"):
            return "off" if asked == "disabled" else "offline"
        return "online" if _wandb_key_set() else "offline"
    if mode == "online" and not _wandb_key_set():
        raise InputError(
            "tracking.wandb: online, but no W&B key is set. "
            "Set WANDB_API_KEY, run `wandb login`, or choose tracking.wandb: offline."
        )
    return mode


def wandb_entity() -> str:
    """Whose runs these are: WANDB_ENTITY, or what W&B has as the default of the key's owner."""
    import wandb

    return os.environ.get("WANDB_ENTITY") or wandb.Api(timeout=round(_INIT_SECONDS)).default_entity or ""


def _wandb_key_set() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    # `wandb login` keeps the key in ~/.netrc, under the name of its server.
    server = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    try:
        host = urlsplit(server).hostname or ""
    except ValueError:
        raise InputError(f"WANDB_BASE_URL: {server!r} is no URL. Correct or unset it.") from None
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_arguments(
    config: RunConfig, run_dir: Path, run_id: str, card: dict[str, Any], job_type: str
) -> dict[str, Any]:
    return {
        "project": config.tracking.project,
        "id": run_id,
        "name": run_id,
        "group": config.tracking.group or config.name,
        "job_type": job_type,
        "tags": list(config.tracking.tags),
        "dir": str(run_dir),
        "config": {**config.model_dump(mode="json"), **card},
    }


class WandbMirror:
    """All of W&B in one thread of its own: whatever its network does, training only puts into a queue."""

    def __init__(self, mode: str, arguments: dict[str, Any]) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._patience = _TEARDOWN_SECONDS
        if mode == "online":
            self._patience += _INIT_SECONDS + _FINISH_SECONDS
        self._thread = threading.Thread(target=self._run, args=(mode, arguments), name="wandb", daemon=True)
        self._thread.start()

    def log(self, values: dict[str, Any]) -> None:
        self._queue.put(("log", values))

    def log_artifact(self, folder: Path, name: str) -> None:
        self._queue.put(("artifact", (folder, name)))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(self._patience)

    def _run(self, mode: str, arguments: dict[str, Any]) -> None:
        try:
            run = _start_wandb(mode, arguments)
            while (item := self._queue.get()) is not None:
                kind, value = item
                if kind == "log":
                    run.log(value)
                else:
                    _log_wandb_artifact(run, *value)
            _finish_wandb(run)
        except Exception:
            # The mirror is a convenience; metrics.jsonl has everything, so training goes on without it.
            _log.exception("W&B stopped; metrics.jsonl goes on. See %s/wandb", arguments["dir"])


def _start_wandb(mode: str, arguments: dict[str, Any]) -> Any:
    """A W&B run; one that cannot reach the server in `_INIT_SECONDS` is kept offline instead."""
    # `Settings.silent` alone comes too late for the line about credentials.
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=_INIT_SECONDS,
        finish_timeout=_FINISH_SECONDS,
        x_transaction_log_flush_interval=1,  # with the default of 15 s a kill loses the last records
    )
    run = None
    if mode == "online":
        try:
            run = wandb.init(**arguments, mode="online", resume="allow", settings=settings)
        except Exception as error:
            _log.warning("W&B cannot be reached, going on offline: %s", error)
            wandb.teardown()  # otherwise the failed attempt keeps the id in use
    if run is None:
        run = wandb.init(**arguments, mode="offline", settings=settings)
    run.define_metric("*", step_metric="train/global_step")
    return run


def _log_wandb_artifact(run: Any, folder: Path, name: str) -> None:
    import wandb

    artifact = wandb.Artifact(name, type="model")
    artifact.add_dir(str(folder), skip_cache=True, policy="immutable")  # by reference: no second copy on disk
    run.log_artifact(artifact, aliases=["final_model"])


def _finish_wandb(run: Any) -> None:
    import wandb

    run.finish()
    # W&B's own process writes the file; without this a killed worker could still lose the end of it.
    wandb.teardown()
