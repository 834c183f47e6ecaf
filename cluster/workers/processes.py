"""Commands of separate processes, with which manifests also find these processes."""

DRIVER = "cluster.workers.driver"  # Ray's driver of a training run: `python -m`
JOB_COMMAND = "bertrain job"  # the command of a submitted job
