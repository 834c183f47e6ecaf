"""Commands of separate processes, by which the stop scripts in manifests find these processes."""

DRIVER = "cluster.workers.driver"  # module of a training run's Ray driver, which runs as `python -m MODULE`
JOB_COMMAND = "bertrain job"  # the command of a submitted job
