"""When stages run: Prefect flows. Nothing here imports torch."""
