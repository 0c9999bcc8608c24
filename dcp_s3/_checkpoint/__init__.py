"""What a checkpoint is: its layout, records, manifest, commit and clean-up. Knows nothing of DCP's call order."""
