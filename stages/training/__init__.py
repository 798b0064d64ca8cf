"""Code shared by the stages that train."""
