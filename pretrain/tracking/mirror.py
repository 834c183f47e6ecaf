"""Mirrors a run's records to W&B, in a background thread."""

import logging
import netrc
import os
import queue
import secrets
import statistics
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pretrain.common.errors import InputError
from pretrain.common.packages import is_installed
from pretrain.common.run_files import read_fork
from pretrain.config import RunConfig
from pretrain.tracking.rows import MESSAGE, PROBE_STEP, MetricRows

_log = logging.getLogger(__name__)

# {field of a record: its W&B name, as in the HF Trainer and Composer}. Other fields keep their names, with the prefix
# train/ or eval/.
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

_MAX_RANKS = 16  # maximum number of ranks with separate metrics in W&B
MAX_RANK_SUFFIX = "max_rank"
"""Suffix of the metric that is the index of the rank with the largest value; exists only if there are many ranks."""

MAX_NAME_LENGTH = 55
"""Maximum number of characters of a run's name in its generated W&B id; W&B allows ids of 64 characters."""

# Time limit for connecting to W&B, after which the run is logged offline. Training does not wait.
INIT_SECONDS = 10.0
# Time limit for the last uploads; `wandb sync` can send the rest later.
_FINISH_SECONDS = 30.0
# Time limit for W&B's process to exit after the uploads; W&B itself allows 10 s.
TEARDOWN_SECONDS = 12.0


def wandb_names(record: dict[str, Any]) -> dict[str, Any]:
    """Rename a record's fields to the metric names of the HF Trainer and Composer; the x axis is train/global_step.

    A list of values per rank becomes one metric per rank or, if there are many ranks, the minimum, median, maximum and
    the rank of the maximum. An event becomes a metric named after its kind; the value is its rank, or 1 without a rank.
    """
    if "event" in record:
        renamed = {_WANDB_TRAIN["step"]: record.get("step"), f"events/{record['event']}": record.get("rank", 1)}
        return {**renamed, MESSAGE: record.get("message", "")}
    by_split = {"": (_WANDB_TRAIN, "train"), "probe": ({}, "probe")}
    names, section = by_split.get(record.get("split", ""), (_WANDB_EVALUATION, "eval"))
    renamed = {names.get(key, f"{section}/{key}"): value for key, value in record.items() if key != "split"}
    for name in [name for name, value in renamed.items() if isinstance(value, list)]:
        renamed.update({f"{name}/{key}": value for key, value in _summarize_ranks(renamed.pop(name)).items()})
    return renamed


def _summarize_ranks(values: list[float | None]) -> dict[int | str, float | None]:
    sorted_values = sorted(value for value in values if value is not None)
    if len(values) <= _MAX_RANKS or not sorted_values:
        return dict(enumerate(values))
    low, high = sorted_values[0], sorted_values[-1]
    return {"min": low, "median": statistics.median(sorted_values), "max": high, MAX_RANK_SUFFIX: values.index(high)}


def wandb_mode(mode: str) -> str:
    """Resolve `tracking.wandb` to online, offline or off. `auto` means WANDB_MODE, by default online with a key."""
    if mode == "auto" and not is_installed("wandb"):
        return "off"
    if mode == "auto":
        requested = os.environ.get("WANDB_MODE", "")
        if requested in ("disabled", "dryrun", "offline"):
            return "off" if requested == "disabled" else "offline"
        return "online" if _has_wandb_key() else "offline"
    if mode == "online" and not _has_wandb_key():
        raise InputError(
            "tracking.wandb: online, but no W&B key is set. "
            "Set WANDB_API_KEY, run `wandb login`, or choose tracking.wandb: offline."
        )
    return mode


