"""Adapters (LoRA) on the linears of a frozen base, with the rollout engine's arithmetic and peft's names."""
