"""Training: text, recipes, training loop, distillation, draft heads and n-grams."""
