"""Run a plan: waves of stages, the devices they take, and the flow that holds them."""
