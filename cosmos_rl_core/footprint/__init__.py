"""Memory and arithmetic of passes through a pipeline's modules, counted without weights and without their numbers."""
