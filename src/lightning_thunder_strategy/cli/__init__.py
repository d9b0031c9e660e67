"""``python -m lightning_thunder_strategy``: commands."""
