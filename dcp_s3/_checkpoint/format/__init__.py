"""What a checkpoint looks like in the bucket. No torch."""
