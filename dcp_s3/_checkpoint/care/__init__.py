"""Looking at checkpoints, verifying, and removing what is left over. No torch."""
