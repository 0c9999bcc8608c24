"""Tests that every S3 store, and every view of it that the package takes, must pass."""
