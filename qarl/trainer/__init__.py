"""The training loop of the local backend and its parts."""
