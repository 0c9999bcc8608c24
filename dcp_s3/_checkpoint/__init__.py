"""What a checkpoint is: its layout, records, index, commit and clean-up. Knows nothing of DCP's call order."""
