"""Optimizers of both backends: Muon and AdamW in FP32, and stochastic rounding to BF16."""
