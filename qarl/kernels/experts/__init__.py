"""Low-bit experts: grouped products, and the whole expert layer with its straight-through backward."""
