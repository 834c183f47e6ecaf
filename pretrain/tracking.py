"""What a run says about itself: metrics.jsonl is the truth, W&B mirrors it, the terminal follows it.

`Tracker` writes (rank 0), `read_records` reads, `follow` draws the live line in the driver, and
`quiet_logging` keeps the noise of libraries in the run's logs. Training never waits for the network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import netrc
import os
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pretrain.config import Run
from pretrain.errors import InputError
from pretrain.files import atomic_open, disk_errors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

METRICS = "metrics.jsonl"

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
    "peak_fraction": "throughput/device/mfu",
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


class Tracker:
    """Writes a run's metrics.jsonl and mirrors it to W&B; does nothing at all unless `enabled` (rank 0).

    Args:
        config: the run; `config.tracking` says how W&B is used.
        run_dir: the run folder, created where missing.
        run_id: the id kept in the checkpoint that is resumed, also the W&B id; None starts a new one.
        step: optimizer steps already taken; records past it are of an abandoned continuation and are dropped.
        card: what is known of the data, stored in the W&B config beside the run's.
        job_type: W&B's name for runs of this kind.
        enabled: true on rank 0 alone.

    Raises:
        InputError: metrics.jsonl is damaged before its last line, or W&B is to be online and no key is set.
    """

    def __init__(
        self,
        config: Run,
        run_dir: Path,
        *,
        run_id: str | None,
        step: int,
        card: dict[str, Any],
        job_type: str,
        enabled: bool,
    ) -> None:
        self.run_id = run_id or config.tracking.run_id or f"{config.name}-{secrets.token_hex(4)}"
        self._file = None
        self._wandb = None
        if not enabled:
            return
        mode = wandb_mode(config.tracking.wandb)
        path = run_dir / METRICS
        with disk_errors(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            _keep_until(path, step if run_id else -1)
            # Unbuffered: what `log` wrote is the system's, and a full disk is told at once and once.
            self._file = path.open("ab", buffering=0)
        if mode != "off":
            self._wandb = _WandbMirror(mode, _wandb_arguments(config, run_dir, self.run_id, card, job_type))

    def log(self, record: dict[str, Any]) -> None:
        """Append one record (fields in README.md, "The run folder"); NaN and infinities are written as null."""
        if self._file is None:
            return
        record = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with disk_errors(Path(self._file.name)):
            # A kill can tear the last line only, and the next start cuts that off.
            rest = json.dumps(record, allow_nan=False).encode() + b"\n"
            while rest:
                rest = rest[self._file.write(rest) :]
        if self._wandb is not None:
            self._wandb.log(wandb_names(record))

    def log_events(self, events: Iterable[dict[str, Any]], step: int) -> None:
        """Record what happened before this start, such as the crash that it follows: "event", "time" and "message"."""
        for event in events:
            self.log({**event, "step": step})

    def rewind(self, step: int) -> None:
        """Drop the records past `step`, which is trained from anew."""
        if self._file is not None:
            path = Path(self._file.name)
            with disk_errors(path):
                self._file.close()
                _keep_until(path, step)
                self._file = path.open("ab", buffering=0)

    @property
    def mirrored(self) -> bool:
        """Whether W&B gets what is logged, now or by a later `wandb sync`."""
        return self._wandb is not None

    def log_artifact(self, folder: Path) -> None:
        """Log an exported checkpoint as W&B model artifact `model-<run id>`; its files are not copied."""
        if self._wandb is not None:
            self._wandb.log_artifact(folder, f"model-{self.run_id}")

    def close(self) -> None:
        """Make the file durable and let W&B finish; waits for its network under a minute."""
        if self._file is not None:
            with disk_errors(Path(self._file.name)):
                os.fsync(self._file.fileno())
                self._file.close()
            self._file = None
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run's metrics.jsonl in file order; [] without one. A torn last line is left out.

    Raises `InputError` with the line's number where anything before the last line is no JSON object.
    """
    path = run_dir / METRICS
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise InputError(f"{path}:{number}: not a JSON object. Remove the line, or restore the file.")
    return records


