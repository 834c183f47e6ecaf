"""What runs as processes of their own. Manifests find these processes by name, too."""

DRIVER = "cluster.workers.driver"  # Ray's driver of a training run: `python -m`
JOB_COMMAND = "bertrain job"  # what the cluster runs for a submitted job
