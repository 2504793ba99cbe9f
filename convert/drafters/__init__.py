"""Reads and writes published drafters: block drafters (DFlash, DFlash2, DSpark) and
EAGLE."""
