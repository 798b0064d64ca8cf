"""Models, samplers, losses, rewards and storage. Imports no stage, no run and no Prefect."""
