"""How a state dict is copied into kept, shared buffers, so that training may go on while it is uploaded."""
