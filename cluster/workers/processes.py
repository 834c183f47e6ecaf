"""Commands that start separate processes; stop scripts in manifests find the processes by them."""

DRIVER = "cluster.workers.driver"  # module of a training run's Ray driver, after `python -m`
JOB_COMMAND = "bertrain job"  # the command of a submitted job
