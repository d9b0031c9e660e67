"""States and checkpoints of Fabric on several ranks."""
