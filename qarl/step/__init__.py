"""What every backend does in a training step: compare with the engine, choose old log-probs, count, log samples."""
