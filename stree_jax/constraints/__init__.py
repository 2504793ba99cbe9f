"""Constraints of texts: regular expressions and JSON schemas as token automata."""
