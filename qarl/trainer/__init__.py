"""The training loop of the local backend, and what it needs."""
