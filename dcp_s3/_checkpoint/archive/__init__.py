"""The archives of torch.save that tensors lie in: ours, and other writers'."""
