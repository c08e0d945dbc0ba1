"""Updates of low-precision parameters: Muon and AdamW in FP32, and stochastic rounding. Both backends use them."""
