"""The functions that generate and score text, and what they return."""
