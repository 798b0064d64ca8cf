"""What the stages that train share."""
