"""Tags of flow runs, by which people and the automation for crashed flow runs find them in Prefect."""

PROJECT = "cosmos-flows"
"""Tag of every flow run of this project, so that other flow runs on a shared server are left alone."""


def tags_of(algorithm: str, model: str) -> set[str]:
    """Return the tags of a run by its algorithm and the name of its model plugin."""
    return {PROJECT, algorithm, model}
