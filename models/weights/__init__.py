"""Formats that weights are stored in, and products with them."""
