"""From logits to the distribution that each row's tokens are drawn from."""
