"""Networks that only draft: Medusa heads, block drafters, EAGLE and MTP layers."""
