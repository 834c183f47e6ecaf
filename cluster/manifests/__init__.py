"""Manifests for real clusters, made from the config of a run: KubeRay, `ray up` on AWS, SLURM."""