def note_end(run_dir: Path, event: str, message: str) -> None:
    """Add the event that a run has ended with; nothing where it has no record yet."""
    records = read_records(run_dir)
    steps = [record["step"] for record in records if is_training(record)]
    if not steps:
        return
    records.append({"event": event, "step": max(steps), "time": time.time(), "message": message})
    with disk_errors(run_dir), atomic_open(run_dir / METRICS, "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def is_training(record: dict[str, Any]) -> bool:
    """Whether a record is of training steps, and not of an evaluation or an event."""
    return "split" not in record and "event" not in record


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


def quiet_logging(log_file: Path) -> None:
    """Send Python logging and warnings of every library to `log_file` instead of the terminal.

    Libraries such as DeepSpeed and torch give their own loggers a handler on the terminal when imported: what
    they did before is undone, and what they do later is not let through. Calling it again changes the file.
    """
    with disk_errors(log_file):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        to_file = _LogFile(log_file, encoding="utf-8")
    for handler in [h for h in logging.root.handlers if isinstance(h, _LogFile) or _on_terminal(h)]:
        logging.root.removeHandler(handler)
        handler.close()
    logging.root.addHandler(to_file)
    logging.root.setLevel(min(logging.root.level, logging.INFO))
    logging.setLoggerClass(_QuietLogger)
    for logger in [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]:
        for handler in [h for h in logger.handlers if _on_terminal(h)]:
            logger.removeHandler(handler)
            logger.propagate = True
    logging.captureWarnings(True)


@contextlib.contextmanager
def follow(run_dir: Path, total_steps: int, console: Console | None = None) -> Iterator[None]:
    """Draw the run's progress on the terminal from its metrics.jsonl, for as long as the block lasts.

    One live line with step, loss, accuracy, useful tokens/s, share of peak, data stall and time left;
    evaluations stay as lines above it. Where stdout is no terminal, a plain line comes every 30 s.
    """
    from rich.console import Console as RichConsole

    console = console or RichConsole(highlight=False, soft_wrap=True)
    progress = _Progress(run_dir, total_steps, console)
    progress.poll()  # what is there already is where the run goes on from
    stop = threading.Event()
    draw = _draw_live if console.is_terminal else _print_plain
    thread = threading.Thread(target=draw, args=(progress, stop), name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# ---- metrics.jsonl


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _keep_until(path: Path, step: int) -> None:
    """Rewrite metrics.jsonl, where needed, so that whole records up to `step` are left, in their order.

    Events past it are left too, for a run that goes on: that it was set back does not undo what happened.
    """
    if not path.is_file():
        return
    lines = [
        json.dumps(record)
        for record in read_records(path.parent)
        if record.get("step", 0) <= step or ("event" in record and step >= 0)
    ]
    text = "".join(f"{line}\n" for line in lines)
    if text.encode() != path.read_bytes():
        with atomic_open(path, "w") as file:
            file.write(text)


# ---- W&B


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
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _wandb_arguments(
    config: Run, run_dir: Path, run_id: str, card: dict[str, Any], job_type: str
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


class _WandbMirror:
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


# ---- logging


def _on_terminal(handler: logging.Handler) -> bool:
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in terminal


class _LogFile(logging.FileHandler):
    """Everything from INFO up; of W&B, which keeps its own debug.log in the run folder, only warnings."""

    def __init__(self, path: Path, encoding: str) -> None:
        super().__init__(path, encoding=encoding)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.setLevel(logging.INFO)
        self.addFilter(lambda it: it.levelno >= logging.WARNING or not it.name.startswith("wandb"))


class _QuietLogger(logging.Logger):
    """A logger whose records all reach the root logger and that takes no handler on the terminal."""

    @property
    def propagate(self) -> bool:
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    def addHandler(self, hdlr: logging.Handler) -> None:
        if not _on_terminal(hdlr):
            super().addHandler(hdlr)


# ---- the live line

_REFRESH_SECONDS = 0.25
_PLAIN_SECONDS = 30.0
_SETTLING_SECONDS = 2.0  # records that come within less say nothing about the pace


class _Tail:
    """New records of metrics.jsonl since the last look, also when the file is replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(complete new records, whether the file was replaced or is seen for the first time)."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                fresh = status.st_ino != self._inode or status.st_size < self._offset
                if fresh:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.splitlines() if (record := _parse(line)) is not None], fresh


class _Progress:
    """State of the live line: what the records said so far, and how fast they come."""

    def __init__(self, run_dir: Path, total_steps: int, console: Console) -> None:
        self.console = console
        self.total_steps = total_steps
        self.started = time.monotonic()
        self.last: dict[str, Any] = {}
        self._run_dir = run_dir
        self._tail = _Tail(run_dir / METRICS)
        self._old_file = (run_dir / METRICS).exists()
        self._news = False
        self._pace: deque[tuple[float, float]] = deque(maxlen=60)  # (clock, work done), for the time left
        self._best = math.inf
        self._phases: list[tuple[int, int, int]] = []

    def poll(self) -> None:
        """Take in what is new; say evaluations and restarts on lines of their own."""
        records, fresh = self._tail.read()
        if not records and not fresh:
            return
        # What stood in the file before this start (or restart) is where it goes on from, not news.
        history = fresh and (self._old_file or bool(self.last))
        self._old_file = True
        if history:
            self.last, self._news, self._best = {}, False, math.inf
            self._pace.clear()
        for record in records:
            if not history and not self._news and self.last:
                self.console.print(f"  going on from step {self.step:,}", style="dim")
            self._news = self._news or not history
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if "event" in record:
            if self._news:
                self.console.print(
                    f"  step {record['step']:,}: {record['message']}", style="yellow", markup=False
                )
            return
        if record.get("split") == "validation":
            loss = record.get("loss")
            best = record.get("best", loss is not None and loss < self._best)
            self._best = loss if best and loss is not None else self._best
            if self._news:
                self.console.print(_evaluation_line(record, best))
            return
        self.last = record
        if self._news:
            self._pace.append((time.monotonic(), self._work(self.step)))

    @property
    def started_training(self) -> bool:
        """Whether anything was heard since this start."""
        return self._news and bool(self.last)

    @property
    def step(self) -> int:
        return self.last.get("step", 0)

    def seconds_left(self) -> float | None:
        """From the pace of the last records; a later phase costs by its tokens. None until it can be said."""
        if len(self._pace) < 2:
            return None
        (before, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first or now - before < _SETTLING_SECONDS:
            return None
        left = (self._work(self.total_steps) - last) * (now - before) / (last - first)
        return max(0.0, left - (time.monotonic() - now))

    def phase(self) -> str:
        """`phase 1/2 (128)`: number and sequence length, from the run's config; empty if there is but one."""
        phases = self._read_phases()
        step = self.step
        for number, (steps, _, length) in enumerate(phases, 1):
            if step <= steps or number == len(phases):
                return f"phase {number}/{len(phases)} ({length})" if len(phases) > 1 else ""
            step -= steps
        return ""

    def _work(self, step: int) -> float:
        """Work of the first `step` steps, in tokens at most (steps where the config is not there)."""
        work = 0.0
        for steps, sequences, length in self._read_phases():
            work += min(step, steps) * sequences * length
            step -= min(step, steps)
        return work or float(step)

    def _read_phases(self) -> list[tuple[int, int, int]]:
        """(steps, global sequences, sequence length) of each phase; [] until the run's config is written."""
        if not self._phases:
            import yaml

            with contextlib.suppress(OSError, yaml.YAMLError, KeyError, TypeError):
                config = yaml.safe_load((self._run_dir / "config.yaml").read_text(encoding="utf-8"))
                self._phases = [
                    (int(phase["steps"]), int(phase["global_sequences"]), int(phase["sequence_length"]))
                    for phase in config["phases"]
                ]
        return self._phases


def _draw_live(progress: _Progress, stop: threading.Event) -> None:
    from rich.live import Live

    with Live(console=progress.console, auto_refresh=False) as live:
        while True:
            last_look = stop.is_set()
            progress.poll()
            live.update(_live_line(progress, progress.console.width), refresh=True)
            if last_look:
                return
            stop.wait(_REFRESH_SECONDS)


def _print_plain(progress: _Progress, stop: threading.Event) -> None:
    said, said_step = time.monotonic(), 0
    while True:
        last_look = stop.is_set()
        progress.poll()
        due = said_step == 0 or last_look or time.monotonic() - said >= _PLAIN_SECONDS
        if due and progress.started_training and progress.step > said_step:
            progress.console.print("  ".join(_pieces(progress).values()))
            said, said_step = time.monotonic(), progress.step
        if last_look:
            return
        stop.wait(_REFRESH_SECONDS)


def _pieces(progress: _Progress) -> dict[str, str]:
    """What there is to say, in the order it is shown."""
    last = progress.last
    left = progress.seconds_left()
    pieces = {
        "phase": progress.phase(),
        "step": f"step {progress.step:,}/{progress.total_steps:,}",
        "loss": _piece(last.get("loss"), "loss {:.3f}"),
        "mlm": _piece(last.get("mlm_accuracy"), "mlm {:.1%}"),
        "nsp": _piece(last.get("nsp_accuracy"), "nsp {:.1%}"),
        "speed": _piece(last.get("tokens_per_second"), "{:,.0f} tokens/s"),
        "peak": _piece(last.get("peak_fraction"), "{:.0%} of peak"),
        "stall": _piece(last.get("data_stall_fraction"), "stall {:.1%}"),
        "skipped": _piece(last.get("skipped_steps") or None, "{:,} skipped"),
        "left": "" if left is None else f"{clock(left)} left",
    }
    return {key: text for key, text in pieces.items() if text}


def _piece(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


# What is left out first when the terminal is narrow comes last.
_PRIORITY = ("step", "loss", "left", "skipped", "speed", "mlm", "peak", "phase", "nsp", "stall")
_STYLES = {
    "loss": "bold", "mlm": "green", "nsp": "green", "speed": "cyan", "peak": "cyan", "skipped": "yellow",
    "left": "magenta",
}  # fmt: skip


def _live_line(progress: _Progress, width: int) -> Text:
    from rich.text import Text

    if not progress.started_training:
        spin = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(time.monotonic() / _REFRESH_SECONDS) % 10]
        return Text(f"{spin} starting the workers, {clock(time.monotonic() - progress.started)}", style="dim")
    pieces = _pieces(progress)
    shown: set[str] = set()
    bar_width = max(0, min(24, width // 6))
    room = width - 1 - bar_width - 2
    for key in _PRIORITY:
        if key in pieces and len(pieces[key]) + 2 <= room:
            shown.add(key)
            room -= len(pieces[key]) + 2
    line = Text(no_wrap=True, overflow="crop")
    line.append_text(_bar(progress.step / max(1, progress.total_steps), bar_width)).append("  ")
    for key, text in pieces.items():
        if key in shown:
            line.append(text, style=_STYLES.get(key, "")).append("  ")
    return line


def _bar(share: float, width: int) -> Text:
    from rich.text import Text

    full = round(min(1.0, share) * width)
    return Text("━" * full, style="cyan").append("━" * (width - full), style="bright_black")


def _evaluation_line(record: dict[str, Any], best: bool) -> Text:
    from rich.text import Text

    line = Text(f"  step {record.get('step', 0):,} held-out", style="dim", no_wrap=True, overflow="crop")
    for name, value in _shown_scores(record):
        line.append("  ").append(f"{name} {value}", style="default not dim bold")
    return line.append("  best" if best else "", style="default not dim green")


_SCORES = {
    "mlm_loss": ("mlm loss", "{:.3f}"),
    "mlm_accuracy": ("mlm", "{:.1%}"),
    "nsp_accuracy": ("nsp", "{:.1%}"),
}
_MOST_SCORES = 4


def _shown_scores(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and figures of an evaluation: pretraining's own, or the first few of any other task's."""
    known = {key: shown for key, shown in _SCORES.items() if record.get(key) is not None}
    if known:
        return [(name, form.format(record[key])) for key, (name, form) in known.items()]
    others = [(key, value) for key, value in record.items() if isinstance(value, float) and key != "seconds"]
    return [(key.replace("_", " "), f"{value:.3f}") for key, value in others[:_MOST_SCORES]]


def clock(seconds: float) -> str:
    """0:07, 12:31, 3:02:05, 4 d 03:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
