"""Conversations of several turns: what a turn, a context and the mask of the model's tokens are, for every backend."""
