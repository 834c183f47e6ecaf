"""Manifests for clusters (KubeRay, SLURM), rendered from the config of a run."""
