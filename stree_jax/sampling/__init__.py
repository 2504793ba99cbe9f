"""Turns logits into the distribution from which each row's tokens are drawn."""
