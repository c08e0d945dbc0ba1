"""The training loop of the local backend. The other backends use some of its parts, such as the policy."""
