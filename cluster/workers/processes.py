"""Names of separate processes, by which manifests find them, too."""

DRIVER = "cluster.workers.driver"  # Ray's driver of a training run: `python -m`
JOB_COMMAND = "bertrain job"  # the command of a submitted job
