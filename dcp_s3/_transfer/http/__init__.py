"""Bodies over HTTP: connections, and the memory that they are sent from and received into."""
