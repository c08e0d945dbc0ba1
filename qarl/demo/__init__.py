"""The tiny models, their tasks and data, and `qarl demo`, which makes them and runs a shipped config."""
