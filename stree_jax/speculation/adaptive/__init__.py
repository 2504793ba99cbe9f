"""Tree "auto", which chooses at every step how many tokens to draft, and which."""
