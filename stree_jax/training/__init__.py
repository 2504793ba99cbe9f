"""How the bundled pair was made: text, recipes, training and distillation."""
