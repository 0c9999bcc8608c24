"""How bytes move between memory and an S3 endpoint. Knows nothing of torch or of checkpoints."""
