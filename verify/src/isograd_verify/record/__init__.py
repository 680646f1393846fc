"""What was seen, as files: events by line and tensors by step. Every other room of the verifier stands on it."""
