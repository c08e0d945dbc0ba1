"""Expert layers with low-bit weights, and their straight-through backward."""
