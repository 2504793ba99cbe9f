"""Tree "auto": at every step it chooses how many tokens to draft, and which."""
