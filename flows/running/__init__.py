"""Run a plan: waves of stages, the devices they take, the flow around them."""
