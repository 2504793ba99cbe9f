"""Bytes and seconds: what a generation holds and reads, how long its steps take, and
which drafter, tree and dtype fit a limit.
"""
