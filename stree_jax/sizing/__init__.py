"""Predicts the memory, memory traffic and step times of a generation, and finds the
fastest drafter, tree and dtype that fit a memory limit.
"""
