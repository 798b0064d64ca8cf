"""How things are computed: models, samplers, losses, rewards, storage. Knows nothing of stages, runs or Prefect."""
