"""Reading pickles of DCP and of torch.save without running what is in them."""
