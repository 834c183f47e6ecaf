"""Replaces the command that follows a run: records how it was started, then sleeps or fails if an argument says so."""

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    run = Path(sys.argv[2])
    facts = {
        "pid": os.getpid(),
        "nice": os.nice(0),
        "cores": len(os.sched_getaffinity(0)),
        "words": sys.argv[1:],
        "environment": dict(os.environ),
    }
    (run / "fake.json.tmp").write_text(json.dumps(facts))
    time.sleep(0.2)  # until the launcher has set priority and cores
    facts |= {"nice": os.nice(0), "cores": len(os.sched_getaffinity(0))}
    (run / "fake.json.tmp").write_text(json.dumps(facts))
    (run / "fake.json.tmp").replace(run / "fake.json")
    names = [Path(word).name for word in sys.argv]
    time.sleep(60 if "sleep" in names else 0)
    sys.exit(7 if "fail" in names else 0)
