"""Reads adapters of peft and merges them into the tensors of their base model."""
