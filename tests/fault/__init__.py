"""The fault suite: what happens to a checkpoint when the store, the network or a process fails."""
