"""The path of a load."""