def wandb_entity() -> str:
    """Return the W&B entity (user or team) of the runs: WANDB_ENTITY, or the default entity of the key's owner."""
    import wandb

    return os.environ.get("WANDB_ENTITY") or wandb.Api(timeout=round(INIT_SECONDS)).default_entity or ""


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc_file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if not netrc_file.exists():  # checked first: importing W&B takes a second
        return False
    import wandb

    # `wandb login` stores the key in ~/.netrc, under the server's host name.
    server = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    try:
        host = urlsplit(server).hostname or ""
    except ValueError:
        raise InputError(f"WANDB_BASE_URL: {server!r} is not a URL. Correct or unset it.") from None
    try:
        return netrc.netrc(netrc_file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def new_id(config: RunConfig) -> str:
    """Return the W&B id for a new run."""
    return config.tracking.run_id or f"{config.name[:MAX_NAME_LENGTH]}-{secrets.token_hex(4)}"


def wandb_arguments(
    config: RunConfig, run_dir: Path, run_id: str, card: dict[str, Any], job_type: str
) -> dict[str, Any]:
    """Return the arguments of `wandb.init` for a run; `card` is as for `Tracker`."""
    fork = read_fork(run_dir)
    return {
        "project": config.tracking.project,
        "id": run_id,
        "name": run_id,
        "group": config.tracking.group or fork.get("group") or config.name,
        "job_type": job_type,
        "dir": str(run_dir),
        "config": {**config.model_dump(mode="json"), **card, **({"fork": fork} if fork else {})},
    }


class WandbMirror:
    """Sends records to W&B from a background thread. Training only queues them and never waits.

    `rows` merges the records of a step into one row, which is sent in one call.

    Attributes:
        failure: the error that stopped the mirror; "" if there was none.
    """

    def __init__(self, mode: str, arguments: dict[str, Any], rows: MetricRows) -> None:
        self._rows = rows
        self._queue: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self.failure = ""
        self._close_seconds = TEARDOWN_SECONDS
        if mode == "online":
            self._close_seconds += INIT_SECONDS + _FINISH_SECONDS
        self.thread = threading.Thread(target=self._run, args=(mode, arguments), name="wandb", daemon=True)
        self.thread.start()

    def log(self, record: dict[str, Any], row_step: int | None = None) -> None:
        """Queue a record for the row of its step, or of the later step `row_step`."""
        self._queue.put((record["step"] if row_step is None else row_step, record))

    def log_artifact(self, folder: Path, name: str) -> None:
        """Queue a folder as a model artifact."""
        self._queue.put((0, (folder, name)))

    def close(self) -> None:
        """Finish the W&B run; wait a limited time for its uploads."""
        self._queue.put(None)
        self.thread.join(self._close_seconds)

    def _run(self, mode: str, arguments: dict[str, Any]) -> None:
        try:
            run = start_wandb(mode, arguments)
            while (item := self._queue.get()) is not None:
                step, value = item
                if isinstance(value, dict):
                    _send(run, self._rows.add(step, wandb_names(value), is_event="event" in value))
                else:
                    log_wandb_artifact(run, *value)
            _send(run, self._rows.take())
            finish_wandb(run)
        except Exception as error:
            # metrics.jsonl has all records, so training continues without W&B.
            _log.exception("W&B failed; metrics.jsonl continues. See %s/wandb", arguments["dir"])
            self.failure = " ".join(f"{type(error).__name__}: {error}".split())


def start_wandb(mode: str, arguments: dict[str, Any]) -> Any:
    """Start a W&B run, offline if the server does not respond within `INIT_SECONDS`."""
    # `Settings.silent` takes effect too late for the message about credentials.
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_SECONDS,
        finish_timeout=_FINISH_SECONDS,
        # If the process is killed, the rows of the last interval are lost: the next start does not send them again.
        # The default is 15 s.
        x_transaction_log_flush_interval=0.05,
    )
    run = None
    if mode == "online":
        try:
            run = wandb.init(**arguments, mode="online", resume="allow", settings=settings)
        except Exception as error:
            _log.warning("W&B cannot be reached; continuing offline: %s", error)
            wandb.teardown()  # otherwise the failed attempt keeps the run id in use
    if run is None:
        run = wandb.init(**arguments, mode="offline", settings=settings)
    run.define_metric("*", step_metric="train/global_step")
    run.define_metric("probe/*", step_metric=PROBE_STEP)
    return run


def _send(run: Any, row: tuple[int, dict[str, Any]] | None) -> None:
    if row is not None:
        step, values = row
        run.log(values, step=step, commit=True)


def log_wandb_artifact(run: Any, folder: Path, name: str) -> None:
    """Upload a folder as a model artifact."""
    import wandb

    artifact = wandb.Artifact(name, type="model")
    artifact.add_dir(str(folder), skip_cache=True, policy="immutable")  # no second copy on disk
    run.log_artifact(artifact, aliases=["final_model"])


def finish_wandb(run: Any) -> None:
    import wandb

    run.finish()
    # Wait for W&B's process, which writes the run's file: killing the worker before it exits could lose the file's end.
    wandb.teardown()
