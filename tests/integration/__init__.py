"""Tests that DCP saves and loads through the package, on real servers, as it does through its own writers and readers."""
