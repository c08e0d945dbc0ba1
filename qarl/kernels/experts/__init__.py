"""Low-bit experts: grouped products, and the expert layer with its straight-through backward."""
