"""Commands for what runs need: Prefect, GPUs, stores, services."""
