"""The path of a save."""
