"""What made the figures of the docs, each a function that can be run again: `python -m benchmarks.proofs --list`."""
