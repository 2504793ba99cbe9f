"""Restricts generated text to regular expressions, such as those of JSON schemas."""
