"""What made the figures of the docs (`proofs/`, `results/`), and faults that the tests must notice (`faults.py`)."""
