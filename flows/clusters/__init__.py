"""Batch scripts of Slurm and manifests of KubeRay for the cluster of a profile, from templates."""
