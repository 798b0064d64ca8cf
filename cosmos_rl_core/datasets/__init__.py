"""Datasets: prompt sets and media sets with random access by stable id, one file per dataset."""
