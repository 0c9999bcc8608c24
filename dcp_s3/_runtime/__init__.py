"""What belongs to the process: its loop thread, and the pauses of its garbage collector."""
