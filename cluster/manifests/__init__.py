"""Manifests for real clusters, made from the config of a run: KubeRay, SLURM."""
