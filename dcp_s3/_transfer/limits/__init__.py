"""What bounds a request in time, bytes, tries and CPU."""
