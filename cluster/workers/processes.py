"""The modules that run as processes of their own, `python -m NAME`. Manifests find these processes by name, too."""

DRIVER = "cluster.workers.driver"  # Ray's driver of a training run
JOB_ENTRYPOINT = "cluster.jobs.entrypoint"  # what the cluster runs for a submitted job
