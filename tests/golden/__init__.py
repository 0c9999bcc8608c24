"""Checkpoints of released versions, kept as bytes."""
