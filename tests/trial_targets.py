"""Functions that Ray Tune runs in tests of cluster.workers.trials; they record their calls in the working directory."""

import os
import signal
import time
from pathlib import Path

from pretrain.common.errors import DivergedError
from pretrain.common.worker import TrainingRequest, Worker


def trial(request: TrainingRequest, worker: Worker) -> None:
    """Do what "do" in the config says: wait for another trial, be killed once, diverge, or raise another error."""
    config = request.config
    do, trace = config["do"], Path(f"starts-{config['name']}")
    before = trace.read_text().count("\n") if trace.exists() else 0
    with trace.open("a") as file:
        file.write(f"{worker.threads} {os.getpid()}\n")
    if do == "meet":
        deadline = time.monotonic() + 120
        while not Path(f"starts-{config['other']}").exists():
            assert time.monotonic() < deadline, "the other trial did not start"
            time.sleep(0.05)
    elif do == "die once" and before == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "diverge":
        raise DivergedError("step 3: loss is NaN.")
    elif do == "bug":
        raise ZeroDivisionError("a bug\nin two lines")
